/* A program in C: heaps that sleep, graphs' pools, memory for another process, what to do when memory
   runs out. Prints nothing if all is well, and what is not else. */

#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "must.h"
#include "vpmm.h"

static const uint64_t MIB = (uint64_t)1 << 20;

static vpmm_stats stats_of(const vpmm_pool *pool) {
  vpmm_stats stats;
  vpmm_stats_init(&stats, sizeof stats);
  MUST(vpmm_pool_stats(pool, &stats) == VPMM_OK);
  return stats;
}

static vpmm_pool *limited(vpmm_driver *driver, uint64_t limit_bytes, uint32_t sharing) {
  vpmm_pool_options options;
  vpmm_pool_options_init(&options, sizeof options);
  options.limit_bytes = limit_bytes;
  options.sharing = sharing;
  vpmm_pool *pool = NULL;
  MUST(vpmm_pool_create(driver, &options, &pool) == VPMM_OK);
  return pool;
}

static void further_streams(vpmm_driver *driver) {
  vpmm_pool *pool = limited(driver, 64 * MIB, VPMM_SHARING_NONE);
  void *streams[2] = {NULL, NULL}, *pointer = NULL;
  for (int i = 0; i < 2; i++) {
    MUST(vpmm_stream_create(driver, 0, &streams[i]) == VPMM_OK);
  }
  MUST(vpmm_malloc(pool, 4 * MIB, streams[0], &pointer) == VPMM_OK);
  MUST(vpmm_record_stream(pool, pointer, streams[1]) == VPMM_OK);
  MUST(stats_of(pool).deferred_bytes == 0);
  MUST(vpmm_free(pool, pointer, streams[0]) == VPMM_OK);
  MUST(stats_of(pool).deferred_bytes == 4 * MIB && stats_of(pool).pending_bytes == 4 * MIB);
  for (int i = 0; i < 2; i++) {
    MUST(vpmm_stream_destroy(driver, streams[i]) == VPMM_OK);
  }
  vpmm_pool_release(pool);
}

static void sleep_and_wake(vpmm_driver *driver, const char *file) {
  vpmm_pool *pool = limited(driver, 64 * MIB, VPMM_SHARING_NONE);
  vpmm_tagged *weights = NULL, *same = NULL;
  MUST(vpmm_tagged_open(pool, "weights", &weights) == VPMM_OK);
  MUST(vpmm_tagged_open(pool, "weights", &same) == VPMM_OK);
  void *stream = NULL, *pointer = NULL, *other = NULL;
  MUST(vpmm_stream_create(driver, 0, &stream) == VPMM_OK);
  MUST(vpmm_tagged_malloc(weights, 40 * MIB, stream, &pointer) == VPMM_OK);
  MUST(vpmm_tagged_malloc(weights, 0, stream, &other) == VPMM_OK && other == NULL);
  void *start = NULL;
  uint64_t bytes = 0;
  MUST(vpmm_pool_allocation(pool, (char *)pointer + 12345, &start, &bytes) == VPMM_OK);
  MUST(start == pointer && bytes == 40 * MIB);
  MUST(vpmm_pool_allocation(pool, (void *)0x1000, &start, &bytes) == VPMM_BAD_POINTER);
  vpmm_stats stats;
  vpmm_stats_init(&stats, sizeof stats);
  MUST(vpmm_tagged_stats(same, &stats) == VPMM_OK && stats.live_bytes == 40 * MIB);

  const uint32_t contents[] = {VPMM_CONTENTS_DISCARD, VPMM_CONTENTS_KEEP,
                               VPMM_CONTENTS_KEEP_BUFFERS, VPMM_CONTENTS_SAVE};
  uint32_t asleep = 7;
  for (int i = 0; i < 4; i++) {
    MUST(vpmm_malloc(pool, 30 * MIB, stream, &other) == VPMM_OUT_OF_MEMORY);
    bytes = 0;
    MUST(vpmm_suspend(pool, "weights", stream, contents[i], file, &bytes) == VPMM_OK);
    MUST(bytes >= 40 * MIB);
    MUST(vpmm_tagged_is_asleep(same, &asleep) == VPMM_OK && asleep == 1);
    MUST(vpmm_suspend(pool, "weights", stream, 0, NULL, NULL) == VPMM_BAD_STATE);
    MUST(vpmm_tagged_malloc(weights, 1, stream, &other) == VPMM_BAD_STATE);
    /* Its memory is there for others. */
    MUST(vpmm_malloc(pool, 30 * MIB, stream, &other) == VPMM_OK);
    MUST(vpmm_resume(pool, "weights", stream, 0, NULL) == VPMM_OUT_OF_MEMORY);
    MUST(vpmm_free(pool, other, stream) == VPMM_OK);
    MUST(vpmm_stream_synchronize(driver, 0, stream) == VPMM_OK);
    MUST(vpmm_pool_trim_to(pool, 0, NULL) == VPMM_OK);
    MUST(vpmm_resume(pool, "weights", stream, 0, &bytes) == VPMM_OK && bytes >= 40 * MIB);
    MUST(vpmm_tagged_is_asleep(same, &asleep) == VPMM_OK && asleep == 0);
  }
  struct stat saved;
  MUST(stat(file, &saved) == 0 && (uint64_t)saved.st_size >= 40 * MIB);
  /* A file that is gone: refused, then given up. */
  MUST(vpmm_suspend(pool, "weights", stream, VPMM_CONTENTS_SAVE, file, NULL) == VPMM_OK);
  MUST(unlink(file) == 0);
  MUST(vpmm_resume(pool, "weights", stream, 0, NULL) == VPMM_IO_ERROR);
  MUST(vpmm_resume(pool, "weights", stream, 1, NULL) == VPMM_OK);
  MUST(vpmm_resume(pool, "weights", stream, 0, NULL) == VPMM_BAD_STATE);

  MUST(vpmm_suspend(pool, "nothing", stream, 0, NULL, NULL) == VPMM_NOT_FOUND);
  MUST(vpmm_suspend(pool, "\xff", stream, 0, NULL, NULL) == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_suspend(pool, "weights", stream, 9, NULL, NULL) == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_suspend(pool, "weights", stream, VPMM_CONTENTS_SAVE, NULL, NULL) ==
       VPMM_INVALID_ARGUMENT);
  MUST(vpmm_tagged_open(pool, NULL, &same) == VPMM_INVALID_ARGUMENT);

  MUST(vpmm_free(pool, pointer, stream) == VPMM_OK);
  vpmm_tagged_release(weights);
  vpmm_tagged_release(same);
  vpmm_tagged_release(NULL);
  vpmm_pool_release(pool);
  MUST(vpmm_stream_destroy(driver, stream) == VPMM_OK);
}

static void graphs(vpmm_driver *driver) {
  vpmm_pool *pool = limited(driver, 64 * MIB, VPMM_SHARING_NONE);
  vpmm_graph_pool *graph = NULL;
  void *stream = NULL, *scratch = NULL;
  MUST(vpmm_stream_create(driver, 0, &stream) == VPMM_OK);
  MUST(vpmm_graph_pool_create(pool, &graph) == VPMM_OK);
  MUST(vpmm_graph_pool_begin(graph, NULL) == VPMM_BAD_STATE);
  MUST(vpmm_graph_pool_end(graph, stream) == VPMM_BAD_STATE);
  MUST(vpmm_graph_pool_begin(graph, stream) == VPMM_OK);
  MUST(vpmm_malloc(pool, MIB, stream, &scratch) == VPMM_OK);
  MUST(vpmm_free(pool, scratch, stream) == VPMM_OK);
  MUST(vpmm_graph_pool_end(graph, stream) == VPMM_OK);
  MUST(vpmm_graph_pool_finish(graph, stream) == VPMM_OK);
  MUST(vpmm_graph_pool_begin(graph, stream) == VPMM_BAD_STATE);
  vpmm_graph_pool_release(graph);
  vpmm_graph_pool_release(NULL);
  vpmm_pool_release(pool);
  MUST(vpmm_stream_destroy(driver, stream) == VPMM_OK);
}

struct receiver {
  vpmm_driver *driver;
  int socket;
};

struct more {
  vpmm_import *import;
  int socket;
};

static void *receive_more(void *argument) {
  const struct more *more = argument;
  MUST(vpmm_import_receive_more(more->import, more->socket) == VPMM_OK);
  return NULL;
}

static void *receive_less(void *argument) {
  const struct more *more = argument;
  MUST(vpmm_import_receive_more(more->import, more->socket) == VPMM_IO_ERROR);
  return NULL;
}

/* A sender that stops in the middle of a message keeps nobody from asking what is there. */
static void stalled(vpmm_import *import, uint64_t there) {
  int sockets[2];
  uint64_t bytes = 0, after = 0;
  void *pointer = NULL;
  MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
  MUST(vpmm_import_memory(import, NULL, &bytes) == VPMM_OK);
  struct more more = {import, sockets[1]};
  pthread_t waiting;
  MUST(pthread_create(&waiting, NULL, receive_less, &more) == 0);
  MUST(write(sockets[0], "vpmm", 4) == 4);
  const struct timespec moment = {0, 50000000};
  MUST(nanosleep(&moment, NULL) == 0);
  alarm(60);
  MUST(vpmm_import_memory(import, NULL, &after) == VPMM_OK && after == bytes);
  MUST(vpmm_import_translate(import, there, &pointer) == VPMM_OK && pointer != NULL);
  alarm(0);
  MUST(close(sockets[0]) == 0);
  MUST(pthread_join(waiting, NULL) == 0);
  MUST(close(sockets[1]) == 0);
}

/* The other process, for which a driver of its own stands. */
static void *receive(void *argument) {
  const struct receiver *receiver = argument;
  vpmm_import *one = NULL, *all = NULL;
  MUST(vpmm_import_receive(receiver->driver, 0, receiver->socket, VPMM_ACCESS_NONE, &one) ==
       VPMM_INVALID_ARGUMENT);
  MUST(vpmm_import_receive(receiver->driver, 0, -1, VPMM_ACCESS_READ, &one) ==
       VPMM_INVALID_ARGUMENT);
  MUST(vpmm_import_receive(receiver->driver, 0, receiver->socket, VPMM_ACCESS_READ, &one) ==
       VPMM_OK);
  void *pointer = NULL;
  uint64_t bytes = 0;
  MUST(vpmm_import_memory(one, &pointer, &bytes) == VPMM_OK);
  MUST(pointer != NULL && bytes == 3 * MIB);

  MUST(vpmm_import_receive(receiver->driver, 0, receiver->socket, VPMM_ACCESS_READ_WRITE, &all) ==
       VPMM_OK);
  MUST(vpmm_import_memory(all, &pointer, &bytes) == VPMM_OK && pointer == NULL && bytes > 0);
  uint64_t before = bytes, there = 0;
  /* While one thread waits for more, others ask what is there: only then it is sent. */
  struct more more = {all, receiver->socket};
  pthread_t waiting;
  MUST(pthread_create(&waiting, NULL, receive_more, &more) == 0);
  const struct timespec moment = {0, 50000000};
  MUST(nanosleep(&moment, NULL) == 0);
  alarm(60);
  MUST(vpmm_import_memory(all, NULL, &bytes) == VPMM_OK && bytes == before);
  alarm(0);
  MUST(write(receiver->socket, "m", 1) == 1);
  MUST(pthread_join(waiting, NULL) == 0);
  MUST(vpmm_import_memory(all, NULL, &bytes) == VPMM_OK && bytes > before);
  MUST(read(receiver->socket, &there, sizeof there) == sizeof there);
  MUST(vpmm_import_translate(all, there, &pointer) == VPMM_OK && pointer != NULL);
  MUST(vpmm_import_translate(all, 1, &pointer) == VPMM_BAD_POINTER);
  stalled(all, there);
  vpmm_import_release(one);
  vpmm_import_release(all);
  vpmm_import_release(NULL);
  return NULL;
}

static void share(vpmm_driver *driver) {
  vpmm_pool *pool = limited(driver, 0, VPMM_SHARING_FILE_DESCRIPTOR);
  int sockets[2];
  MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
  struct receiver receiver = {NULL, sockets[1]};
  MUST(vpmm_driver_load("sim", &receiver.driver) == VPMM_OK);
  pthread_t thread;
  MUST(pthread_create(&thread, NULL, receive, &receiver) == 0);

  void *one = NULL, *two = NULL;
  MUST(vpmm_malloc(pool, 3 * MIB, NULL, &one) == VPMM_OK);
  MUST(vpmm_export_send(pool, one, -1) == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_export_send(pool, (void *)0x1000, sockets[0]) == VPMM_BAD_POINTER);
  MUST(vpmm_export_send(pool, one, sockets[0]) == VPMM_OK);
  vpmm_export *export = NULL;
  MUST(vpmm_export_create(pool, &export) == VPMM_OK);
  MUST(vpmm_export_send_all(export, sockets[0]) == VPMM_OK);
  MUST(vpmm_malloc(pool, 50 * MIB, NULL, &two) == VPMM_OK);
  char asked = 0;
  MUST(read(sockets[0], &asked, 1) == 1 && asked == 'm');
  MUST(vpmm_export_send_all(export, sockets[0]) == VPMM_OK);
  uint64_t there = (uintptr_t)two;
  MUST(write(sockets[0], &there, sizeof there) == sizeof there);
  MUST(pthread_join(thread, NULL) == 0);
  vpmm_driver_release(receiver.driver);
  MUST(close(sockets[1]) == 0);
  MUST(vpmm_export_send_all(export, sockets[0]) == VPMM_IO_ERROR);
  MUST(close(sockets[0]) == 0);
  MUST(vpmm_free(pool, one, NULL) == VPMM_OK && vpmm_free(pool, two, NULL) == VPMM_OK);
  vpmm_pool_release(pool);
  vpmm_export_release(export); /* It had the pool, too. */
  vpmm_export_release(NULL);

  pool = limited(driver, 0, VPMM_SHARING_NONE);
  MUST(vpmm_malloc(pool, MIB, NULL, &one) == VPMM_OK);
  MUST(vpmm_export_send(pool, one, 0) == VPMM_BAD_STATE);
  MUST(vpmm_pool_set_access(pool, 0, VPMM_ACCESS_READ_WRITE) == VPMM_OK);
  MUST(vpmm_pool_set_access(pool, 0, VPMM_ACCESS_NONE) == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_pool_set_access(pool, 0, 2) == VPMM_INVALID_ARGUMENT);
  uint32_t access = 7;
  MUST(vpmm_pool_access(pool, 0, &access) == VPMM_OK && access == VPMM_ACCESS_READ_WRITE);
  MUST(vpmm_pool_access(pool, 0, NULL) == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_pool_destroy(pool) == VPMM_OK);
}

struct cache {
  vpmm_pool *pool;
  void *kept;
  int asked, finished;
};

static uint32_t make_room(void *context, const char *text) {
  struct cache *cache = context;
  MUST(strstr(text, "out of memory") != NULL);
  cache->asked++;
  if (cache->kept == NULL) return 0;
  MUST(vpmm_free(cache->pool, cache->kept, NULL) == VPMM_OK);
  cache->kept = NULL;
  return 1;
}

static void finish(void *context) {
  struct cache *cache = context;
  cache->finished++;
}

static void shortage(vpmm_driver *driver) {
  struct cache cache = {limited(driver, 64 * MIB, VPMM_SHARING_NONE), NULL, 0, 0};
  vpmm_shortage *registered = NULL;
  MUST(vpmm_pool_on_out_of_memory(cache.pool, NULL, &cache, finish, &registered) ==
       VPMM_INVALID_ARGUMENT);
  MUST(vpmm_pool_on_out_of_memory(cache.pool, make_room, &cache, finish, NULL) ==
       VPMM_INVALID_ARGUMENT);
  MUST(cache.finished == 0);
  MUST(vpmm_pool_on_out_of_memory(cache.pool, make_room, &cache, finish, &registered) == VPMM_OK);
  MUST(vpmm_malloc(cache.pool, 60 * MIB, NULL, &cache.kept) == VPMM_OK);
  void *pointer = NULL, *none = NULL;
  MUST(vpmm_malloc(cache.pool, 50 * MIB, NULL, &pointer) == VPMM_OK);
  MUST(cache.asked == 1 && cache.kept == NULL);
  MUST(vpmm_malloc(cache.pool, 50 * MIB, NULL, &none) == VPMM_OUT_OF_MEMORY && cache.asked == 2);
  MUST(cache.finished == 0);
  vpmm_shortage_release(registered);
  vpmm_shortage_release(NULL);
  MUST(cache.finished == 1);
  MUST(vpmm_malloc(cache.pool, 50 * MIB, NULL, &none) == VPMM_OUT_OF_MEMORY && cache.asked == 2);
  /* A pool that ends has done with it, too. */
  MUST(vpmm_pool_on_out_of_memory(cache.pool, make_room, &cache, finish, &registered) == VPMM_OK);
  MUST(vpmm_pool_destroy(cache.pool) == VPMM_OK);
  MUST(cache.finished == 2);
  vpmm_shortage_release(registered);
  MUST(cache.finished == 2);
}

static void options(vpmm_driver *driver) {
  vpmm_pool_options options;
  vpmm_pool *pool = NULL;
  void *pointer = NULL;
  vpmm_pool_options_init(&options, sizeof options);
  options.location = VPMM_LOCATION_HOST;
  options.reuse_off = VPMM_REUSE_OFF_OPPORTUNISTIC | VPMM_REUSE_OFF_INTERNAL_DEPENDENCIES;
  MUST(vpmm_pool_create(driver, &options, &pool) == VPMM_OK);
  MUST(vpmm_malloc(pool, MIB, NULL, &pointer) == VPMM_OK);
  MUST(vpmm_free(pool, pointer, NULL) == VPMM_OK && stats_of(pool).live_count == 0);
  vpmm_pool_release(pool);
  options.reuse_off = 4;
  MUST(vpmm_pool_create(driver, &options, &pool) == VPMM_INVALID_ARGUMENT);
  vpmm_pool_options_init(&options, sizeof options);
  options.location = 3;
  MUST(vpmm_pool_create(driver, &options, &pool) == VPMM_INVALID_ARGUMENT);
  vpmm_pool_options_init(&options, sizeof options);
  options.flags = 2;
  MUST(vpmm_pool_create(driver, &options, &pool) == VPMM_INVALID_ARGUMENT);
  MUST(strstr(vpmm_last_error(), "flags") != NULL);
  options.flags = VPMM_POOL_GPU_DIRECT_RDMA;
  options.location = VPMM_LOCATION_HOST;
  MUST(vpmm_pool_create(driver, &options, &pool) == VPMM_INVALID_ARGUMENT);
  options.location = VPMM_LOCATION_DEVICE;
  MUST(vpmm_pool_create(driver, &options, &pool) == VPMM_OK);
  vpmm_pool_release(pool);
  options.flags = 0;
  options.sharing = 3;
  MUST(vpmm_pool_create(driver, &options, &pool) == VPMM_INVALID_ARGUMENT);
}

int main(void) {
  vpmm_driver *driver = NULL;
  MUST(vpmm_driver_load(NULL, &driver) == VPMM_OK);
  char file[] = "/tmp/vpmm-capi-XXXXXX";
  int made = mkstemp(file);
  MUST(made >= 0 && close(made) == 0);
  further_streams(driver);
  sleep_and_wake(driver, file);
  graphs(driver);
  share(driver);
  shortage(driver);
  options(driver);
  vpmm_driver_release(driver);
  return 0;
}
