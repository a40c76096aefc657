/* The C ABI of vpmm: GPU memory pools on CUDA's virtual memory management.
   Made by cbindgen from vpmm-capi/src: see vpmm-capi/tests/header.rs.

   What holds for every function that does not say otherwise:
   - A status other than VPMM_OK is a failure, whose text `vpmm_last_error` has. What a function writes
     through its pointers it writes on success only.
   - Any thread may call it, with the same handles too. A handle is given back once, by its `release`
     function, and used by nobody while or after that; null is no handle, and ignored there.
   - A structure that begins with its size goes to its `init` function first: the program's header may be
     older than the library.
   - `stream` is a cudaStream_t, which is a CUstream. Null and 1 are the legacy default stream, 2 is the
     calling thread's own (cudaStreamPerThread).
   - In a child of the process (a fork) what needs the driver answers VPMM_FORKED. */

#ifndef VPMM_H
#define VPMM_H

#include <stddef.h>
#include <stdint.h>

/**
 * In `vpmm_process_configure`: for every device that has no options of its own.
 */
#define VPMM_EVERY_DEVICE 4294967295

/**
 * What a function answers. Further kinds may be added.
 */
typedef enum vpmm_status {
  /**
   * It was done.
   */
  VPMM_OK = 0,
  /**
   * An argument is null, or no function can be asked for that.
   */
  VPMM_INVALID_ARGUMENT = 1,
  /**
   * There is no memory for it.
   */
  VPMM_OUT_OF_MEMORY = 2,
  /**
   * No CUDA driver, or too old a one.
   */
  VPMM_NO_DRIVER = 3,
  /**
   * The driver answered with an error.
   */
  VPMM_DRIVER_ERROR = 4,
  /**
   * The context is destroyed, or the device has failed for good.
   */
  VPMM_CONTEXT_LOST = 5,
  /**
   * The device, the driver or the pool cannot do that.
   */
  VPMM_UNSUPPORTED = 6,
  /**
   * The pointer is no allocation of the pool's, or is inside one.
   */
  VPMM_BAD_POINTER = 7,
  /**
   * The allocation was freed already.
   */
  VPMM_DOUBLE_FREE = 8,
  /**
   * The stream is of another device or context, or captures a graph.
   */
  VPMM_BAD_STREAM = 9,
  /**
   * Others have handles of the pool.
   */
  VPMM_IN_USE = 10,
  /**
   * The process was forked: a driver does not work in the child.
   */
  VPMM_FORKED = 11,
  /**
   * The pool's books are wrong: a defect of the library, or memory that was overwritten.
   */
  VPMM_CORRUPT = 12,
  /**
   * A defect of the library, caught.
   */
  VPMM_PANIC = 13,
  /**
   * Anything else: the text says what.
   */
  VPMM_OTHER = 14,
  /**
   * What it is asked of is not in the state for it: asleep, awake, exported, begun, released.
   */
  VPMM_BAD_STATE = 15,
  /**
   * Nothing has that name.
   */
  VPMM_NOT_FOUND = 16,
  /**
   * A file, a socket, or what came through it.
   */
  VPMM_IO_ERROR = 17,
  /**
   * The lock was not to be had in the time for it.
   */
  VPMM_TIMED_OUT = 18,
  /**
   * No server could be reached, or the connection to it has failed.
   */
  VPMM_DISCONNECTED = 19,
  /**
   * The server would not do it: the text is its own.
   */
  VPMM_REFUSED = 20,
  /**
   * The layout is not the one whose addresses were kept.
   */
  VPMM_STALE = 21,
  /**
   * The system would not start the thread that a pool is to have of its own: without one it can be made.
   */
  VPMM_NO_THREAD = 22,
  /**
   * A signal ended a wait: see `vpmm_gms_set_interruptible` and `vpmm_gms_set_check`.
   */
  VPMM_INTERRUPTED = 23,
} vpmm_status;

/**
 * The kind of a pool.
 */
typedef enum vpmm_profile {
  /**
   * Placed to 512 bytes, in extents of many sizes.
   */
  VPMM_PROFILE_DEFAULT = 0,
  /**
   * Whole pages, one physical handle each.
   */
  VPMM_PROFILE_PAGED = 1,
} vpmm_profile;

/**
 * How a pool's memory can be shared with other processes.
 */
typedef enum vpmm_sharing {
  /**
   * Not at all.
   */
  VPMM_SHARING_NONE = 0,
  /**
   * By file descriptors, with processes of this machine.
   */
  VPMM_SHARING_FILE_DESCRIPTOR = 1,
  /**
   * By fabric handles, with processes of every machine on the NVLink fabric.
   */
  VPMM_SHARING_FABRIC = 2,
} vpmm_sharing;

/**
 * Where a pool's memory is.
 */
typedef enum vpmm_location {
  /**
   * On the device.
   */
  VPMM_LOCATION_DEVICE = 0,
  /**
   * On the host.
   */
  VPMM_LOCATION_HOST = 1,
  /**
   * On one NUMA node of the host.
   */
  VPMM_LOCATION_HOST_NUMA = 2,
} vpmm_location;

/**
 * A way in which a stream gets no memory that another stream freed.
 */
typedef enum vpmm_reuse_off {
  /**
   * Not where the pool finds by an event that the other stream has come past the free.
   */
  VPMM_REUSE_OFF_OPPORTUNISTIC = 1,
  /**
   * Not by a wait on the GPU that the pool adds.
   */
  VPMM_REUSE_OFF_INTERNAL_DEPENDENCIES = 2,
} vpmm_reuse_off;

/**
 * What else a pool's memory is for.
 */
typedef enum vpmm_pool_flag {
  /**
   * Network cards and other devices of the bus may reach it, by GPUDirect RDMA, as they may what cudaMalloc gives;
   * in a paged pool not what is smaller than a page. Each mapping takes the driver a tenth longer.
   */
  VPMM_POOL_GPU_DIRECT_RDMA = 1,
} vpmm_pool_flag;

/**
 * What becomes of what a heap's memory holds while the heap sleeps.
 */
typedef enum vpmm_contents {
  /**
   * It is lost.
   */
  VPMM_CONTENTS_DISCARD = 0,
  /**
   * It is copied to page-locked memory of the host, which is given back when the heap wakes.
   */
  VPMM_CONTENTS_KEEP = 1,
  /**
   * The same, but that the host's memory is kept for the next time: to lock pages takes longer than
   * to copy.
   */
  VPMM_CONTENTS_KEEP_BUFFERS = 2,
  /**
   * It is written to a file.
   */
  VPMM_CONTENTS_SAVE = 3,
} vpmm_contents;

/**
 * What a device may do with memory.
 */
typedef enum vpmm_access {
  /**
   * Nothing.
   */
  VPMM_ACCESS_NONE = 0,
  /**
   * Read.
   */
  VPMM_ACCESS_READ = 1,
  /**
   * Read and write.
   */
  VPMM_ACCESS_READ_WRITE = 3,
} vpmm_access;

/**
 * The locks that a client may ask for.
 */
typedef enum vpmm_gms_lock {
  /**
   * To write a new layout. Whatever was published before is gone.
   */
  VPMM_GMS_RW = 0,
  /**
   * To read the published layout, with others.
   */
  VPMM_GMS_RO = 1,
  /**
   * To read if something is published, else to write.
   */
  VPMM_GMS_RW_OR_RO = 2,
  /**
   * To write to the memory of a sealed layout, else to write a new one.
   */
  VPMM_GMS_RW_DATA_OR_RW = 3,
} vpmm_gms_lock;

/**
 * The locks that a client has.
 */
typedef enum vpmm_gms_grant {
  /**
   * None: it is not connected.
   */
  VPMM_GMS_GRANT_NONE = 0,
  /**
   * It writes a layout.
   */
  VPMM_GMS_GRANT_RW = 1,
  /**
   * It reads.
   */
  VPMM_GMS_GRANT_RO = 2,
  /**
   * It writes to the memory of a layout that stays as it is.
   */
  VPMM_GMS_GRANT_RW_DATA = 3,
} vpmm_gms_grant;

/**
 * A driver that was loaded. Whatever was made with it keeps it.
 */
typedef struct vpmm_driver vpmm_driver;

/**
 * A whole pool on its way to another process.
 */
typedef struct vpmm_export vpmm_export;

/**
 * A client of a server, with what this process has mapped through it.
 */
typedef struct vpmm_gms vpmm_gms;

/**
 * A heap of the service's memory.
 */
typedef struct vpmm_gms_heap vpmm_gms_heap;

/**
 * A pool for the memory of one CUDA graph, or of several that never run at the same time.
 */
typedef struct vpmm_graph_pool vpmm_graph_pool;

/**
 * Memory of another process's pool, mapped in this one.
 */
typedef struct vpmm_import vpmm_import;

/**
 * A pool.
 */
typedef struct vpmm_pool vpmm_pool;

/**
 * A resource: something that gives out memory.
 */
typedef struct vpmm_resource vpmm_resource;

/**
 * A function that was registered.
 */
typedef struct vpmm_shortage vpmm_shortage;

/**
 * A heap beside a pool's main one, whose memory sleeps and wakes as one.
 */
typedef struct vpmm_tagged vpmm_tagged;

/**
 * What a pool is made with: set by `vpmm_pool_options_init`, then changed. What is set for a pool of the
 * other profile is `VPMM_INVALID_ARGUMENT`. Nothing is read from the environment.
 */
typedef struct vpmm_pool_options {
  /**
   * The bytes of this structure, as the program was built with it.
   */
  size_t size;
  /**
   * The device's number. At first 0.
   */
  uint32_t device;
  /**
   * A `vpmm_profile`. At first the default one.
   */
  uint32_t profile;
  /**
   * The most bytes of device memory that the pool may hold; 0, as at first, for no limit.
   */
  uint64_t limit_bytes;
  /**
   * Bytes of addresses to reserve; 0, as at first, for the profile's own measure.
   */
  uint64_t va_size_bytes;
  /**
   * Free memory beyond this goes back to the device when the host has waited for a stream or the
   * device. At first `UINT64_MAX`: none does.
   */
  uint64_t release_threshold_bytes;
  /**
   * How long a request waits on the host for memory that was freed but is still in use: 0 not at
   * all, `UINT64_MAX`, as at first, for what was freed until then, anything else so many nanoseconds
   * for whatever comes.
   */
  uint64_t wait_nanoseconds;
  /**
   * Pages that a paged pool maps when it is made. At first 0.
   */
  uint64_t initial_pages;
  /**
   * The bytes of a paged pool's pages; 0, as at first, for the device's granule.
   */
  uint64_t page_size_bytes;
  /**
   * Where only other streams' memory is free: 0, as at first, the profile's own way, 1 grow first,
   * 2 take it with a wait on the GPU first.
   */
  uint32_t pending_policy;
  /**
   * How the memory can be shared with other processes, a `vpmm_sharing`. At first not at all.
   */
  uint32_t sharing;
  /**
   * Where the memory is, a `vpmm_location`. At first on the device.
   */
  uint32_t location;
  /**
   * The number of the host's NUMA node, for `VPMM_LOCATION_HOST_NUMA`.
   */
  uint32_t numa_node;
  /**
   * Ways in which a stream gets no memory that another stream freed, a sum of `vpmm_reuse_off`. At
   * first 0: all ways are on.
   */
  uint32_t reuse_off;
  /**
   * Extents of a default pool that may move each second where new memory could be had instead, and
   * handles that shorter extents may take beyond the need; 0, as at first, for the pool's own
   * measure. 1 is next to none, for the least of the host's time; more hold less memory.
   */
  uint32_t moves_per_second;
  /**
   * How long a request of a default pool may look whether memory that other streams freed becomes
   * ready, before the pool grows; in sum never for more than a 64th of the time since the pool was
   * made, nor for more than 64 ms and a 1024th of it. Where it is more than 0, and
   * `VPMM_REUSE_OFF_INTERNAL_DEPENDENCIES` is not set, the stream first waits on the GPU for one
   * block of such memory, 128 times and 16 times more each second. Both for requests of more than
   * 64 KiB only. `UINT64_MAX`, as at first, for the pool's own measure: 0, but 20 ms in the
   * process's own pools, which are for programs that would rather hold less.
   */
  uint64_t patience_nanoseconds;
  /**
   * The time between two looks of a thread of a default pool's own, which makes what streams freed
   * everybody's, empties what threads keep at hand and no longer use, and unmaps what has moved, so
   * that requests need not: 100 us at least. 0, as at first, for no such thread, or for 5 ms where it
   * is to map ahead.
   */
  uint64_t background_period_nanoseconds;
  /**
   * Free memory that this thread keeps mapped where the pool grew last. At first 0.
   */
  uint64_t background_ahead_bytes;
  /**
   * A sum of `vpmm_pool_flag`. At first 0.
   */
  uint64_t flags;
} vpmm_pool_options;

/**
 * What a pool holds and has done: `size` is set by `vpmm_stats_init`, the rest by `vpmm_pool_stats`.
 * Bytes unless a name says otherwise.
 */
typedef struct vpmm_stats {
  /**
   * The bytes of this structure, as the program was built with it.
   */
  size_t size;
  /**
   * In the hands of callers, without small requests of the paged profile.
   */
  uint64_t live_bytes;
  /**
   * The most of that since the pool was made or `vpmm_pool_reset_peaks`.
   */
  uint64_t peak_live_bytes;
  /**
   * Freed, and kept for their stream's next requests.
   */
  uint64_t cached_bytes;
  /**
   * Free to every stream.
   */
  uint64_t idle_bytes;
  /**
   * Freed, and still in use by a stream as far as is known; with `deferred_bytes`.
   */
  uint64_t pending_bytes;
  /**
   * Physical memory held.
   */
  uint64_t mapped_bytes;
  /**
   * The most of that.
   */
  uint64_t peak_mapped_bytes;
  /**
   * Addresses reserved.
   */
  uint64_t reserved_bytes;
  /**
   * In the hands of callers of the paged profile's small requests.
   */
  uint64_t small_live_bytes;
  /**
   * What the driver holds for them.
   */
  uint64_t small_mapped_bytes;
  /**
   * The most of that.
   */
  uint64_t peak_small_mapped_bytes;
  /**
   * Allocations in the hands of callers, without small ones.
   */
  uint64_t live_count;
  /**
   * Small ones.
   */
  uint64_t small_live_count;
  /**
   * Physical handles held.
   */
  uint64_t extent_count;
  /**
   * Physical handles made so far.
   */
  uint64_t extents_created;
  /**
   * Physical handles moved to other addresses so far.
   */
  uint64_t extents_moved;
  /**
   * Waits that streams were made to do so far.
   */
  uint64_t device_waits;
  /**
   * Waits of the host so far.
   */
  uint64_t host_waits;
  /**
   * The part of `pending_bytes` that no stream may have yet, as further streams that it was noted for may
   * still be using it.
   */
  uint64_t deferred_bytes;
} vpmm_stats;

/**
 * Asked when a request finds no memory, with what it was registered with and the error's text. It may
 * free allocations of the pool, or of others, and answers 1 if the request is to be tried again, 0 if
 * it can do nothing more.
 *
 * It runs in the thread that asked for memory, and lets no exception out. What it allocates itself asks
 * no callback.
 */
typedef uint32_t (*vpmm_shortage_function)(void *context, const char *text);

/**
 * Called once, when nothing is called with `context` any more. It lets no exception out.
 */
typedef void (*vpmm_finish)(void *context);

/**
 * What a client is in: `size` is set by `vpmm_gms_state_init`, the rest by `vpmm_gms_state_of`.
 */
typedef struct vpmm_gms_state {
  /**
   * The bytes of this structure, as the program was built with it.
   */
  size_t size;
  /**
   * A `vpmm_gms_grant`.
   */
  uint32_t grant;
  /**
   * Whether the memory was given up and only the addresses are kept: 1 or 0.
   */
  uint32_t is_unmapped;
  /**
   * Bytes of all mappings, whether the memory is there or not.
   */
  uint64_t total_bytes;
  /**
   * What sizes are rounded up to.
   */
  uint64_t granularity;
} vpmm_gms_state;

/**
 * Is asked while a call waits for the server's answer; other than 0 ends the wait. It lets no exception out.
 */
typedef uint32_t (*vpmm_gms_check)(void *context);

/**
 * Is called with each key. It lets no exception out.
 */
typedef void (*vpmm_gms_visit_key)(void *context, const char *key);

/**
 * An allocation, as the server knows it, and where it is in this process.
 */
typedef struct vpmm_gms_allocation {
  /**
   * The bytes of this structure, as the library was built with it: further fields may follow.
   */
  size_t size;
  /**
   * Its name.
   */
  const char *id;
  /**
   * What it is for.
   */
  const char *tag;
  /**
   * The bytes that were asked for.
   */
  uint64_t bytes;
  /**
   * The bytes that it has.
   */
  uint64_t aligned_bytes;
  /**
   * Its place in the layout.
   */
  uint64_t layout_slot;
  /**
   * Where it is mapped, or an address is kept for it; 0 where that was not asked for.
   */
  uint64_t address;
  /**
   * Whether the memory is there: 1 or 0.
   */
  uint32_t is_mapped;
  /**
   * Reserved: 0.
   */
  uint32_t reserved;
} vpmm_gms_allocation;

/**
 * Is called with each allocation. It lets no exception out.
 */
typedef void (*vpmm_gms_visit_allocation)(void *context,
                                          const struct vpmm_gms_allocation *allocation);

/**
 * Is called with an entry of metadata. It lets no exception out.
 */
typedef void (*vpmm_gms_visit_value)(void *context,
                                     const char *allocation_id,
                                     uint64_t offset_bytes,
                                     const void *value,
                                     size_t value_bytes);

/**
 * Takes the next bytes of a text. It lets no exception out.
 */
typedef void (*vpmm_write)(void *context, const char *bytes, size_t length);

/**
 * Answers a number for where the program is, such as one of a stack of calls, which events keep. Called
 * in the thread that allocates or frees, before it does. It lets no exception out.
 */
typedef uint64_t (*vpmm_where)(void *context);

/**
 * What a resource is able to do: `size` is set by `vpmm_facts_init`, the rest by `vpmm_resource_facts`.
 */
typedef struct vpmm_facts {
  /**
   * The bytes of this structure, as the program was built with it.
   */
  size_t size;
  /**
   * Work on the device can use the memory: 1 or 0.
   */
  uint32_t device_accessible;
  /**
   * The host can: 1 or 0.
   */
  uint32_t host_accessible;
  /**
   * The memory moves between host and device as it is used: 1 or 0.
   */
  uint32_t managed;
  /**
   * Both calls are in the order of their stream, and do not wait for the GPU: 1 or 0.
   */
  uint32_t stream_ordered;
  /**
   * Uses on further streams can be noted: 1 or 0.
   */
  uint32_t records_streams;
  /**
   * Which wrong frees are found: 0 none for certain, 1 pointers that are not allocated, 2 wrong sizes
   * too.
   */
  uint32_t checks;
  /**
   * Every address is a multiple of this.
   */
  uint64_t min_align;
  /**
   * The greatest alignment that can be asked for.
   */
  uint64_t max_align;
  /**
   * The longest request that can ever be served; `UINT64_MAX` where that is not fixed.
   */
  uint64_t max_bytes;
} vpmm_facts;

/**
 * A number that goes up and down: now, at most, and all that was ever added. What was allocated before
 * counters were pushed and freed since makes the first one negative.
 */
typedef struct vpmm_counter {
  /**
   * Now.
   */
  int64_t current;
  /**
   * At most.
   */
  int64_t peak;
  /**
   * All that was added.
   */
  uint64_t total;
} vpmm_counter;

/**
 * What a `statistics` adaptor has counted: `size` is set by `vpmm_counters_init`.
 */
typedef struct vpmm_counters {
  /**
   * The bytes of this structure, as the program was built with it.
   */
  size_t size;
  /**
   * Bytes, as they were asked for.
   */
  struct vpmm_counter bytes;
  /**
   * Allocations.
   */
  struct vpmm_counter allocations;
} vpmm_counters;

/**
 * Allocates bytes for use on a stream, at a multiple of `align`; null where there is no memory.
 */
typedef void *(*vpmm_resource_allocate_function)(void *context,
                                                 size_t bytes,
                                                 size_t align,
                                                 void *stream);

/**
 * Frees what the other function has allocated, with the bytes and the alignment of then.
 */
typedef void (*vpmm_resource_deallocate_function)(void *context,
                                                  void *pointer,
                                                  size_t bytes,
                                                  size_t align,
                                                  void *stream);

/**
 * Asked when there is no memory for so many bytes: 1 to try once more, 0 to give up.
 */
typedef uint32_t (*vpmm_resource_failure_function)(void *context, size_t bytes);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The version: a million times the major, a thousand times the minor, and the patch number.
 */
uint32_t vpmm_version(void);

/**
 * The name of a status as it is written here, for ever; `"?"` for a number that is none.
 */
const char *vpmm_status_name(int32_t status);

/**
 * The text of this thread's last call that failed; empty before. It stays until the next one that
 * fails on this thread.
 */
const char *vpmm_last_error(void);

/**
 * Loads a driver. `device` is `"cuda"`, `"sim"` for the simulated driver, which needs no GPU, `"sim:1"`
 * for one with two devices (up to `"sim:31"`), or null for what the environment variable VPMM_DEVICE
 * says: one of these, or `"cuda"` where it is not set, or set to nothing.
 *
 * # Safety
 * `device` is null or ends with a zero byte; `out` is null or has room for a pointer.
 */
enum vpmm_status vpmm_driver_load(const char *device,
                                  struct vpmm_driver **out);

/**
 * Gives a handle back. The driver ends with its last handle and with all that was made with it. Until then
 * streams that were lent stay so, and are to be taken back before they end (`vpmm_stream_take_back`); those of
 * `vpmm_stream_create` that nobody has destroyed are destroyed then.
 *
 * # Safety
 * `driver` is null, or a handle that is not used again.
 */
void vpmm_driver_release(struct vpmm_driver *driver);

/**
 * How many devices the driver shows.
 *
 * # Safety
 * `driver` is null or a handle; `out` is null or has room for a number.
 */
enum vpmm_status vpmm_driver_device_count(const struct vpmm_driver *driver, uint32_t *out);

/**
 * Bytes of a device's memory that nobody uses, and in `total`, which may be null, all of it, as the
 * driver counts them.
 *
 * # Safety
 * `driver` is null or a handle; `total` and `free` are null or have room for a number.
 */
enum vpmm_status vpmm_driver_memory(const struct vpmm_driver *driver,
                                    uint32_t device,
                                    uint64_t *total,
                                    uint64_t *free);

/**
 * Makes a stream on a device, which does not wait for the default stream. `out` is a `CUstream`, which
 * is a `cudaStream_t`.
 *
 * # Safety
 * `driver` is null or a handle; `out` is null or has room for a pointer.
 */
enum vpmm_status vpmm_stream_create(const struct vpmm_driver *driver,
                                    uint32_t device,
                                    void **out);

/**
 * Destroys a stream that `vpmm_stream_create` made, and no other. Its work still runs to its end.
 *
 * # Safety
 * `driver` is null or a handle; the stream is not used again.
 */
enum vpmm_status vpmm_stream_destroy(const struct vpmm_driver *driver, void *stream);

/**
 * Tells of a stream that was made elsewhere and will not end before `vpmm_stream_take_back`. Pools
 * then serve it without a driver call, and record nothing at its frees; without this a pool asks about
 * the stream at each call, and records an event at each free, since it may end at any time.
 *
 * Not for a stream that captures (`VPMM_BAD_STREAM`). For the default streams and for what
 * `vpmm_stream_create` made nothing is done.
 *
 * # Safety
 * `driver` is null or a handle; the stream is alive, and of the device's primary context.
 */
enum vpmm_status vpmm_stream_lend(const struct vpmm_driver *driver,
                                  uint32_t device,
                                  void *stream);

/**
 * Tells pools that a stream that was lent may end from here on. For the default streams and for what
 * `vpmm_stream_create` made, whose end is told anyway, nothing is done.
 *
 * # Safety
 * `driver` is null or a handle; the stream is alive, and no other thread is in a call with it.
 */
enum vpmm_status vpmm_stream_take_back(const struct vpmm_driver *driver,
                                       void *stream);

/**
 * Waits on the host for everything enqueued so far on a stream that was made or lent here, or on a
 * default one; what was freed there before is then
 * everybody's.
 *
 * # Safety
 * `driver` is null or a handle; the stream is alive.
 */
enum vpmm_status vpmm_stream_synchronize(const struct vpmm_driver *driver,
                                         uint32_t device,
                                         void *stream);

/**
 * Sets everything to its first value. `size` is `sizeof (vpmm_pool_options)`, as the program has it.
 *
 * # Safety
 * `options` is null or has room for `size` bytes.
 */
void vpmm_pool_options_init(struct vpmm_pool_options *options,
                            size_t size);

/**
 * Sets all numbers to 0, and the size: `sizeof (vpmm_stats)`, as the program has it.
 *
 * # Safety
 * `stats` is null or has room for `size` bytes.
 */
void vpmm_stats_init(struct vpmm_stats *stats, size_t size);

/**
 * Makes a pool; `options` may be null, for a pool of the default profile on device 0.
 *
 * # Safety
 * `driver` is null or a handle; `options` is null or begins with its own size; `out` is null or has
 * room for a pointer.
 */
enum vpmm_status vpmm_pool_create(const struct vpmm_driver *driver,
                                  const struct vpmm_pool_options *options,
                                  struct vpmm_pool **out);

/**
 * Gives a handle back. The pool ends, which waits for the work before its frees. If something is still
 * allocated it lives on, and ends when that has been freed by `vpmm_free_any`; `vpmm_pool_destroy` ends
 * a pool with all that is allocated.
 *
 * # Safety
 * `pool` is null, or a handle that is not used again.
 */
void vpmm_pool_release(struct vpmm_pool *pool);

/**
 * Ends a pool with everything that is allocated from it, and gives the handle back, whatever the answer is.
 * Waits for the whole device where something is allocated. `VPMM_IN_USE` where others have handles,
 * which end it then; `VPMM_BAD_STREAM` where the driver refuses that wait since a stream captures: the
 * pool lives on, and ends when all that is allocated has been freed by `vpmm_free_any`.
 *
 * # Safety
 * `pool` is null or a handle; neither it nor the pool's memory is used again.
 */
enum vpmm_status vpmm_pool_destroy(struct vpmm_pool *pool);

/**
 * Allocates for use on a stream, by work that is enqueued there after the call. 0 bytes give a null
 * pointer, which can be freed. The address is a multiple of 512 bytes; in the paged profile of the page
 * for requests of a page or more, of 256 bytes for smaller ones. A request that would find no memory
 * otherwise waits for the device, as long as the pool's options say; then it is
 * `VPMM_OUT_OF_MEMORY`, with a map of the pool in the text.
 *
 * # Safety
 * `pool` is null or a handle; the stream is alive; `out` is null or has room for a pointer.
 */
enum vpmm_status vpmm_malloc(const struct vpmm_pool *pool,
                             size_t bytes,
                             void *stream,
                             void **out);

/**
 * Frees an allocation once everything enqueued on the stream so far has finished. Null is nothing.
 *
 * # Safety
 * `pool` is null or a handle; the stream is alive; nobody uses the memory in work that is enqueued
 * later, or that is not ordered before. The work of the allocation's own stream until then is
 * ordered before, too, also where nothing was done with the memory.
 */
enum vpmm_status vpmm_free(const struct vpmm_pool *pool, void *pointer, void *stream);

/**
 * Frees an allocation of whichever pool of the driver's it is.
 *
 * # Safety
 * As `vpmm_free`.
 */
enum vpmm_status vpmm_free_any(const struct vpmm_driver *driver, void *pointer, void *stream);

/**
 * Notes that an allocation is used on a further stream: after its free it is not handed out before
 * what is enqueued there until then has finished. Null is nothing.
 *
 * A stream that was made (`vpmm_stream_create`) or lent (`vpmm_stream_lend`) before its first such call for
 * the allocation may end, or be taken back, at any time. On any other an event is recorded when the
 * allocation is freed: such a stream must be alive until that call has returned, whichever stream it frees
 * on, and while it captures the free answers `VPMM_BAD_STREAM` and does nothing. What the default stream
 * of another thread (`cudaStreamPerThread`) uses is kept until that thread frees something there, or the
 * host has waited for the device.
 *
 * # Safety
 * `pool` is null or a handle; the stream is alive, and lasts as said.
 */
enum vpmm_status vpmm_record_stream(const struct vpmm_pool *pool,
                                    void *pointer,
                                    void *stream);

/**
 * The allocation of the pool that an address is in: its first byte, and its bytes as the pool rounded
 * them, either of which may be null. `VPMM_BAD_POINTER` where it is in none.
 *
 * # Safety
 * `pool` is null or a handle; `start` is null or has room for a pointer, `bytes` for a number.
 */
enum vpmm_status vpmm_pool_allocation(const struct vpmm_pool *pool,
                                      void *address,
                                      void **start,
                                      uint64_t *bytes);

/**
 * Gives free memory back to the device until `keep_bytes` are held; `returned` may be null.
 *
 * # Safety
 * `pool` is null or a handle; `returned` is null or has room for a number.
 */
enum vpmm_status vpmm_pool_trim_to(const struct vpmm_pool *pool,
                                   uint64_t keep_bytes,
                                   uint64_t *returned);

/**
 * Changes the most bytes that the pool may hold, at most to what it was made with, which 0 stands for.
 * What it holds beyond that stays until it is free and trimmed.
 *
 * # Safety
 * `pool` is null or a handle.
 */
enum vpmm_status vpmm_pool_limit_to(const struct vpmm_pool *pool,
                                    uint64_t limit_bytes);

/**
 * Sets the peaks to what is held now.
 *
 * # Safety
 * `pool` is null or a handle.
 */
enum vpmm_status vpmm_pool_reset_peaks(const struct vpmm_pool *pool);

/**
 * What the pool holds now.
 *
 * # Safety
 * `pool` is null or a handle; `out` is null or begins with its own size.
 */
enum vpmm_status vpmm_pool_stats(const struct vpmm_pool *pool, struct vpmm_stats *out);

/**
 * Writes what stands where in the pool as text, cut to `length` bytes with the zero byte at its end;
 * `needed`, which may be null, gets the bytes of all of it, the zero byte included.
 *
 * # Safety
 * `pool` is null or a handle; `text` has room for `length` bytes, or is null, and `length` 0; `needed`
 * is null or has room for a number.
 */
enum vpmm_status vpmm_pool_layout(const struct vpmm_pool *pool,
                                  char *text,
                                  size_t length,
                                  size_t *needed);

/**
 * Checks the pool's books from scratch: `VPMM_CORRUPT` if something is wrong. No thread may use the
 * pool meanwhile.
 *
 * # Safety
 * `pool` is null or a handle.
 */
enum vpmm_status vpmm_pool_validate(const struct vpmm_pool *pool);

/**
 * Registers a function for requests that find no memory. Functions are asked in the order of their
 * registration; one that answers 1 is asked again if the request still fails, 256 times at most.
 *
 * `finish`, which may be null, is called once when the registration was given back, or the pool has
 * ended, and the calls under way have ended, too: in the thread in which the last of these happens. It
 * is not where this call fails; nor does a child of the process finish what its parent has registered.
 *
 * # Safety
 * `pool` is null or a handle; the function may be called with `context` from every thread that
 * allocates, until it is finished; `out` is null or has room for a pointer.
 */
enum vpmm_status vpmm_pool_on_out_of_memory(const struct vpmm_pool *pool,
                                            vpmm_shortage_function function,
                                            void *context,
                                            vpmm_finish finish,
                                            struct vpmm_shortage **out);

/**
 * Removes a function. This waits for nothing: a call of it that another thread is in goes on to its end,
 * and only then it is finished.
 *
 * # Safety
 * `shortage` is null, or a handle that is not used again.
 */
void vpmm_shortage_release(struct vpmm_shortage *shortage);

/**
 * Opens the heap of a tag, which is made at the first time; the same tag is the same heap. It counts
 * towards the pool's limit, and lasts as long as the pool.
 *
 * # Safety
 * `pool` is null or a handle; `tag` is null or ends with a zero byte; `out` is null or has room for a
 * pointer.
 */
enum vpmm_status vpmm_tagged_open(const struct vpmm_pool *pool,
                                  const char *tag,
                                  struct vpmm_tagged **out);

/**
 * Gives a handle back. The heap stays, with what is allocated in it.
 *
 * # Safety
 * `tagged` is null, or a handle that is not used again.
 */
void vpmm_tagged_release(struct vpmm_tagged *tagged);

/**
 * As `vpmm_malloc`, from the heap. Freed by `vpmm_free` of its pool. While the heap sleeps it answers
 * `VPMM_BAD_STATE`.
 *
 * # Safety
 * `tagged` is null or a handle; the stream is alive; `out` is null or has room for a pointer.
 */
enum vpmm_status vpmm_tagged_malloc(const struct vpmm_tagged *tagged,
                                    size_t bytes,
                                    void *stream,
                                    void **out);

/**
 * Whether the heap sleeps: 1 or 0.
 *
 * # Safety
 * `tagged` is null or a handle; `out` is null or has room for a number.
 */
enum vpmm_status vpmm_tagged_is_asleep(const struct vpmm_tagged *tagged, uint32_t *out);

/**
 * As `vpmm_pool_trim_to`, of the heap alone. Nothing while it sleeps.
 *
 * # Safety
 * `tagged` is null or a handle; `returned` is null or has room for a number.
 */
enum vpmm_status vpmm_tagged_trim_to(const struct vpmm_tagged *tagged,
                                     uint64_t keep_bytes,
                                     uint64_t *returned);

/**
 * What the heap holds.
 *
 * # Safety
 * `tagged` is null or a handle; `out` is null or begins with its own size.
 */
enum vpmm_status vpmm_tagged_stats(const struct vpmm_tagged *tagged, struct vpmm_stats *out);

/**
 * Gives all physical memory of a heap to the device. Its allocations keep their addresses, which
 * nothing may use until `vpmm_resume`. All work that uses them must come before on `stream`, for which
 * the host waits. `contents` is a `vpmm_contents`; `path` names the file of `VPMM_CONTENTS_SAVE`, which
 * is made or cut to nothing, and must stay as it is until the heap was resumed, and is not read else.
 * `bytes`, which may be null, gets how much the device has again.
 *
 * If it fails the heap is awake as it was; the text says so if not.
 *
 * # Safety
 * `pool` is null or a handle; `tag` and `path` are null or end with a zero byte; the stream is alive;
 * `bytes` is null or has room for a number.
 */
enum vpmm_status vpmm_suspend(const struct vpmm_pool *pool,
                              const char *tag,
                              void *stream,
                              uint32_t contents,
                              const char *path,
                              uint64_t *bytes);

/**
 * Brings a heap's memory back at the same addresses. Work that is enqueued on `stream` from here on
 * finds there what `vpmm_suspend` kept. With `without_contents` that is given up instead, where it
 * is lost. `bytes`, which may be null, gets how much memory it is.
 *
 * If it fails the heap is asleep as it was.
 *
 * # Safety
 * `pool` is null or a handle; `tag` is null or ends with a zero byte; the stream is alive; `bytes` is
 * null or has room for a number.
 */
enum vpmm_status vpmm_resume(const struct vpmm_pool *pool,
                             const char *tag,
                             void *stream,
                             uint32_t without_contents,
                             uint64_t *bytes);

/**
 * Makes a pool for the memory of a graph. It counts towards the pool's limit.
 *
 * # Safety
 * `pool` is null or a handle; `out` is null or has room for a pointer.
 */
enum vpmm_status vpmm_graph_pool_create(const struct vpmm_pool *pool, struct vpmm_graph_pool **out);

/**
 * From now on until `vpmm_graph_pool_end`, what is allocated of the pool on `stream`, and on streams
 * that take part in the same capture, comes from here. Before the capture, or in it.
 *
 * # Safety
 * `graph` is null or a handle; the stream is alive until the end.
 */
enum vpmm_status vpmm_graph_pool_begin(const struct vpmm_graph_pool *graph,
                                       void *stream);

/**
 * The capture on `stream` needs no more memory: best called when it has ended.
 *
 * # Safety
 * `graph` is null or a handle; the stream is alive.
 */
enum vpmm_status vpmm_graph_pool_end(const struct vpmm_graph_pool *graph, void *stream);

/**
 * Gives the memory back once everything enqueued on `stream` so far has finished: all launches of the
 * graphs come before that. Does not wait.
 *
 * # Safety
 * `graph` is null or a handle; the stream is alive.
 */
enum vpmm_status vpmm_graph_pool_finish(const struct vpmm_graph_pool *graph,
                                        void *stream);

/**
 * Gives a handle back, which says that the graphs are launched no more. Without
 * `vpmm_graph_pool_finish` the memory goes back once the host has waited for the whole device, or with
 * the pool.
 *
 * # Safety
 * `graph` is null, or a handle that is not used again.
 */
void vpmm_graph_pool_release(struct vpmm_graph_pool *graph);

/**
 * Gives a device access to all memory of a pool, or takes it away; `access` is a `vpmm_access`. What uses the memory on
 * the device must have finished before its access is taken.
 *
 * Pools of the process on devices that can reach each other are open to each other from the start.
 *
 * # Safety
 * `pool` is null or a handle.
 */
enum vpmm_status vpmm_pool_set_access(const struct vpmm_pool *pool,
                                      uint32_t device,
                                      uint32_t access);

/**
 * What a device may do with the memory of a pool: a `vpmm_access`.
 *
 * # Safety
 * `pool` is null or a handle; `out` is null or has room for a number.
 */
enum vpmm_status vpmm_pool_access(const struct vpmm_pool *pool, uint32_t device, uint32_t *out);

/**
 * Sends one allocation to a process that is in `vpmm_import_receive` at the other end of a connected
 * Unix stream socket, and waits until it has mapped it. The pool was made with `sharing`. The memory
 * stays where it is from then on, and may be freed when the other process has finished with it.
 *
 * # Safety
 * `pool` is null or a handle; `socket` is an open descriptor.
 */
enum vpmm_status vpmm_export_send(const struct vpmm_pool *pool,
                                  void *pointer,
                                  int socket);

/**
 * Prepares to send a whole pool, again and again as it grows: one of these for each receiver.
 *
 * # Safety
 * `pool` is null or a handle; `out` is null or has room for a pointer.
 */
enum vpmm_status vpmm_export_create(const struct vpmm_pool *pool, struct vpmm_export **out);

/**
 * Sends what the pool has; from the second time on what it has made since, for
 * `vpmm_import_receive_more`.
 *
 * # Safety
 * `export` is null or a handle; `socket` is an open descriptor.
 */
enum vpmm_status vpmm_export_send_all(const struct vpmm_export *export_, int socket);

/**
 * Gives a handle back. What was sent stays shared.
 *
 * # Safety
 * `export` is null, or a handle that is not used again.
 */
void vpmm_export_release(struct vpmm_export *export_);

/**
 * Takes the memory that the process at the other end of a connected Unix stream socket sends, and maps
 * it for a device; `access` is `VPMM_ACCESS_READ` or `VPMM_ACCESS_READ_WRITE`. Blocks until it has come;
 * timeouts are set on the socket.
 *
 * # Safety
 * `driver` is null or a handle; `socket` is an open descriptor; `out` is null or has room for a pointer.
 */
enum vpmm_status vpmm_import_receive(const struct vpmm_driver *driver,
                                     uint32_t device,
                                     int socket,
                                     uint32_t access,
                                     struct vpmm_import **out);

/**
 * Takes what a whole pool has made since it was sent last. Blocks until it has come; other threads may
 * ask meanwhile what is there.
 *
 * # Safety
 * `import` is null or a handle; `socket` is an open descriptor.
 */
enum vpmm_status vpmm_import_receive_more(const struct vpmm_import *import,
                                          int socket);

/**
 * The start of an allocation that was sent, null of a whole pool; and its bytes, or of a whole pool all
 * that is mapped. Either may be null.
 *
 * # Safety
 * `import` is null or a handle; `pointer` is null or has room for a pointer, `bytes` for a number.
 */
enum vpmm_status vpmm_import_memory(const struct vpmm_import *import,
                                    void **pointer,
                                    uint64_t *bytes);

/**
 * Where an address of the other process is in this one; `VPMM_BAD_POINTER` where it has no memory here.
 *
 * # Safety
 * `import` is null or a handle; `out` is null or has room for a pointer.
 */
enum vpmm_status vpmm_import_translate(const struct vpmm_import *import,
                                       uint64_t there,
                                       void **out);

/**
 * Waits for the work of the device's primary context, unmaps the memory and gives the handle back.
 *
 * # Safety
 * `import` is null, or a handle that is not used again, nor is the memory.
 */
void vpmm_import_release(struct vpmm_import *import);

/**
 * Makes a client of the server at a path, for a device. Does not connect.
 *
 * # Safety
 * `driver` is null or a handle; `socket_path` is null or ends with a zero byte; `out` is null or has
 * room for a pointer.
 */
enum vpmm_status vpmm_gms_open(const struct vpmm_driver *driver,
                               uint32_t device,
                               const char *socket_path,
                               struct vpmm_gms **out);

/**
 * Waits for the device, and gives everything up: memory, addresses, the lock. The handle can only be
 * released then.
 *
 * # Safety
 * `gms` is null or a handle; the memory is not used again.
 */
enum vpmm_status vpmm_gms_close(const struct vpmm_gms *gms);

/**
 * Gives a handle back, and everything up that was not.
 *
 * # Safety
 * `gms` is null, or a handle that is not used again, nor is its memory.
 */
void vpmm_gms_release(struct vpmm_gms *gms);

/**
 * Sets the size, `sizeof (vpmm_gms_state)` as the program has it, and everything else to 0.
 *
 * # Safety
 * `state` is null or has room for `size` bytes.
 */
void vpmm_gms_state_init(struct vpmm_gms_state *state, size_t size);

/**
 * What a client is in. Asks nobody.
 *
 * # Safety
 * `gms` is null or a handle; `out` is null or begins with its own size.
 */
enum vpmm_status vpmm_gms_state_of(const struct vpmm_gms *gms, struct vpmm_gms_state *out);

/**
 * Connects and waits for a lock, a `vpmm_gms_lock`, so many milliseconds, or for ever if negative.
 * `grant`, which may be null, gets the `vpmm_gms_grant`. `VPMM_TIMED_OUT` if the lock was not to be had,
 * `VPMM_DISCONNECTED` if no server was there, or it does not answer: see `vpmm_gms_set_answer_timeout`.
 *
 * # Safety
 * `gms` is null or a handle; `grant` is null or has room for a number.
 */
enum vpmm_status vpmm_gms_connect(const struct vpmm_gms *gms,
                                  uint32_t lock,
                                  int64_t timeout_milliseconds,
                                  uint32_t *grant);

/**
 * Sets how many milliseconds a server that is there may take for an answer, from the next connection on,
 * before it counts as stopped or stuck (`VPMM_DISCONNECTED`); for ever if negative. A minute if nothing
 * is set. Locks, and memory that there is too little of, are waited for longer, as long as the server
 * says within that time that it is alive.
 *
 * # Safety
 * `gms` is null or a handle.
 */
enum vpmm_status vpmm_gms_set_answer_timeout(const struct vpmm_gms *gms,
                                             int64_t milliseconds);

/**
 * Sets whether a signal that has a handler and comes to the thread in `vpmm_gms_connect` ends its wait for
 * a server or a lock, from the next connection on: `VPMM_INTERRUPTED`. Not if nothing is set. For programs
 * whose handlers note the signal for later, as an interpreter's do.
 *
 * # Safety
 * `gms` is null or a handle.
 */
enum vpmm_status vpmm_gms_set_interruptible(const struct vpmm_gms *gms,
                                            uint32_t interruptible);

/**
 * Has a function asked, with `context`, while a call waits for the server's answer: where a signal that has a
 * handler came to its thread, and ten times a second. Where it answers other than 0, and the server does not within
 * half a second, the call ends with `VPMM_INTERRUPTED`, and the connection with it, as after `vpmm_gms_abort`: a
 * writer's layout is void. So also while `vpmm_gms_connect` waits for a server and the lock, at once and whatever
 * `vpmm_gms_set_interruptible` says; where it answers 0 the place among those who wait stays. Nobody is asked if
 * null, as at first, nor for tensors of PyTorch's. For programs whose handlers note the signal for later, as an
 * interpreter's do, and run it then. What runs there cannot use the client: `VPMM_IN_USE`.
 *
 * # Safety
 * `gms` is null or a handle; the function may be called by any thread that uses the handle, and lets no
 * exception out.
 */
enum vpmm_status vpmm_gms_set_check(const struct vpmm_gms *gms,
                                    vpmm_gms_check check,
                                    void *context);

/**
 * Gives the lock up. What is mapped stays mapped.
 *
 * # Safety
 * `gms` is null or a handle.
 */
enum vpmm_status vpmm_gms_abort(const struct vpmm_gms *gms);

/**
 * Publishes the layout: waits for the device, takes the memory away here and keeps the addresses,
 * publishes, and ends the session.
 *
 * # Safety
 * `gms` is null or a handle.
 */
enum vpmm_status vpmm_gms_commit(const struct vpmm_gms *gms);

/**
 * Seals the layout: its allocations outlive this process. Session and mappings stay. `visit`, which may
 * be null, is called with the hash.
 *
 * # Safety
 * `gms` is null or a handle; the function may be called with `context`, and lets no exception out.
 */
enum vpmm_status vpmm_gms_commit_layout(const struct vpmm_gms *gms,
                                        vpmm_gms_visit_key visit,
                                        void *context);

/**
 * Calls a function with the hash of the published or sealed layout.
 *
 * # Safety
 * As `vpmm_gms_commit_layout`.
 */
enum vpmm_status vpmm_gms_layout_hash(const struct vpmm_gms *gms,
                                      vpmm_gms_visit_key visit,
                                      void *context);

/**
 * Makes an allocation at the server, of whole granules, and maps nothing; the function is called with
 * it.
 *
 * # Safety
 * `gms` is null or a handle; `tag` is null or ends with a zero byte; the function may be called with
 * `context`, and lets no exception out.
 */
enum vpmm_status vpmm_gms_allocate_handle(const struct vpmm_gms *gms,
                                          uint64_t bytes,
                                          const char *tag,
                                          vpmm_gms_visit_allocation visit,
                                          void *context);

/**
 * A descriptor of an allocation's memory, for the caller to close.
 *
 * # Safety
 * `gms` is null or a handle; `id` is null or ends with a zero byte; `out` is null or has room for a
 * descriptor.
 */
enum vpmm_status vpmm_gms_export_handle(const struct vpmm_gms *gms, const char *id, int *out);

/**
 * Calls a function with an allocation.
 *
 * # Safety
 * As `vpmm_gms_allocate_handle`, with `id` for `tag`.
 */
enum vpmm_status vpmm_gms_handle_info(const struct vpmm_gms *gms,
                                      const char *id,
                                      vpmm_gms_visit_allocation visit,
                                      void *context);

/**
 * Calls a function with every allocation of a tag, or all if it is null, in the order of their slots.
 *
 * # Safety
 * As `vpmm_gms_allocate_handle`.
 */
enum vpmm_status vpmm_gms_list_handles(const struct vpmm_gms *gms,
                                       const char *tag,
                                       vpmm_gms_visit_allocation visit,
                                       void *context);

/**
 * Calls a function with everything that is mapped, or an address is kept for, by address. Asks nobody.
 *
 * # Safety
 * As `vpmm_gms_allocate_handle`.
 */
enum vpmm_status vpmm_gms_list_mappings(const struct vpmm_gms *gms,
                                        vpmm_gms_visit_allocation visit,
                                        void *context);

/**
 * Gives an allocation back; `freed`, which may be null, gets 1 if there was one, else 0.
 *
 * # Safety
 * `gms` is null or a handle; `id` is null or ends with a zero byte; `freed` is null or has room for a
 * number.
 */
enum vpmm_status vpmm_gms_free_handle(const struct vpmm_gms *gms,
                                      const char *id,
                                      uint32_t *freed);

/**
 * Reserves addresses for so many bytes, in whole granules.
 *
 * # Safety
 * `gms` is null or a handle; `out` is null or has room for a number.
 */
enum vpmm_status vpmm_gms_reserve(const struct vpmm_gms *gms, uint64_t bytes, uint64_t *out);

/**
 * Maps an allocation at an address that was reserved for it. The descriptor, of its memory, is closed
 * in any case. What the server knows of it is asked for.
 *
 * # Safety
 * `gms` is null or a handle; `file` is an open descriptor, or negative; `id` is null or ends with a
 * zero byte.
 */
enum vpmm_status vpmm_gms_map(const struct vpmm_gms *gms,
                              int file,
                              uint64_t address,
                              const char *id);

/**
 * Waits for the device, takes the memory at an address away and keeps the address.
 *
 * # Safety
 * `gms` is null or a handle.
 */
enum vpmm_status vpmm_gms_unmap(const struct vpmm_gms *gms, uint64_t address);

/**
 * Gives an address back at which no memory is.
 *
 * # Safety
 * `gms` is null or a handle.
 */
enum vpmm_status vpmm_gms_free_address(const struct vpmm_gms *gms, uint64_t address);

/**
 * Puts an entry of metadata.
 *
 * # Safety
 * `gms` is null or a handle; `key` and `id` are null or end with a zero byte; `value` is to
 * `value_bytes` bytes, or null and there are none.
 */
enum vpmm_status vpmm_gms_metadata_put(const struct vpmm_gms *gms,
                                       const char *key,
                                       const char *id,
                                       uint64_t offset_bytes,
                                       const void *value,
                                       size_t value_bytes);

/**
 * Calls a function with an entry of metadata, if there is one.
 *
 * # Safety
 * `gms` is null or a handle; `key` is null or ends with a zero byte; the function may be called with
 * `context`, and lets no exception out.
 */
enum vpmm_status vpmm_gms_metadata_get(const struct vpmm_gms *gms,
                                       const char *key,
                                       vpmm_gms_visit_value visit,
                                       void *context);

/**
 * Calls a function with every key that begins so, sorted; all for null.
 *
 * # Safety
 * As `vpmm_gms_metadata_get`.
 */
enum vpmm_status vpmm_gms_metadata_list(const struct vpmm_gms *gms,
                                        const char *prefix,
                                        vpmm_gms_visit_key visit,
                                        void *context);

/**
 * Takes an entry of metadata away; `deleted`, which may be null, gets 1 if there was one, else 0.
 *
 * # Safety
 * `gms` is null or a handle; `key` is null or ends with a zero byte; `deleted` is null or has room for a
 * number.
 */
enum vpmm_status vpmm_gms_metadata_delete(const struct vpmm_gms *gms,
                                          const char *key,
                                          uint32_t *deleted);

/**
 * Makes an allocation of a tag and maps it, or where `id` is not null maps that one, which keeps its
 * address if it is mapped already: its address.
 *
 * # Safety
 * `gms` is null or a handle; `id` and `tag` are null or end with a zero byte; `out` is null or has room
 * for a number.
 */
enum vpmm_status vpmm_gms_create_mapping(const struct vpmm_gms *gms,
                                         const char *id,
                                         uint64_t bytes,
                                         const char *tag,
                                         uint64_t *out);

/**
 * Makes `count` allocations of a tag at once, and maps them side by side: the address of each.
 *
 * # Safety
 * `gms` is null or a handle; `sizes` and `out` are to `count` numbers; `tag` is null or ends with a zero
 * byte.
 */
enum vpmm_status vpmm_gms_create_mappings(const struct vpmm_gms *gms,
                                          const uint64_t *sizes,
                                          size_t count,
                                          const char *tag,
                                          uint64_t *out);

/**
 * Maps every allocation of a tag, or all if it is null, side by side; the function is called with each
 * in the order of their slots. Those that are mapped keep their addresses.
 *
 * # Safety
 * As `vpmm_gms_allocate_handle`.
 */
enum vpmm_status vpmm_gms_import_all(const struct vpmm_gms *gms,
                                     const char *tag,
                                     vpmm_gms_visit_allocation visit,
                                     void *context);

/**
 * Waits for the device, and takes a mapping away with its address, and, as a writer, with its
 * allocation.
 *
 * # Safety
 * `gms` is null or a handle; the memory is not used again.
 */
enum vpmm_status vpmm_gms_destroy_mapping(const struct vpmm_gms *gms, uint64_t address);

/**
 * Waits for the device, gives all memory up and keeps the addresses.
 *
 * # Safety
 * `gms` is null or a handle; the memory is not used before it is back.
 */
enum vpmm_status vpmm_gms_unmap_all(const struct vpmm_gms *gms);

/**
 * Brings the memory back at the same addresses. `VPMM_STALE` where the layout is another now.
 *
 * # Safety
 * `gms` is null or a handle.
 */
enum vpmm_status vpmm_gms_remap_all(const struct vpmm_gms *gms);

/**
 * As a writer of a new layout, makes an allocation of a tag for every address that is kept;
 * `vpmm_gms_remap_all` maps them.
 *
 * # Safety
 * `gms` is null or a handle; `tag` is null or ends with a zero byte.
 */
enum vpmm_status vpmm_gms_reallocate_all(const struct vpmm_gms *gms, const char *tag);

/**
 * Makes a heap for tensors on a device in the service's memory, for programs whose allocator the
 * process's pools are. It has nothing at first; its segments are allocations of the manager that the
 * thread uses as they are needed (`vpmm_gms_torch_begin`), of one manager for one heap.
 *
 * # Safety
 * `out` is null or has room for a pointer.
 */
enum vpmm_status vpmm_gms_heap_open(uint32_t device,
                                    struct vpmm_gms_heap **out);

/**
 * From now on what this thread asks the process's pool on the heap's device for comes from the heap, until
 * `vpmm_process_pop_tag`. Frees find it by the address, whoever frees.
 *
 * # Safety
 * `heap` is null or a handle.
 */
enum vpmm_status vpmm_gms_heap_push(const struct vpmm_gms_heap *heap);

/**
 * Gives a handle back: free memory of the heap goes back to the server, and what is allocated still
 * follows as it is freed. Waits for the device.
 *
 * # Safety
 * `heap` is null, or a handle that is not used again.
 */
void vpmm_gms_heap_release(struct vpmm_gms_heap *heap);

/**
 * Says which tag's server it is. If the path is the device's usual one for it,
 * `gms_UUID_TAG.sock` in the folder of the sockets, it is found anew by the first `vpmm_gms_connect`
 * after each `vpmm_gms_abort`: a process that was moved to another GPU finds that one's server. A path
 * of the caller's own stays.
 *
 * # Safety
 * `gms` is null or a handle; `tag` is null or ends with a zero byte.
 */
enum vpmm_status vpmm_gms_set_tag(const struct vpmm_gms *gms,
                                  const char *tag);

/**
 * Calls a function with the path of the server's socket.
 *
 * # Safety
 * `gms` is null or a handle; the function may be called with `context`, and lets no exception out.
 */
enum vpmm_status vpmm_gms_socket_path(const struct vpmm_gms *gms,
                                      vpmm_gms_visit_key visit,
                                      void *context);

/**
 * Sets the bytes of the block behind scratch mappings, 512 MiB if this is not called: a power of two, and
 * a multiple of the granularity. Before there are scratch mappings.
 *
 * # Safety
 * `gms` is null or a handle.
 */
enum vpmm_status vpmm_gms_set_scratch_block(const struct vpmm_gms *gms,
                                            uint64_t bytes);

/**
 * Reserves addresses for so many bytes with the block behind all of them, for reading and writing, for
 * allocations of a tag to come. Needs no lock. What is written there is lost.
 *
 * # Safety
 * `gms` is null or a handle; `tag` is null or ends with a zero byte; `out` is null or has room for an
 * address.
 */
enum vpmm_status vpmm_gms_create_scratch_mapping(const struct vpmm_gms *gms,
                                                 uint64_t bytes,
                                                 const char *tag,
                                                 uint64_t *out);

/**
 * Gives a scratch mapping up, with its address. Waits for the device first. `found`, which may be null,
 * gets 0 if there is none at the address, else 1.
 *
 * # Safety
 * `gms` is null or a handle; `found` is null or has room for a number; the memory is not used again.
 */
enum vpmm_status vpmm_gms_destroy_scratch_mapping(const struct vpmm_gms *gms,
                                                  uint64_t address,
                                                  uint32_t *found);

/**
 * How many scratch mappings there are, the bytes that were asked for, and those of the memory behind
 * them. Each may be null.
 *
 * # Safety
 * `gms` is null or a handle; the others are null or have room for a number each.
 */
enum vpmm_status vpmm_gms_scratch_summary(const struct vpmm_gms *gms,
                                          uint64_t *count,
                                          uint64_t *virtual_bytes,
                                          uint64_t *physical_bytes);

/**
 * Makes scratch mappings, whose block was given up by `vpmm_gms_unmap_all`, mappings whose memory is
 * away: `vpmm_gms_reallocate_all` makes allocations for them and `vpmm_gms_remap_all` maps these.
 *
 * # Safety
 * `gms` is null or a handle.
 */
enum vpmm_status vpmm_gms_prepare_scratch(const struct vpmm_gms *gms);

/**
 * Has allocations of PyTorch's in this thread come from a manager, until `vpmm_gms_torch_end`: as
 * allocations of a tag, or with `scratch` (1) as scratch mappings for them.
 *
 * # Safety
 * `gms` is null or a handle; `tag` is null or ends with a zero byte.
 */
enum vpmm_status vpmm_gms_torch_begin(const struct vpmm_gms *gms,
                                      const char *tag,
                                      uint32_t scratch);

/**
 * Ends what this thread began last.
 */
enum vpmm_status vpmm_gms_torch_end(void);

/**
 * A PyTorch pool's `alloc`, for `CUDAPluggableAllocator`. Throws.
 *
 * # Safety
 * The caller is C++, or built to be unwound through.
 */
void *vpmm_gms_torch_alloc(ptrdiff_t size, int device, void *stream);

/**
 * A PyTorch pool's `free`. Throws nothing, and waits for no other call.
 *
 * # Safety
 * The pointer is `vpmm_gms_torch_alloc`'s, or null, and is not used again.
 */
void vpmm_gms_torch_free(void *pointer, ptrdiff_t size, int device, void *stream);

/**
 * Sets what the process's pools will be made with: that of `options->device`, or of every device that
 * has no options of its own (`VPMM_EVERY_DEVICE`). `VPMM_IN_USE` if a pool that it is for was made
 * already.
 *
 * # Safety
 * `options` is null or begins with its own size.
 */
enum vpmm_status vpmm_process_configure(const struct vpmm_pool_options *options);

/**
 * A handle of the process's own driver, loaded at the first call of this or of a function that needs
 * a pool of the process.
 *
 * # Safety
 * `out` is null or has room for a pointer.
 */
enum vpmm_status vpmm_process_driver(struct vpmm_driver **out);

/**
 * A handle of the process's own pool on a device, made at the first call of this or of a request that
 * is served from it. The pool lasts until the process ends, whoever releases handles.
 *
 * # Safety
 * `out` is null or has room for a pointer.
 */
enum vpmm_status vpmm_process_pool(uint32_t device,
                                   struct vpmm_pool **out);

/**
 * Whether the process's pool on a device was made: 1 or 0. Nothing is made by this: a pool has a context of
 * the device, which takes memory of its own. A child of the process has none.
 */
uint32_t vpmm_process_has_pool(uint32_t device);

/**
 * As `vpmm_malloc`, from the process's pool on a device. Nothing is assumed about how long the stream
 * lasts, unless `vpmm_process_keep_stream` was called for it.
 *
 * # Safety
 * The stream is alive; `out` is null or has room for a pointer.
 */
enum vpmm_status vpmm_process_malloc(uint32_t device,
                                     size_t bytes,
                                     void *stream,
                                     void **out);

/**
 * As `vpmm_free`, for memory of the process's pool on a device.
 *
 * # Safety
 * As `vpmm_free`.
 */
enum vpmm_status vpmm_process_free(uint32_t device, void *pointer, void *stream);

/**
 * Says that a stream lasts until `vpmm_process_forget_stream`: the process's pools serve it without a
 * driver call from then on. PyTorch's requests do so by themselves, as its streams last as long as the
 * process.
 *
 * # Safety
 * The stream is alive, and lasts as said.
 */
enum vpmm_status vpmm_process_keep_stream(uint32_t device,
                                          void *stream);

/**
 * Says that a stream which was kept is about to end. The process's pools then know no stream by that
 * handle; `known`, which may be null, says whether they did. One that they did not know stays alive until
 * what it was noted to use (`vpmm_process_record_stream`) has been freed.
 *
 * # Safety
 * The stream is alive, and no other thread is in a call with it; `known` is null or has room for a
 * number.
 */
enum vpmm_status vpmm_process_forget_stream(uint32_t device,
                                            void *stream,
                                            uint32_t *known);

/**
 * As `vpmm_record_stream`, for memory of any of the process's pools. A stream that is kept
 * (`vpmm_process_keep_stream`) counts as lent.
 *
 * # Safety
 * The stream is alive, and lasts as said there.
 */
enum vpmm_status vpmm_process_record_stream(void *pointer, void *stream);

/**
 * Copies from the host to a device, and waits for it.
 *
 * # Safety
 * Both have so many bytes; the stream is of the device, and alive; who else uses the device's memory is
 * ordered before or after.
 */
enum vpmm_status vpmm_process_upload(uint32_t device,
                                     void *to,
                                     const void *from,
                                     size_t bytes,
                                     void *on);

/**
 * Copies from a device to the host, and waits for it.
 *
 * # Safety
 * As `vpmm_process_upload`.
 */
enum vpmm_status vpmm_process_download(uint32_t device,
                                       void *to,
                                       void *from,
                                       size_t bytes,
                                       void *on);

/**
 * Copies on a device; returns at once.
 *
 * # Safety
 * As `vpmm_process_upload`; both are there until the copy is done, and do not overlap.
 */
enum vpmm_status vpmm_process_copy(uint32_t device, void *to, void *from, size_t bytes, void *on);

/**
 * Sets bytes on a device; returns at once.
 *
 * # Safety
 * As `vpmm_process_upload`; the memory is there until it is filled.
 */
enum vpmm_status vpmm_process_fill(uint32_t device,
                                   void *to,
                                   uint8_t value,
                                   size_t bytes,
                                   void *on);

/**
 * Has what is enqueued on a stream later wait, on the GPU, for what is enqueued on another now.
 *
 * # Safety
 * Both streams are of the device, and alive.
 */
enum vpmm_status vpmm_process_wait_for(uint32_t device, void *waiting, void *other);

/**
 * Waits on the host for everything enqueued so far on a stream; what was freed there before is then
 * everybody's.
 *
 * # Safety
 * The stream is of the device, and alive.
 */
enum vpmm_status vpmm_process_synchronize(uint32_t device, void *on);

/**
 * As `vpmm_pool_snapshot`, of all the process's pools, with what `vpmm_process_record_history` kept, by
 * device, as `device_traces`. In an event `where` is what the callback answered.
 *
 * # Safety
 * As in `vpmm_pool_snapshot`.
 */
enum vpmm_status vpmm_process_snapshot(vpmm_write write,
                                       void *context);

/**
 * From now on what this thread asks the process's pools for comes from their heap with a tag
 * (`vpmm_tagged_malloc`), until `vpmm_process_pop_tag`. May be called again for another tag meanwhile.
 *
 * # Safety
 * `tag` is null or ends with a zero byte.
 */
enum vpmm_status vpmm_process_push_tag(const char *tag);

/**
 * The same for requests on one device.
 *
 * # Safety
 * As `vpmm_process_push_tag`.
 */
enum vpmm_status vpmm_process_push_tag_on(const char *tag, uint32_t device);

/**
 * Ends what this thread's last `vpmm_process_push_tag`, `vpmm_process_push_tag_on` or
 * `vpmm_gms_heap_push` has begun.
 */
enum vpmm_status vpmm_process_pop_tag(void);

/**
 * Keeps the last `most` requests, frees and failures of the process's pools, for
 * `vpmm_process_snapshot`; what was kept before is forgotten. With 0, as at first, nothing is kept, and
 * a request costs nothing more. `place`, which may be null, is asked at each where the program is.
 *
 * # Safety
 * `place` can be called with `context`, from any thread, until this is called again and calls under way
 * have ended.
 */
enum vpmm_status vpmm_process_record_history(size_t most,
                                             vpmm_where place,
                                             void *context);

/**
 * Sets all numbers to 0, and the size: `sizeof (vpmm_facts)`, as the program has it.
 *
 * # Safety
 * `facts` is null or has room for `size` bytes.
 */
void vpmm_facts_init(struct vpmm_facts *facts, size_t size);

/**
 * What a resource is able to do.
 *
 * # Safety
 * `resource` is null or a handle; `out` is null or begins with its own size.
 */
enum vpmm_status vpmm_resource_facts(const struct vpmm_resource *resource, struct vpmm_facts *out);

/**
 * Writes a resource and what it stands on as a tree, cut as `vpmm_pool_layout` cuts: its name and its
 * settings in the first line.
 *
 * # Safety
 * `resource` is null or a handle; `text` and `needed` as in `vpmm_pool_layout`.
 */
enum vpmm_status vpmm_resource_describe(const struct vpmm_resource *resource,
                                        char *text,
                                        size_t length,
                                        size_t *needed);

/**
 * The bytes that a resource holds of the device or of what is below it, allocated or not;
 * `VPMM_UNSUPPORTED` for one that holds nothing of its own.
 *
 * # Safety
 * `resource` is null or a handle; `out` is null or has room for a number.
 */
enum vpmm_status vpmm_resource_held_bytes(const struct vpmm_resource *resource, uint64_t *out);

/**
 * Whether each of two resources may deallocate what the other has allocated: 1 or 0.
 *
 * # Safety
 * Both are null or handles; `out` is null or has room for a number.
 */
enum vpmm_status vpmm_resource_is_equal(const struct vpmm_resource *resource,
                                        const struct vpmm_resource *other,
                                        uint32_t *out);

/**
 * Sets all numbers to 0, and the size: `sizeof (vpmm_counters)`, as the program has it.
 *
 * # Safety
 * `counters` is null or has room for `size` bytes.
 */
void vpmm_counters_init(struct vpmm_counters *counters, size_t size);

/**
 * What a `statistics` adaptor has counted since it was made, or since counters were pushed.
 *
 * # Safety
 * `resource` is null or a handle; `out` is null or begins with its own size.
 */
enum vpmm_status vpmm_resource_counters(const struct vpmm_resource *resource,
                                        struct vpmm_counters *out);

/**
 * Has a `statistics` adaptor count from 0, until `vpmm_resource_pop_counters`. `former`, which may be
 * null, gets what was counted before.
 *
 * # Safety
 * `resource` is null or a handle; `former` is null or begins with its own size.
 */
enum vpmm_status vpmm_resource_push_counters(const struct vpmm_resource *resource,
                                             struct vpmm_counters *former);

/**
 * Ends what the last `vpmm_resource_push_counters` has begun: what was counted since is added to what was
 * counted before, and goes to `part`, which may be null. `VPMM_BAD_STATE` where nothing was pushed.
 *
 * # Safety
 * As `vpmm_resource_push_counters`.
 */
enum vpmm_status vpmm_resource_pop_counters(const struct vpmm_resource *resource,
                                            struct vpmm_counters *part);

/**
 * The bytes allocated through a `limiting`, `tracking` or `statistics` adaptor now: rounded up to 256
 * each by the first.
 *
 * # Safety
 * `resource` is null or a handle; `out` is null or has room for a number.
 */
enum vpmm_status vpmm_resource_allocated_bytes(const struct vpmm_resource *resource,
                                               uint64_t *out);

/**
 * The limit of a `limiting` adaptor, in bytes.
 *
 * # Safety
 * `resource` is null or a handle; `out` is null or has room for a number.
 */
enum vpmm_status vpmm_resource_limit_bytes(const struct vpmm_resource *resource, uint64_t *out);

/**
 * Writes what is allocated through a `tracking` adaptor, one line for each allocation, cut as
 * `vpmm_pool_layout` cuts. `count`, which may be null, gets how many there are.
 *
 * # Safety
 * `resource` is null or a handle; `text` and `needed` as in `vpmm_pool_layout`; `count` is null or has
 * room for a number.
 */
enum vpmm_status vpmm_resource_outstanding(const struct vpmm_resource *resource,
                                           char *text,
                                           size_t length,
                                           size_t *needed,
                                           uint64_t *count);

/**
 * Writes the name of a `logging` adaptor's file, cut as `vpmm_pool_layout` cuts. `lost`, which may be
 * null, gets how many rows found no room on the disk.
 *
 * # Safety
 * `resource` is null or a handle; `text` and `needed` as in `vpmm_pool_layout`; `lost` is null or has
 * room for a number.
 */
enum vpmm_status vpmm_resource_log_file(const struct vpmm_resource *resource,
                                        char *text,
                                        size_t length,
                                        size_t *needed,
                                        uint64_t *lost);

/**
 * Has everything that a `logging` adaptor has written so far be in its file.
 *
 * # Safety
 * `resource` is null or a handle.
 */
enum vpmm_status vpmm_resource_flush_log(const struct vpmm_resource *resource);

/**
 * Adds a bin to a `binning` resource, for requests of up to so many bytes: one of blocks of that size,
 * unless what is below never gives so long a piece, or, where `bin` is not null, another resource. The
 * greatest bin that there is serves as many bytes as it says; what is longer goes to what is below. A
 * `bin` that is `resource`, or stands on it, is `VPMM_INVALID_ARGUMENT`.
 *
 * # Safety
 * `resource` is null or a handle, and `bin` too.
 */
enum vpmm_status vpmm_resource_add_bin(const struct vpmm_resource *resource,
                                       size_t bytes,
                                       const struct vpmm_resource *bin);

/**
 * A resource of two functions, for memory of a device. They are not called for 0 bytes. `finish`, which
 * may be null, is called when the resource has ended; it is not where this call fails.
 *
 * # Safety
 * `driver` is null or a handle; the functions may be called with `context` from every thread that uses the
 * resource, until it has ended, and let no exception out; what `allocate` returns is the caller's until it
 * is deallocated; `out` is null or has room for a pointer.
 */
enum vpmm_status vpmm_resource_callback(const struct vpmm_driver *driver,
                                        uint32_t device,
                                        vpmm_resource_allocate_function allocate,
                                        vpmm_resource_deallocate_function deallocate,
                                        void *context,
                                        vpmm_finish finish,
                                        struct vpmm_resource **out);

/**
 * A resource on another one that asks a function when that has no memory, again and again until it
 * answers 0. `finish` as in `vpmm_resource_callback`.
 *
 * # Safety
 * `upstream` is null or a handle; the function may be called with `context` from every thread that
 * allocates, until the resource has ended, and lets no exception out; `out` is null or has room for a
 * pointer.
 */
enum vpmm_status vpmm_resource_failure_callback(const struct vpmm_resource *upstream,
                                                vpmm_resource_failure_function function,
                                                void *context,
                                                vpmm_finish finish,
                                                struct vpmm_resource **out);

/**
 * Allocates for use on a stream. `align` is a power of two, and 0 for the resource's own, which is at
 * least 256. 0 bytes give a null pointer, which can be deallocated.
 *
 * # Safety
 * `resource` is null or a handle; the stream is alive, and of the resource's device; `out` is null or
 * has room for a pointer.
 */
enum vpmm_status vpmm_resource_allocate(const struct vpmm_resource *resource,
                                        size_t bytes,
                                        size_t align,
                                        void *stream,
                                        void **out);

/**
 * Frees an allocation of so many bytes with that alignment, both as they were asked for, once everything
 * enqueued on the stream so far has finished. Null with 0 bytes is nothing.
 *
 * # Safety
 * As `vpmm_resource_allocate`; nobody uses the memory in work that is enqueued later, or that is not
 * ordered before. Not every resource finds a wrong pointer: `vpmm_resource_facts`.
 */
enum vpmm_status vpmm_resource_deallocate(const struct vpmm_resource *resource,
                                          void *pointer,
                                          size_t bytes,
                                          size_t align,
                                          void *stream);

/**
 * Notes that an allocation is used on a further stream, as `vpmm_record_stream`. `VPMM_UNSUPPORTED`
 * where the resource takes no such notes. Null is nothing.
 *
 * # Safety
 * `resource` is null or a handle; the stream is alive, and lasts as said there.
 */
enum vpmm_status vpmm_resource_record_stream(const struct vpmm_resource *resource,
                                             void *pointer,
                                             void *stream);

/**
 * A handle of a device's current resource: what was made current by `vpmm_resource_set_current`, else the
 * device's current pool, which for the driver of `vpmm_process_driver` is the process's.
 *
 * # Safety
 * `driver` is null or a handle; `out` is null or has room for a pointer.
 */
enum vpmm_status vpmm_resource_current(const struct vpmm_driver *driver,
                                       uint32_t device,
                                       struct vpmm_resource **out);

/**
 * Makes a resource a device's current one, for all threads; with null the device's current pool is it
 * again. The driver keeps the resource until another one is made current: before the driver's last handle
 * is released, call this with null.
 *
 * # Safety
 * `driver` is null or a handle; `resource` is null or a handle of the same driver's.
 */
enum vpmm_status vpmm_resource_set_current(const struct vpmm_driver *driver,
                                           uint32_t device,
                                           const struct vpmm_resource *resource);

/**
 * Makes a resource, or a stack of them, as `text` says: `"arena"`,
 * `"statistics(limiting(1GiB,cuda-async))"`. Names are those of the `vpmm` command:
 *
 * - what makes memory: `default` and `paged`, pools of this library; `cuda-async`, `cuda-malloc`,
 *   `managed`, `pinned`, `host`
 * - what divides it: `coalescing`, `fixed-size`, `binning`, `arena`, `caching`
 * - adaptors: `limiting`, `statistics`, `tracking`, `logging`, `aligned`, `thread-safe`, `prefetch`
 *
 * With an `upstream` that is not null, and is the same device's, the text is of what stands on that:
 * `"limiting(1GiB)"`. Both handles are then to be released, in any order. No more than a thousand stand on each
 * other (`VPMM_INVALID_ARGUMENT`). A file's name with commas or brackets in it stands in quotes.
 *
 * # Safety
 * `driver` is null or a handle, `upstream` too; `text` is null or ends with a zero byte; `out` is null
 * or has room for a pointer.
 */
enum vpmm_status vpmm_resource_open(const struct vpmm_driver *driver,
                                    uint32_t device,
                                    const char *text,
                                    const struct vpmm_resource *upstream,
                                    struct vpmm_resource **out);

/**
 * A pool as a resource. The pool lives as long as either handle.
 *
 * # Safety
 * `pool` is null or a handle; `out` is null or has room for a pointer.
 */
enum vpmm_status vpmm_resource_of_pool(const struct vpmm_pool *pool, struct vpmm_resource **out);

/**
 * A handle of the pool that a resource is: `VPMM_UNSUPPORTED` where it is none of this library's.
 *
 * # Safety
 * `resource` is null or a handle; `out` is null or has room for a pointer.
 */
enum vpmm_status vpmm_resource_pool(const struct vpmm_resource *resource, struct vpmm_pool **out);

/**
 * A further handle of what a resource stands on: `VPMM_NOT_FOUND` where it stands on nothing.
 *
 * # Safety
 * `resource` is null or a handle; `out` is null or has room for a pointer.
 */
enum vpmm_status vpmm_resource_upstream(const struct vpmm_resource *resource,
                                        struct vpmm_resource **out);

/**
 * Gives a handle back. The resource ends with its last handle, with all that stands on it, and when it
 * is nowhere current. What divides memory (`coalescing`, `fixed-size`, `binning`, `arena`) then gives all of it
 * to what is below, whether it was freed or not; `caching` keeps the pieces of which something is allocated, a
 * pool of this library lives on until all is freed, and adaptors free nothing. In a child of the process nothing
 * ends: it is the parent's.
 *
 * # Safety
 * `resource` is null, or a handle that is not used again; if it is the last, so is its memory.
 */
void vpmm_resource_release(struct vpmm_resource *resource);

/**
 * Writes what the pool holds as JSON, piece by piece: a list of segments, each with its blocks, under
 * the names of `torch.cuda.memory._snapshot()`. Beyond those, a segment has its `heap`, a block its
 * `vpmm_state` (`live`, `deferred`, `cached`, `pending`, `idle`).
 *
 * # Safety
 * `pool` is null or a handle; `write` is null or can be called with `context`, and lets no exception out.
 */
enum vpmm_status vpmm_pool_snapshot(const struct vpmm_pool *pool,
                                    vpmm_write write,
                                    void *context);

/**
 * PyTorch's `alloc`. Throws; what a filter throws, too.
 *
 * # Safety
 * The stream is of the device, alive, and lasts (`vpmm_process_forget_stream`); the caller is C++, or
 * built to be unwound through.
 */
void *vpmm_torch_alloc(ptrdiff_t size,
                       int device,
                       void *stream);

/**
 * PyTorch's `free`. Throws nothing.
 *
 * # Safety
 * As in `vpmm_free`; the stream lasts as in `vpmm_torch_alloc`.
 */
void vpmm_torch_free(void *pointer, ptrdiff_t size, int device, void *stream);

/**
 * How many frees have failed.
 */
uint64_t vpmm_torch_failed_frees(void);

/**
 * How many of PyTorch's requests on a device there was no memory for; in a child of the process 0.
 */
uint64_t vpmm_torch_failed_requests(uint32_t device);

/**
 * Has the pool answer PyTorch's `cacheInfo`, which PyTorch has no function to set for: once vpmm is its
 * allocator, and before that is used. Whether it does: 1 or 0. cuDNN's search for the quickest algorithms
 * (`torch.backends.cudnn.benchmark`) needs the answer, and throws without. No driver call.
 *
 * # Safety
 * No other thread uses PyTorch's allocator meanwhile.
 */
uint32_t vpmm_torch_answer_cache_info(void);

/**
 * PyTorch's `init`: pools are made when they are first used.
 */
void vpmm_torch_init(int device_count);

/**
 * PyTorch's `reset`, which is `torch.cuda.empty_cache()`: waits for the devices, and gives them all
 * free memory back. While a graph is captured it waits for nothing, and gives what it can. Throws.
 *
 * # Safety
 * The caller is C++, or built to be unwound through.
 */
void vpmm_torch_reset(void);

/**
 * PyTorch's `memory_fraction`: the part of a device's memory that its pool may hold. The last counts; but
 * the pool is made at the first request, and none later raises it above what it was made with. Throws.
 *
 * # Safety
 * As in `vpmm_torch_reset`.
 */
void vpmm_torch_memory_fraction(double fraction,
                                int device);

/**
 * PyTorch's `base_alloc`: the start and the bytes of the allocation that an address is in. Throws.
 *
 * # Safety
 * `size` is null or has room for a number; else as in `vpmm_torch_reset`.
 */
void *vpmm_torch_base_alloc(void *pointer, size_t *size);

/**
 * PyTorch's `record_stream`. Throws.
 *
 * # Safety
 * As in `vpmm_torch_alloc`; a stream that `vpmm_process_forget_stream` does not know lasts as said there.
 */
void vpmm_torch_record_stream(void *pointer,
                              void *stream);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* VPMM_H */
