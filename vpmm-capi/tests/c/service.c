/* A program in C: the client of the GPU memory service, at the server whose socket is named. Prints nothing
   if all is well, and what is not else. */

#define _POSIX_C_SOURCE 200809L

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "must.h"
#include "vpmm.h"

static const uint64_t MIB = (uint64_t)1 << 20;

/* What visitors took down. */
typedef struct seen {
  int count;
  char id[64], text[128];
  uint64_t bytes, slot, address, offset;
  uint32_t is_mapped;
} seen;

static void see(void *context, const vpmm_gms_allocation *allocation) {
  seen *to = context;
  to->count++;
  snprintf(to->id, sizeof to->id, "%s", allocation->id);
  snprintf(to->text, sizeof to->text, "%s", allocation->tag);
  to->bytes = allocation->aligned_bytes;
  to->slot = allocation->layout_slot;
  to->address = allocation->address;
  to->is_mapped = allocation->is_mapped;
}

static void see_key(void *context, const char *key) {
  seen *to = context;
  to->count++;
  snprintf(to->text, sizeof to->text, "%s", key);
}

static void see_value(void *context, const char *id, uint64_t offset, const void *value, size_t bytes) {
  seen *to = context;
  to->count++;
  to->offset = offset;
  snprintf(to->id, sizeof to->id, "%s", id);
  memcpy(to->text, value, bytes < sizeof to->text ? bytes : sizeof to->text);
  to->bytes = bytes;
}

static vpmm_gms_state state_of(const vpmm_gms *gms) {
  vpmm_gms_state state;
  vpmm_gms_state_init(&state, sizeof state);
  MUST(vpmm_gms_state_of(gms, &state) == VPMM_OK);
  return state;
}

static vpmm_gms *opened(const vpmm_driver *driver, const char *socket) {
  vpmm_gms *gms = NULL;
  MUST(vpmm_gms_open(driver, 0, socket, &gms) == VPMM_OK && gms != NULL);
  return gms;
}

static int is_open(int file) { return fcntl(file, F_GETFD) >= 0; }

/* Written, published, read by another, given up and had back at the same addresses. */
static void a_layout(const vpmm_driver *driver, const char *socket) {
  vpmm_gms *writer = opened(driver, socket), *reader = opened(driver, socket);
  MUST(state_of(writer).grant == VPMM_GMS_GRANT_NONE && state_of(writer).granularity == 2 * MIB);
  uint32_t grant = 9;
  MUST(vpmm_gms_connect(writer, VPMM_GMS_RW_OR_RO, 10000, &grant) == VPMM_OK);
  MUST(grant == VPMM_GMS_GRANT_RW && state_of(writer).grant == grant);
  MUST(vpmm_gms_connect(writer, VPMM_GMS_RW, 0, NULL) == VPMM_BAD_STATE);
  grant = 9;
  MUST(vpmm_gms_connect(reader, VPMM_GMS_RO, 20, &grant) == VPMM_TIMED_OUT && grant == 9);
  MUST(vpmm_gms_connect(reader, 4, 20, NULL) == VPMM_INVALID_ARGUMENT);

  uint64_t one = 0, many[2] = {0, 0};
  const uint64_t sizes[2] = {2 * MIB, 4 * MIB};
  MUST(vpmm_gms_create_mapping(writer, NULL, 5, "weights", &one) == VPMM_OK && one != 0);
  MUST(vpmm_gms_create_mappings(writer, sizes, 2, "weights", many) == VPMM_OK);
  MUST(many[1] == many[0] + 2 * MIB);
  MUST(vpmm_gms_create_mappings(writer, NULL, 0, NULL, NULL) == VPMM_OK);
  MUST(vpmm_gms_create_mapping(writer, NULL, 0, "weights", &one) == VPMM_INVALID_ARGUMENT);
  MUST(state_of(writer).total_bytes == 8 * MIB);
  seen seen = {0};
  MUST(vpmm_gms_list_mappings(writer, see, &seen) == VPMM_OK && seen.count == 3 && seen.is_mapped);
  memset(&seen, 0, sizeof seen);
  MUST(vpmm_gms_list_handles(writer, "weights", see, &seen) == VPMM_OK && seen.count == 3);
  MUST(seen.slot == 2 && seen.bytes == 4 * MIB && strcmp(seen.text, "weights") == 0);
  char last[64];
  strcpy(last, seen.id);
  MUST(vpmm_gms_metadata_put(writer, "k", last, 7, "v\0w", 3) == VPMM_OK);
  MUST(vpmm_gms_metadata_put(writer, "none", last, 0, NULL, 0) == VPMM_OK);
  MUST(vpmm_gms_metadata_put(writer, "none", last, 0, NULL, 1) == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_gms_metadata_put(writer, "none", "x", 0, NULL, 0) == VPMM_REFUSED);
  MUST(vpmm_gms_metadata_put(writer, "\xff", last, 0, NULL, 0) == VPMM_INVALID_ARGUMENT);
  uint32_t deleted = 7;
  MUST(vpmm_gms_metadata_delete(writer, "none", &deleted) == VPMM_OK && deleted == 1);
  MUST(vpmm_gms_metadata_delete(writer, "none", &deleted) == VPMM_OK && deleted == 0);
  MUST(vpmm_gms_commit(writer) == VPMM_OK);
  MUST(state_of(writer).grant == VPMM_GMS_GRANT_NONE && state_of(writer).is_unmapped == 1);
  MUST(vpmm_gms_commit(writer) == VPMM_BAD_STATE);

  MUST(vpmm_gms_connect(reader, VPMM_GMS_RW_OR_RO, 10000, &grant) == VPMM_OK);
  MUST(grant == VPMM_GMS_GRANT_RO);
  memset(&seen, 0, sizeof seen);
  MUST(vpmm_gms_import_all(reader, NULL, see, &seen) == VPMM_OK && seen.count == 3 && seen.is_mapped);
  uint64_t there = seen.address;
  MUST(vpmm_gms_create_mapping(reader, last, 0, NULL, &one) == VPMM_OK && one == there);
  memset(&seen, 0, sizeof seen);
  MUST(vpmm_gms_metadata_get(reader, "k", see_value, &seen) == VPMM_OK && seen.count == 1);
  MUST(seen.offset == 7 && seen.bytes == 3 && memcmp(seen.text, "v\0w", 3) == 0);
  MUST(strcmp(seen.id, last) == 0);
  MUST(vpmm_gms_metadata_get(reader, "none", see_value, &seen) == VPMM_OK && seen.count == 1);
  memset(&seen, 0, sizeof seen);
  MUST(vpmm_gms_metadata_list(reader, NULL, see_key, &seen) == VPMM_OK && seen.count == 1);
  MUST(strcmp(seen.text, "k") == 0);
  MUST(vpmm_gms_metadata_list(reader, "x", see_key, &seen) == VPMM_OK && seen.count == 1);
  MUST(vpmm_gms_layout_hash(reader, see_key, &seen) == VPMM_OK && strlen(seen.text) == 64);
  MUST(vpmm_gms_create_mapping(reader, NULL, 1, "weights", &one) == VPMM_BAD_STATE);

  MUST(vpmm_gms_unmap_all(reader) == VPMM_OK && state_of(reader).is_unmapped == 1);
  MUST(vpmm_gms_abort(reader) == VPMM_OK && vpmm_gms_remap_all(reader) == VPMM_BAD_STATE);
  MUST(vpmm_gms_connect(reader, VPMM_GMS_RO, 10000, NULL) == VPMM_OK);
  MUST(vpmm_gms_remap_all(reader) == VPMM_OK && state_of(reader).is_unmapped == 0);
  MUST(vpmm_gms_create_mapping(reader, last, 0, NULL, &one) == VPMM_OK && one == there);
  MUST(vpmm_gms_unmap_all(reader) == VPMM_OK && vpmm_gms_abort(reader) == VPMM_OK);

  /* Another layout by now. */
  MUST(vpmm_gms_connect(writer, VPMM_GMS_RW, 10000, NULL) == VPMM_OK);
  MUST(vpmm_gms_commit(writer) == VPMM_OK);
  MUST(vpmm_gms_connect(reader, VPMM_GMS_RO, 10000, NULL) == VPMM_OK);
  MUST(vpmm_gms_remap_all(reader) == VPMM_STALE);
  MUST(vpmm_gms_close(reader) == VPMM_OK && vpmm_gms_abort(reader) == VPMM_BAD_STATE);
  MUST(state_of(reader).grant == VPMM_GMS_GRANT_NONE);
  vpmm_gms_release(reader);
  vpmm_gms_release(writer);
}

/* Each step by itself. A descriptor that is handed over is closed, whatever becomes of it. */
static void single_steps(const vpmm_driver *driver, const char *socket) {
  vpmm_gms *gms = opened(driver, socket);
  MUST(vpmm_gms_connect(gms, VPMM_GMS_RW_DATA_OR_RW, -1, NULL) == VPMM_OK);
  seen made = {0}, found = {0};
  MUST(vpmm_gms_allocate_handle(gms, 5, "t", see, &made) == VPMM_OK && made.bytes == 2 * MIB);
  MUST(vpmm_gms_allocate_handle(gms, 5, "t", NULL, &made) == VPMM_INVALID_ARGUMENT && made.count == 1);
  MUST(vpmm_gms_handle_info(gms, made.id, see, &found) == VPMM_OK && found.slot == 0);
  MUST(vpmm_gms_handle_info(gms, "x", see, &found) == VPMM_REFUSED && found.count == 1);
  uint64_t at = 0;
  int file = -1, other = -1;
  MUST(vpmm_gms_reserve(gms, 1, &at) == VPMM_OK && at != 0);
  MUST(vpmm_gms_export_handle(gms, made.id, &file) == VPMM_OK && is_open(file));
  MUST(fcntl(file, F_GETFD) & FD_CLOEXEC);
  MUST(vpmm_gms_export_handle(gms, made.id, NULL) == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_gms_map(gms, file, at, made.id) == VPMM_OK && !is_open(file));
  MUST(vpmm_gms_map(gms, -1, at, made.id) == VPMM_INVALID_ARGUMENT);
  const struct {
    vpmm_gms *gms;
    uint64_t at;
    const char *id;
    enum vpmm_status status;
  } wrong[] = {
      {gms, at, made.id, VPMM_BAD_STATE},      {gms, at + 1, made.id, VPMM_BAD_POINTER},
      {gms, at, "x", VPMM_REFUSED},            {gms, at, NULL, VPMM_INVALID_ARGUMENT},
      {NULL, at, made.id, VPMM_INVALID_ARGUMENT},
  };
  for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
    MUST(vpmm_gms_export_handle(gms, made.id, &other) == VPMM_OK);
    MUST(vpmm_gms_map(wrong[i].gms, other, wrong[i].at, wrong[i].id) == wrong[i].status);
    MUST(!is_open(other));
  }
  MUST(vpmm_gms_free_address(gms, at) == VPMM_BAD_STATE);
  MUST(vpmm_gms_unmap(gms, at) == VPMM_OK && vpmm_gms_unmap(gms, at) == VPMM_OK);
  MUST(vpmm_gms_free_address(gms, at) == VPMM_OK);
  MUST(vpmm_gms_unmap(gms, at) == VPMM_BAD_POINTER);
  MUST(vpmm_gms_create_mapping(gms, made.id, 0, NULL, &at) == VPMM_OK);
  MUST(vpmm_gms_destroy_mapping(gms, at) == VPMM_OK);
  MUST(vpmm_gms_destroy_mapping(gms, at) == VPMM_BAD_POINTER);
  uint32_t freed = 7;
  MUST(vpmm_gms_free_handle(gms, made.id, &freed) == VPMM_OK && freed == 0);
  seen sealed = {0};
  MUST(vpmm_gms_commit_layout(gms, see_key, &sealed) == VPMM_OK && strlen(sealed.text) == 64);
  MUST(state_of(gms).grant == VPMM_GMS_GRANT_RW_DATA);
  vpmm_gms_release(gms);
}

/* Addresses before there is memory for them. */
static void scratch(const vpmm_driver *driver, const char *socket) {
  vpmm_gms *gms = opened(driver, socket);
  uint64_t at = 0, gone = 0, count = 0, asked = 0, held = 0;
  MUST(vpmm_gms_set_scratch_block(gms, 3 * MIB) == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_gms_set_scratch_block(gms, 2 * MIB) == VPMM_OK);
  MUST(vpmm_gms_create_scratch_mapping(gms, 5 * MIB, "kv", &at) == VPMM_OK);
  MUST(vpmm_gms_create_scratch_mapping(gms, 1, "kv", &gone) == VPMM_OK);
  uint32_t found = 7;
  MUST(vpmm_gms_destroy_scratch_mapping(gms, gone, &found) == VPMM_OK && found == 1);
  MUST(vpmm_gms_destroy_scratch_mapping(gms, gone, &found) == VPMM_OK && found == 0);
  MUST(vpmm_gms_scratch_summary(gms, &count, &asked, &held) == VPMM_OK);
  MUST(count == 1 && asked == 5 * MIB && held == 2 * MIB);
  MUST(vpmm_gms_scratch_summary(gms, NULL, NULL, NULL) == VPMM_OK);
  MUST(vpmm_gms_prepare_scratch(gms) == VPMM_BAD_STATE);
  MUST(vpmm_gms_unmap_all(gms) == VPMM_OK);
  MUST(vpmm_gms_connect(gms, VPMM_GMS_RW, 10000, NULL) == VPMM_OK);
  MUST(vpmm_gms_prepare_scratch(gms) == VPMM_OK);
  MUST(vpmm_gms_reallocate_all(gms, "kv") == VPMM_OK && vpmm_gms_remap_all(gms) == VPMM_OK);
  seen seen = {0};
  MUST(vpmm_gms_list_mappings(gms, see, &seen) == VPMM_OK && seen.count == 1);
  MUST(seen.address == at && seen.is_mapped && seen.bytes == 6 * MIB);
  vpmm_gms_release(gms);
}

/* Memory of the service's, where the process's pool is a resource. */
static void a_resource(const char *socket) {
  vpmm_driver *driver = NULL;
  vpmm_pool *pool = NULL;
  vpmm_resource *resource = NULL;
  vpmm_gms_heap *heap = NULL;
  void *stream = NULL, *side = NULL, *memory = NULL, *more = NULL;
  MUST(vpmm_process_driver(&driver) == VPMM_OK && vpmm_process_pool(0, &pool) == VPMM_OK);
  MUST(vpmm_resource_of_pool(pool, &resource) == VPMM_OK);
  MUST(vpmm_stream_create(driver, 0, &stream) == VPMM_OK);
  MUST(vpmm_stream_create(driver, 0, &side) == VPMM_OK);
  vpmm_gms *gms = opened(driver, socket);
  MUST(vpmm_gms_connect(gms, VPMM_GMS_RW, 10000, NULL) == VPMM_OK);
  MUST(vpmm_gms_heap_open(0, &heap) == VPMM_OK && vpmm_gms_heap_push(heap) == VPMM_OK);
  MUST(vpmm_gms_torch_begin(gms, "weights", 0) == VPMM_OK);
  MUST(vpmm_resource_allocate(resource, 3 * MIB, 0, stream, &memory) == VPMM_OK);
  MUST(vpmm_gms_torch_end() == VPMM_OK);
  /* Why there is no more is the same as without a resource. */
  MUST(vpmm_resource_allocate(resource, 64 * MIB, 0, stream, &more) == VPMM_BAD_STATE);
  MUST(vpmm_process_malloc(0, 64 * MIB, stream, &more) == VPMM_BAD_STATE);
  MUST(vpmm_process_pop_tag() == VPMM_OK);
  MUST(vpmm_process_record_stream(memory, side) == VPMM_OK);
  MUST(vpmm_resource_record_stream(resource, memory, side) == VPMM_OK);
  MUST(vpmm_resource_deallocate(resource, memory, 3 * MIB, 0, stream) == VPMM_OK);
  vpmm_gms_heap_release(heap);
  vpmm_gms_release(gms);
  MUST(vpmm_stream_destroy(driver, side) == VPMM_OK);
  MUST(vpmm_stream_destroy(driver, stream) == VPMM_OK);
  vpmm_resource_release(resource);
  vpmm_pool_release(pool);
  vpmm_driver_release(driver);
}

/* Memory of a heap that nobody but a thread's requests knows any more: freed as any other. */
static void a_heap_that_is_released_first(const char *socket) {
  vpmm_driver *driver = NULL;
  vpmm_gms_heap *heap = NULL;
  void *memory[2] = {NULL, NULL};
  MUST(vpmm_process_driver(&driver) == VPMM_OK);
  vpmm_gms *gms = opened(driver, socket);
  MUST(vpmm_gms_connect(gms, VPMM_GMS_RW, 10000, NULL) == VPMM_OK);
  MUST(vpmm_gms_heap_open(0, &heap) == VPMM_OK && vpmm_gms_heap_push(heap) == VPMM_OK);
  vpmm_gms_heap_release(heap);
  MUST(vpmm_gms_torch_begin(gms, "weights", 0) == VPMM_OK);
  for (int turn = 0; turn < 2; turn++) {
    MUST(vpmm_process_malloc(0, 3 * MIB, NULL, &memory[0]) == VPMM_OK);
    MUST(vpmm_process_malloc(0, 30 * MIB, NULL, &memory[1]) == VPMM_OK);
    MUST(state_of(gms).total_bytes >= 33 * MIB);
    MUST(vpmm_process_free(0, memory[0], NULL) == VPMM_OK);
    MUST(vpmm_process_free(0, memory[1], NULL) == VPMM_OK);
    MUST(state_of(gms).total_bytes == 0);
  }
  MUST(vpmm_gms_torch_end() == VPMM_OK && vpmm_process_pop_tag() == VPMM_OK);
  vpmm_gms_release(gms);
  vpmm_driver_release(driver);
}

static void *wait_to_write(void *gms) {
  MUST(vpmm_gms_connect(gms, VPMM_GMS_RW, 60000, NULL) == VPMM_OK);
  return NULL;
}

/* A child of a client does not speak for it, nor wait for a call that a thread of it is in. */
static void a_child(const vpmm_driver *driver, const char *socket) {
  vpmm_gms *gms = opened(driver, socket), *waits = opened(driver, socket);
  uint64_t at = 0;
  seen seen = {0};
  MUST(vpmm_gms_connect(gms, VPMM_GMS_RW, 10000, NULL) == VPMM_OK);
  MUST(vpmm_gms_create_mapping(gms, NULL, 1, "t", &at) == VPMM_OK);
  pthread_t thread;
  MUST(pthread_create(&thread, NULL, wait_to_write, waits) == 0);
  const struct timespec moment = {0, 50000000};
  MUST(nanosleep(&moment, NULL) == 0);
  pid_t child = fork();
  MUST(child >= 0);
  if (child == 0) {
    alarm(60);
    MUST(vpmm_gms_torch_begin(gms, "t", 0) == VPMM_FORKED);
    vpmm_gms *none = NULL;
    MUST(vpmm_gms_open(driver, 0, socket, &none) == VPMM_FORKED && none == NULL);
    MUST(vpmm_gms_list_mappings(waits, see, &seen) == VPMM_FORKED);
    MUST(vpmm_gms_list_handles(gms, NULL, see, &seen) == VPMM_FORKED && seen.count == 0);
    MUST(vpmm_gms_commit(gms) == VPMM_FORKED);
    MUST(vpmm_gms_abort(gms) == VPMM_FORKED);
    vpmm_gms_release(waits);
    vpmm_gms_release(gms);
    _exit(0);
  }
  int status = 0;
  MUST(waitpid(child, &status, 0) == child);
  MUST(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  MUST(vpmm_gms_list_handles(gms, NULL, see, &seen) == VPMM_OK && seen.count == 1);
  vpmm_gms_release(gms);
  MUST(pthread_join(thread, NULL) == 0);
  vpmm_gms_release(waits);
}

/* A server that takes connections and says nothing: who waits for its lock does not wait for ever. */
static void a_silent_server(const vpmm_driver *driver, const char *beside) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  snprintf(address.sun_path, sizeof address.sun_path, "%s.silent", beside);
  int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  MUST(listener >= 0 && bind(listener, (const struct sockaddr *)&address, sizeof address) == 0);
  MUST(listen(listener, 8) == 0);
  MUST(vpmm_gms_set_answer_timeout(NULL, 100) == VPMM_INVALID_ARGUMENT);
  vpmm_gms *gms = opened(driver, address.sun_path);
  MUST(vpmm_gms_set_answer_timeout(gms, 100) == VPMM_OK);
  MUST(vpmm_gms_connect(gms, VPMM_GMS_RW, -1, NULL) == VPMM_DISCONNECTED);
  MUST(strcmp(vpmm_last_error(), "the server has not answered for 0.1 s") == 0);
  MUST(vpmm_gms_set_answer_timeout(gms, -1) == VPMM_OK);
  vpmm_gms_release(gms);
  close(listener);
  unlink(address.sun_path);
}

static int checks;
static vpmm_gms *checked;

static uint32_t check(void *context) {
  MUST(context == &checks);
  /* The client is the waiting call's. */
  MUST(vpmm_gms_abort(checked) == VPMM_IN_USE && vpmm_gms_close(checked) == VPMM_IN_USE);
  return ++checks == 3;
}

/* Nobody waits longer than somebody says, be it for a lock or for memory that there is too little of. */
static void waits_that_end(const vpmm_driver *driver, const char *socket) {
  seen any = {0};
  vpmm_gms *other = opened(driver, socket);
  checked = opened(driver, socket);
  MUST(vpmm_gms_set_check(checked, check, &checks) == VPMM_OK);
  MUST(vpmm_gms_connect(other, VPMM_GMS_RW, 10000, NULL) == VPMM_OK);
  MUST(vpmm_gms_connect(checked, VPMM_GMS_RW, -1, NULL) == VPMM_INTERRUPTED && checks == 3);
  MUST(state_of(checked).grant == VPMM_GMS_GRANT_NONE);
  vpmm_gms_release(other);
  checks = 0;
  MUST(vpmm_gms_connect(checked, VPMM_GMS_RW, 10000, NULL) == VPMM_OK);
  MUST(vpmm_gms_allocate_handle(checked, 140 * 1024 * MIB, "t", see, &any) == VPMM_OK);
  uint64_t address = 7;
  MUST(vpmm_gms_create_mapping(checked, NULL, 10 * 1024 * MIB, "t", &address) == VPMM_INTERRUPTED);
  MUST(checks == 3 && address == 7 && state_of(checked).grant == VPMM_GMS_GRANT_NONE);
  MUST(vpmm_gms_set_check(checked, NULL, NULL) == VPMM_OK);
  MUST(vpmm_gms_connect(checked, VPMM_GMS_RW, 10000, NULL) == VPMM_OK);
  MUST(vpmm_gms_create_mapping(checked, NULL, 1, "t", &address) == VPMM_OK && checks == 3);
  vpmm_gms_release(checked);
}

static void what_is_no_client(const vpmm_driver *driver) {
  vpmm_gms *gms = NULL;
  MUST(vpmm_gms_open(NULL, 0, "s", &gms) == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_gms_open(driver, 0, NULL, &gms) == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_gms_open(driver, 0, "s", NULL) == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_gms_open(driver, 99, "s", &gms) == VPMM_DRIVER_ERROR && gms == NULL);
  MUST(vpmm_gms_abort(NULL) == VPMM_INVALID_ARGUMENT);
  MUST(strcmp(vpmm_last_error(), "gms is null") == 0);
  vpmm_gms_release(NULL);
  gms = opened(driver, "/nonexistent/socket");
  seen seen = {0};
  MUST(vpmm_gms_connect(gms, VPMM_GMS_RW, 1, NULL) == VPMM_DISCONNECTED);
  MUST(vpmm_gms_list_handles(gms, NULL, see, &seen) == VPMM_BAD_STATE && seen.count == 0);
  MUST(vpmm_gms_socket_path(gms, see_key, &seen) == VPMM_OK);
  MUST(strcmp(seen.text, "/nonexistent/socket") == 0);
  /* A path of one's own stays where it is. */
  MUST(vpmm_gms_set_tag(gms, "weights") == VPMM_OK && vpmm_gms_set_tag(gms, NULL) != VPMM_OK);
  vpmm_gms_release(gms);
}

int main(int count, char **arguments) {
  MUST(count == 2);
  vpmm_driver *driver = NULL;
  MUST(vpmm_driver_load("sim", &driver) == VPMM_OK);
  a_layout(driver, arguments[1]);
  single_steps(driver, arguments[1]);
  scratch(driver, arguments[1]);
  a_resource(arguments[1]);
  a_heap_that_is_released_first(arguments[1]);
  a_child(driver, arguments[1]);
  a_silent_server(driver, arguments[1]);
  waits_that_end(driver, arguments[1]);
  what_is_no_client(driver);
  vpmm_driver_release(driver);
  return 0;
}
