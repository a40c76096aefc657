/* A program in C: a child of a process whose threads were in the middle of calls. What they hold is held for
   ever there, so that the child is turned away before it waits for it. Prints nothing if all is well. */

#define _DEFAULT_SOURCE

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "must.h"
#include "vpmm.h"

#define MIB ((size_t)1 << 20)

static vpmm_driver *driver;
static vpmm_export *export;
static vpmm_resource *tracking;
static int ends[2];
static atomic_int done;

/* Both take what the look for a stream waits for, and refuse. */
static void *look_for_streams(void *none) {
  while (!done) {
    MUST(vpmm_stream_destroy(driver, (void *)0x1000) == VPMM_INVALID_ARGUMENT);
    MUST(vpmm_stream_take_back(driver, (void *)0x1000) == VPMM_INVALID_ARGUMENT);
  }
  return none;
}

static void *look_for_pools(void *none) {
  while (!done) MUST(vpmm_process_has_pool(0) == 1);
  return none;
}

static void *write_down(void *none) {
  while (!done) {
    void *pointer = NULL;
    MUST(vpmm_process_malloc(0, MIB, NULL, &pointer) == VPMM_OK);
    MUST(vpmm_process_free(0, pointer, NULL) == VPMM_OK);
  }
  return none;
}

static void *tag(void *none) {
  while (!done) {
    MUST(vpmm_process_push_tag("a tag") == VPMM_OK && vpmm_process_pop_tag() == VPMM_OK);
  }
  return none;
}

static void *track(void *none) {
  while (!done) {
    void *pointer = NULL;
    MUST(vpmm_resource_allocate(tracking, MIB, 0, NULL, &pointer) == VPMM_OK);
    MUST(vpmm_resource_deallocate(tracking, pointer, MIB, 0, NULL) == VPMM_OK);
  }
  return none;
}

/* Nobody takes it until the end. */
static void *send_all(void *none) {
  MUST(vpmm_export_send_all(export, ends[0]) == VPMM_IO_ERROR);
  return none;
}

static void count(void *context, const char *bytes, size_t length) {
  (void)bytes;
  *(size_t *)context += length;
}

static void in_the_child(const vpmm_pool *pool, void *memory, void *of_process, uintptr_t unseen) {
  void *const stream = (void *)unseen;
  void *out = NULL;
  alarm(20);
  MUST(vpmm_malloc(pool, MIB, stream, &out) == VPMM_FORKED && out == NULL);
  MUST(vpmm_free(pool, memory, stream) == VPMM_FORKED);
  MUST(vpmm_free_any(driver, memory, (void *)(unseen + 8)) == VPMM_FORKED);
  MUST(vpmm_record_stream(pool, memory, (void *)(unseen + 16)) == VPMM_FORKED);
  MUST(vpmm_stream_create(driver, 0, &out) == VPMM_FORKED && out == NULL);
  MUST(vpmm_stream_lend(driver, 0, stream) == VPMM_FORKED);
  MUST(vpmm_stream_take_back(driver, stream) == VPMM_FORKED);
  MUST(vpmm_stream_destroy(driver, stream) == VPMM_FORKED);
  MUST(vpmm_stream_synchronize(driver, 0, stream) == VPMM_FORKED);
  MUST(vpmm_process_malloc(0, MIB, stream, &out) == VPMM_FORKED && out == NULL);
  MUST(vpmm_process_free(0, of_process, stream) == VPMM_FORKED);
  MUST(vpmm_process_free(0, of_process, NULL) == VPMM_FORKED);
  MUST(vpmm_process_record_stream(of_process, stream) == VPMM_FORKED);
  MUST(vpmm_process_synchronize(0, stream) == VPMM_FORKED);
  MUST(vpmm_process_keep_stream(0, stream) == VPMM_FORKED);
  vpmm_pool_options options;
  vpmm_pool_options_init(&options, sizeof options);
  MUST(vpmm_process_configure(&options) == VPMM_FORKED);
  MUST(vpmm_process_record_history(1000, NULL, NULL) == VPMM_FORKED);
  size_t length = 0;
  MUST(vpmm_process_snapshot(count, &length) == VPMM_OK && length > 0 && length < 200);
  MUST(vpmm_process_push_tag("the child's") == VPMM_OK && vpmm_process_pop_tag() == VPMM_OK);
  MUST(vpmm_torch_failed_requests(0) == 0);
  MUST(vpmm_export_send_all(export, ends[0]) == VPMM_FORKED);
  uint64_t number = 0;
  MUST(vpmm_resource_outstanding(tracking, NULL, 0, NULL, &number) == VPMM_FORKED);
  MUST(vpmm_resource_allocate(tracking, MIB, 0, NULL, &out) == VPMM_FORKED);
  MUST(vpmm_resource_deallocate(tracking, memory, MIB, 0, NULL) == VPMM_FORKED);
  MUST(vpmm_resource_record_stream(tracking, memory, stream) == VPMM_FORKED);
  /* The parent's allocation is none that was never freed. */
  vpmm_resource_release(tracking);
  uint32_t devices = 0;
  MUST(vpmm_driver_device_count(driver, &devices) == VPMM_FORKED && devices == 0);
  _exit(0);
}

int main(void) {
  vpmm_pool *pool = NULL;
  void *memory = NULL, *of_process = NULL;
  MUST(vpmm_process_driver(&driver) == VPMM_OK && vpmm_process_pool(0, &pool) == VPMM_OK);
  vpmm_pool_release(pool);
  MUST(vpmm_pool_create(driver, NULL, &pool) == VPMM_OK);
  MUST(vpmm_malloc(pool, MIB, NULL, &memory) == VPMM_OK);
  MUST(vpmm_process_keep_stream(0, NULL) == VPMM_OK);
  MUST(vpmm_process_malloc(0, MIB, NULL, &of_process) == VPMM_OK);
  MUST(vpmm_process_record_history(1000, NULL, NULL) == VPMM_OK);
  vpmm_pool_options options;
  vpmm_pool_options_init(&options, sizeof options);
  options.sharing = VPMM_SHARING_FILE_DESCRIPTOR;
  vpmm_pool *shared = NULL;
  void *sent = NULL;
  MUST(vpmm_pool_create(driver, &options, &shared) == VPMM_OK);
  MUST(vpmm_malloc(shared, MIB, NULL, &sent) == VPMM_OK);
  MUST(vpmm_export_create(shared, &export) == VPMM_OK);
  MUST(vpmm_resource_open(driver, 0, "tracking(cuda-malloc)", NULL, &tracking) == VPMM_OK);
  MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  void *(*const work[])(void *) = {look_for_streams, look_for_pools, write_down, tag, track, send_all};
  pthread_t threads[6];
  for (int at = 0; at < 6; at++) MUST(pthread_create(&threads[at], NULL, work[at], NULL) == 0);
  for (uintptr_t turn = 0; turn < 100; turn++) {
    pid_t child = fork();
    MUST(child >= 0);
    if (child == 0) in_the_child(pool, memory, of_process, (turn + 1) << 20);
    int status = 0;
    MUST(waitpid(child, &status, 0) == child);
    MUST(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  done = 1;
  close(ends[1]);
  for (int at = 0; at < 6; at++) MUST(pthread_join(threads[at], NULL) == 0);
  MUST(vpmm_process_record_history(0, NULL, NULL) == VPMM_OK);
  MUST(vpmm_process_free(0, of_process, NULL) == VPMM_OK);
  MUST(vpmm_free(pool, memory, NULL) == VPMM_OK);
  MUST(vpmm_free(shared, sent, NULL) == VPMM_OK);
  close(ends[0]);
  vpmm_export_release(export);
  vpmm_resource_release(tracking);
  vpmm_pool_release(shared);
  vpmm_pool_release(pool);
  vpmm_driver_release(driver);
  return 0;
}
