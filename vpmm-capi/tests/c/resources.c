/* A program in C: resources by name and by handles, adaptors and what they have counted, functions as
   resources, the current resource. Prints nothing if all is well. */

#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "must.h"
#include "vpmm.h"

#define MIB ((size_t)1 << 20)

static vpmm_driver *driver;

static vpmm_resource *over(const char *text, const vpmm_resource *upstream) {
  vpmm_resource *made = NULL;
  MUST(vpmm_resource_open(driver, 0, text, upstream, &made) == VPMM_OK);
  return made;
}

static void *allocate(const vpmm_resource *resource, size_t bytes) {
  void *pointer = NULL;
  MUST(vpmm_resource_allocate(resource, bytes, 0, NULL, &pointer) == VPMM_OK);
  return pointer;
}

static void deallocate(const vpmm_resource *resource, void *pointer, size_t bytes) {
  MUST(vpmm_resource_deallocate(resource, pointer, bytes, 0, NULL) == VPMM_OK);
}

/* Each, by its name, gives memory and takes it back. */
static void every_name(void) {
  static const char *texts[] = {"default",
                                "paged",
                                "cuda-async(initial=2MiB,max=1GiB)",
                                "cuda-malloc",
                                "managed",
                                "pinned",
                                "host",
                                "coalescing",
                                "fixed-size(4MiB,blocks=4)",
                                "binning(18,20)",
                                "arena(64MiB)",
                                "caching(max_split_size_mb=64)",
                                "thread-safe(aligned(4096,from=1MiB,default))",
                                "prefetch(managed)",
                                "tracking(backtraces=on,pinned)"};
  for (size_t at = 0; at < sizeof texts / sizeof *texts; at++) {
    vpmm_resource *resource = over(texts[at], NULL);
    void *pointer = allocate(resource, 3 * MIB);
    MUST(pointer != NULL && (size_t)pointer % 256 == 0);
    deallocate(resource, pointer, 3 * MIB);
    MUST(allocate(resource, 0) == NULL);
    deallocate(resource, NULL, 0);
    vpmm_resource_release(resource);
  }
}

static void adaptors(void) {
  char text[1000];
  size_t needed = 0;
  uint64_t bytes = 0, count = 0;
  uint32_t equal = 7;
  vpmm_resource *pool = over("default", NULL), *limiting = over("limiting(4MiB)", pool);
  vpmm_resource *tracking = over("tracking", limiting), *counting = over("statistics", tracking);
  vpmm_resource_release(limiting); /* what stands on it keeps it */
  MUST(vpmm_resource_describe(counting, text, sizeof text, &needed) == VPMM_OK);
  MUST(needed == strlen(text) + 1);
  MUST(strcmp(text, "statistics\n└─ tracking\n   └─ limiting(limit=4 MiB)\n"
                    "      └─ vpmm(profile=default device=0)") == 0);
  MUST(vpmm_resource_describe(counting, text, 5, NULL) == VPMM_OK && strcmp(text, "stat") == 0);
  MUST(vpmm_resource_upstream(tracking, &limiting) == VPMM_OK);

  vpmm_counters counters, part;
  vpmm_counters_init(&counters, sizeof counters);
  vpmm_counters_init(&part, sizeof part);
  void *first = allocate(counting, MIB), *second = NULL;
  MUST(vpmm_resource_push_counters(counting, &counters) == VPMM_OK);
  MUST(counters.bytes.current == (int64_t)MIB && counters.allocations.total == 1);
  void *third = allocate(counting, 1000);
  deallocate(counting, first, MIB);
  MUST(vpmm_resource_pop_counters(counting, &part) == VPMM_OK);
  MUST(part.bytes.current == 1000 - (int64_t)MIB && part.bytes.peak == 1000);
  MUST(vpmm_resource_counters(counting, &counters) == VPMM_OK);
  MUST(counters.bytes.current == 1000 && counters.bytes.total == MIB + 1000);
  MUST(vpmm_resource_pop_counters(counting, NULL) == VPMM_BAD_STATE);
  /* What fails writes nothing. */
  part.bytes.total = 77;
  MUST(vpmm_resource_pop_counters(counting, &part) == VPMM_BAD_STATE && part.bytes.total == 77);
  part.size = 0;
  MUST(vpmm_resource_push_counters(counting, &part) == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_resource_pop_counters(counting, NULL) == VPMM_BAD_STATE);
  MUST(vpmm_resource_counters(tracking, &counters) == VPMM_UNSUPPORTED);

  MUST(vpmm_resource_limit_bytes(limiting, &bytes) == VPMM_OK && bytes == 4 * MIB);
  MUST(vpmm_resource_limit_bytes(pool, &bytes) == VPMM_UNSUPPORTED);
  MUST(vpmm_resource_allocated_bytes(limiting, &bytes) == VPMM_OK && bytes == 1024);
  MUST(vpmm_resource_allocated_bytes(tracking, &bytes) == VPMM_OK && bytes == 1000);
  MUST(vpmm_resource_outstanding(tracking, text, sizeof text, NULL, &count) == VPMM_OK && count == 1);
  MUST(strstr(text, "1000 B"));
  MUST(vpmm_resource_allocate(counting, 4 * MIB, 0, NULL, &second) == VPMM_OUT_OF_MEMORY && !second);
  MUST(vpmm_resource_allocate(counting, 1, 3, NULL, &second) == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_resource_record_stream(counting, third, NULL) == VPMM_OK);
  MUST(vpmm_resource_record_stream(counting, NULL, NULL) == VPMM_OK);
  deallocate(counting, third, 1000);
  MUST(vpmm_resource_held_bytes(counting, &bytes) == VPMM_OK && bytes >= 1000);
  MUST(vpmm_resource_is_equal(pool, pool, &equal) == VPMM_OK && equal == 1);
  MUST(vpmm_resource_is_equal(pool, counting, &equal) == VPMM_OK && equal == 0);
  vpmm_facts facts;
  vpmm_facts_init(&facts, sizeof facts);
  MUST(vpmm_resource_facts(counting, &facts) == VPMM_OK);
  MUST(facts.device_accessible && facts.stream_ordered && facts.checks == 2);

  vpmm_resource *binning = over("binning", pool), *bin = over("fixed-size(8MiB,blocks=2)", pool);
  MUST(vpmm_resource_add_bin(binning, 1000, NULL) == VPMM_OK);
  MUST(vpmm_resource_add_bin(binning, 8 * MIB, bin) == VPMM_OK);
  MUST(vpmm_resource_add_bin(bin, 1000, NULL) == VPMM_UNSUPPORTED);
  /* What would go round for ever: by itself, by what stands on it, by another one's bin. */
  vpmm_resource *above = over("statistics", binning), *other = over("binning", pool);
  MUST(vpmm_resource_add_bin(binning, 16 * MIB, binning) == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_resource_add_bin(binning, 16 * MIB, above) == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_resource_add_bin(other, 16 * MIB, above) == VPMM_OK);
  MUST(vpmm_resource_add_bin(binning, 16 * MIB, other) == VPMM_INVALID_ARGUMENT);
  vpmm_resource_release(above);
  vpmm_resource_release(other);
  first = allocate(binning, 7 * MIB);
  deallocate(binning, first, 7 * MIB);
  vpmm_resource_release(bin);
  vpmm_resource_release(binning);
  vpmm_resource_release(limiting);
  vpmm_resource_release(tracking);
  vpmm_resource_release(counting);
  vpmm_resource_release(pool);
}

static void logs(void) {
  char name[] = "/tmp/vpmm, a log (XXXXXX", text[200], quoted[200];
  int file = mkstemp(name);
  MUST(file >= 0);
  snprintf(quoted, sizeof quoted, "logging(\"%s\",cuda-malloc)", name);
  uint64_t lost = 7;
  vpmm_resource *logging = over(quoted, NULL);
  MUST(vpmm_resource_log_file(logging, text, sizeof text, NULL, &lost) == VPMM_OK);
  MUST(strcmp(text, name) == 0 && lost == 0);
  deallocate(logging, allocate(logging, 1000), 1000);
  MUST(vpmm_resource_flush_log(logging) == VPMM_OK);
  vpmm_resource_release(logging);
  FILE *rows = fopen(name, "r");
  int lines = 0;
  for (int letter; (letter = fgetc(rows)) != EOF;) lines += letter == '\n';
  MUST(lines == 3);
  fclose(rows);
  remove(name);
}

struct ours {
  int allocated, freed, asked, finished;
  char room[1 << 13];
};

static void *give(void *context, size_t bytes, size_t align, void *stream) {
  struct ours *ours = context;
  (void)stream;
  MUST(align == 256);
  if (bytes > 4096) return NULL;
  ours->allocated++;
  return (void *)(((size_t)ours->room + 255) / 256 * 256);
}

static void take(void *context, void *pointer, size_t bytes, size_t align, void *stream) {
  (void)pointer, (void)bytes, (void)align, (void)stream;
  ((struct ours *)context)->freed++;
}

static uint32_t asked(void *context, size_t bytes) {
  MUST(bytes == 5000);
  return ++((struct ours *)context)->asked < 3;
}

static void finished(void *context) { ((struct ours *)context)->finished++; }

static void functions(void) {
  static struct ours ours;
  vpmm_resource *callback = NULL, *failing = NULL;
  void *pointer = NULL;
  MUST(vpmm_resource_callback(driver, 0, NULL, take, &ours, finished, &callback) ==
       VPMM_INVALID_ARGUMENT);
  MUST(ours.finished == 0);
  MUST(vpmm_resource_callback(driver, 0, give, take, &ours, finished, &callback) == VPMM_OK);
  MUST(vpmm_resource_failure_callback(callback, asked, &ours, finished, &failing) == VPMM_OK);
  vpmm_resource_release(callback);
  deallocate(failing, allocate(failing, 100), 100);
  MUST(ours.allocated == 1 && ours.freed == 1 && ours.finished == 0);
  MUST(vpmm_resource_allocate(failing, 5000, 0, NULL, &pointer) == VPMM_OUT_OF_MEMORY);
  MUST(ours.asked == 3);
  vpmm_resource_release(failing);
  MUST(ours.finished == 2);
}

static void current(void) {
  vpmm_resource *limiting = over("limiting(1MiB,default)", NULL), *found = NULL;
  vpmm_pool *pool = NULL;
  char text[200];
  MUST(vpmm_resource_set_current(driver, 0, limiting) == VPMM_OK);
  vpmm_resource_release(limiting);
  MUST(vpmm_resource_current(driver, 0, &found) == VPMM_OK);
  MUST(vpmm_resource_describe(found, text, sizeof text, NULL) == VPMM_OK);
  MUST(strncmp(text, "limiting", 8) == 0);
  vpmm_resource_release(found);
  MUST(vpmm_resource_set_current(driver, 0, NULL) == VPMM_OK);
  MUST(vpmm_resource_current(driver, 0, &found) == VPMM_OK);
  MUST(vpmm_resource_describe(found, text, sizeof text, NULL) == VPMM_OK);
  MUST(strcmp(text, "vpmm(profile=default device=0)") == 0);
  MUST(vpmm_process_pool(0, &pool) == VPMM_OK);
  vpmm_resource *of_pool = NULL;
  uint32_t equal = 0;
  MUST(vpmm_resource_of_pool(pool, &of_pool) == VPMM_OK);
  MUST(vpmm_resource_is_equal(of_pool, found, &equal) == VPMM_OK && equal == 1);
  void *pointer = allocate(of_pool, 1000);
  MUST(vpmm_process_free(0, pointer, NULL) == VPMM_OK);
  vpmm_pool *again = NULL;
  MUST(vpmm_resource_pool(of_pool, &again) == VPMM_OK && vpmm_pool_validate(again) == VPMM_OK);
  vpmm_pool_release(again);
  vpmm_resource_release(of_pool);
  vpmm_resource_release(found);
  vpmm_pool_release(pool);
}

static void mistakes(void) {
  vpmm_resource *made = NULL, *pool = over("default", NULL);
  MUST(vpmm_resource_open(driver, 0, "arenas", NULL, &made) == VPMM_INVALID_ARGUMENT && !made);
  MUST(strstr(vpmm_last_error(), "no allocator \"arenas\""));
  MUST(vpmm_resource_open(driver, 0, "limiting(1MiB)", NULL, &made) == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_resource_open(driver, 0, "statistics(default)", pool, &made) == VPMM_INVALID_ARGUMENT);
  MUST(strstr(vpmm_last_error(), "stands on nothing"));
  MUST(vpmm_resource_open(driver, 0, NULL, NULL, &made) == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_resource_open(NULL, 0, "default", NULL, &made) == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_resource_open(driver, 0, "logging(/nowhere/x,default)", NULL, &made) == VPMM_IO_ERROR);
  MUST(vpmm_resource_upstream(pool, &made) == VPMM_NOT_FOUND && !made);
  MUST(vpmm_resource_allocate(NULL, 1, 0, NULL, (void **)&made) == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_resource_deallocate(pool, (void *)4096, 1, 0, NULL) == VPMM_BAD_POINTER);
  MUST(vpmm_resource_describe(pool, NULL, 5, NULL) == VPMM_INVALID_ARGUMENT);
  vpmm_resource_release(NULL);
  vpmm_resource_release(pool);
}

int main(void) {
  MUST(vpmm_process_driver(&driver) == VPMM_OK);
  every_name();
  adaptors();
  logs();
  functions();
  current();
  mistakes();
  vpmm_driver_release(driver);
  return 0;
}
