/* The C ABI of vpmm: GPU memory pools on CUDA's virtual memory management.
   Made by cbindgen from vpmm-capi/src: see vpmm-capi/tests/header.rs. */

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
 * A driver that was loaded. Whatever was made with it keeps it.
 */
typedef struct vpmm_driver vpmm_driver;

/**
 * A pool.
 */
typedef struct vpmm_pool vpmm_pool;

/**
 * What a pool is made with: set by `vpmm_pool_options_init`, then changed.
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
   * Reserved: 0.
   */
  uint32_t reserved;
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
   * Freed, and still in use by a stream as far as is known.
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
} vpmm_stats;

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
 * Loads a driver. `device` is `"cuda"`, `"sim"` for the simulated driver, which needs no GPU, or null
 * for what the environment variable VPMM_DEVICE says: either, or `"cuda"` where it is not set.
 *
 * # Safety
 * `device` is null or ends with a zero byte; `out` is null or has room for a pointer.
 */
enum vpmm_status vpmm_driver_load(const char *device,
                                  struct vpmm_driver **out);

/**
 * Gives a handle back. Streams that were lent by it are the driver's own again: see
 * `vpmm_stream_lend`.
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
 * Destroys a stream that `vpmm_stream_create` made. Its work still runs to its end.
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
 * Not for a stream that captures (`VPMM_BAD_STREAM`). For the default streams nothing is done.
 *
 * # Safety
 * `driver` is null or a handle; the stream is alive, and of the device's primary context.
 */
enum vpmm_status vpmm_stream_lend(const struct vpmm_driver *driver,
                                  uint32_t device,
                                  void *stream);

/**
 * Tells pools that a stream that was lent may end from here on.
 *
 * # Safety
 * `driver` is null or a handle; the stream is alive, and no other thread is in a call with it.
 */
enum vpmm_status vpmm_stream_take_back(const struct vpmm_driver *driver, void *stream);

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
 * Sets everything to its first value.
 *
 * # Safety
 * `options` is null or has room for the structure.
 */
void vpmm_pool_options_init(struct vpmm_pool_options *options);

/**
 * Sets the size, and all numbers to 0.
 *
 * # Safety
 * `stats` is null or has room for the structure.
 */
void vpmm_stats_init(struct vpmm_stats *stats);

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
 * Ends a pool with everything that is allocated from it, and gives the handle back. Waits for the
 * whole device where something is allocated.
 *
 * # Safety
 * `pool` is null or a handle; neither it nor the pool's memory is used again.
 */
enum vpmm_status vpmm_pool_destroy(struct vpmm_pool *pool);

/**
 * Allocates for use on a stream. 0 bytes give a null pointer, which can be freed.
 *
 * # Safety
 * `pool` is null or a handle; the stream is alive; `out` is null or has room for a pointer.
 */
enum vpmm_status vpmm_malloc(const struct vpmm_pool *pool, size_t bytes, void *stream, void **out);

/**
 * Frees an allocation once everything enqueued on the stream so far has finished. Null is nothing.
 *
 * # Safety
 * `pool` is null or a handle; the stream is alive; nobody uses the memory in work that is enqueued
 * later, or that is not ordered before.
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
 * what is enqueued there until then has finished.
 *
 * # Safety
 * `pool` is null or a handle; the stream is alive.
 */
enum vpmm_status vpmm_record_stream(const struct vpmm_pool *pool, void *pointer, void *stream);

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
 * As `vpmm_malloc`, from the process's pool on a device. The stream counts as lent: it lasts, or
 * `vpmm_process_forget_stream` is called before it ends.
 *
 * # Safety
 * The stream is alive, and lasts as said; `out` is null or has room for a pointer.
 */
enum vpmm_status vpmm_process_malloc(uint32_t device, size_t bytes, void *stream, void **out);

/**
 * As `vpmm_free`, for memory of the process's pool on a device.
 *
 * # Safety
 * As `vpmm_free`; the stream lasts as in `vpmm_process_malloc`.
 */
enum vpmm_status vpmm_process_free(uint32_t device, void *pointer, void *stream);

/**
 * Says that a stream which the process's pools were given is about to end. They then know no stream
 * by that handle; `known`, which may be null, says whether they did. For the streams that a framework
 * makes and keeps it is not needed.
 *
 * # Safety
 * The stream is alive, and no other thread is in a call with it; `known` is null or has room for a
 * number.
 */
enum vpmm_status vpmm_process_forget_stream(uint32_t device,
                                            void *stream,
                                            uint32_t *known);

/**
 * As `vpmm_record_stream`, for memory of any of the process's pools.
 *
 * # Safety
 * The stream is alive, and lasts as in `vpmm_process_malloc`.
 */
enum vpmm_status vpmm_process_record_stream(void *pointer, void *stream);

/**
 * Copies from the host to a device, and waits for it.
 *
 * # Safety
 * Both have so many bytes; the stream lasts as in `vpmm_process_malloc`; who else uses the device's
 * memory is ordered before or after.
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
 * Both streams are alive, and last as in `vpmm_process_malloc`.
 */
enum vpmm_status vpmm_process_wait_for(uint32_t device, void *waiting, void *other);

/**
 * Waits on the host for everything enqueued so far on a stream; what was freed there before is then
 * everybody's.
 *
 * # Safety
 * As in `vpmm_process_malloc`.
 */
enum vpmm_status vpmm_process_synchronize(uint32_t device, void *on);

/**
 * Copies from the host to a device, and waits for it.
 *
 * # Safety
 * Both have so many bytes; the stream lasts as in `vpmm_process_malloc`; who else uses the device's
 * memory is ordered before or after.
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
 * Both streams are alive, and last as in `vpmm_process_malloc`.
 */
enum vpmm_status vpmm_process_wait_for(uint32_t device, void *waiting, void *other);

/**
 * Waits on the host for everything enqueued so far on a stream; what was freed there before is then
 * everybody's.
 *
 * # Safety
 * As in `vpmm_process_malloc`.
 */
enum vpmm_status vpmm_process_synchronize(uint32_t device, void *on);

/**
 * PyTorch's `alloc`. Throws.
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
 * PyTorch's `memory_fraction`: the part of a device's memory that its pool may hold. Throws.
 *
 * # Safety
 * As in `vpmm_torch_reset`.
 */
void vpmm_torch_memory_fraction(double fraction, int device);

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
 * As in `vpmm_torch_alloc`.
 */
void vpmm_torch_record_stream(void *pointer, void *stream);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* VPMM_H */
