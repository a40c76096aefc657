/* A program in C: everything once, every kind of mistake, an older header. Prints nothing if all is
   well, and what is not else. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "must.h"
#include "vpmm.h"

static vpmm_stats stats_of(const vpmm_pool *pool) {
  vpmm_stats stats;
  vpmm_stats_init(&stats, sizeof stats);
  MUST(vpmm_pool_stats(pool, &stats) == VPMM_OK);
  return stats;
}

static void allocate_and_free(vpmm_driver *driver, uint32_t profile) {
  vpmm_pool_options options;
  vpmm_pool_options_init(&options, sizeof options);
  options.profile = profile;
  options.limit_bytes = (uint64_t)64 << 20;
  vpmm_pool *pool = NULL;
  MUST(vpmm_pool_create(driver, &options, &pool) == VPMM_OK);
  void *stream = NULL;
  MUST(vpmm_stream_create(driver, 0, &stream) == VPMM_OK);

  void *pieces[8];
  for (int i = 0; i < 8; i++) {
    MUST(vpmm_malloc(pool, (size_t)(4 << 20) - 100 * i, stream, &pieces[i]) == VPMM_OK);
    MUST(pieces[i] != NULL && (uintptr_t)pieces[i] % 256 == 0);
  }
  MUST(stats_of(pool).live_count == 8);
  /* Too much: the text has the map, and nothing is written. */
  void *none = (void *)0x5a;
  MUST(vpmm_malloc(pool, (size_t)1 << 30, stream, &none) == VPMM_OUT_OF_MEMORY);
  MUST(none == (void *)0x5a && strstr(vpmm_last_error(), "out of memory") != NULL);
  MUST(strcmp(vpmm_status_name(VPMM_OUT_OF_MEMORY), "VPMM_OUT_OF_MEMORY") == 0);
  /* Freed on the default stream, noted before. */
  MUST(vpmm_record_stream(pool, pieces[0], NULL) == VPMM_OK);
  for (int i = 0; i < 8; i++) {
    MUST(vpmm_free(pool, pieces[i], i % 2 ? stream : NULL) == VPMM_OK);
  }
  vpmm_status again = vpmm_free(pool, pieces[0], stream);
  MUST(again == VPMM_DOUBLE_FREE || again == VPMM_BAD_POINTER);
  MUST(vpmm_free(pool, (void *)0x1000, stream) == VPMM_BAD_POINTER);
  MUST(vpmm_free(pool, NULL, stream) == VPMM_OK);
  MUST(vpmm_malloc(pool, 0, stream, &none) == VPMM_OK && none == NULL);

  MUST(vpmm_stream_synchronize(driver, 0, stream) == VPMM_OK);
  MUST(vpmm_stream_synchronize(driver, 0, NULL) == VPMM_OK);
  uint64_t returned = 0;
  MUST(vpmm_pool_trim_to(pool, 0, &returned) == VPMM_OK);
  MUST(returned > 0 && stats_of(pool).mapped_bytes == 0);
  MUST(vpmm_pool_trim_to(pool, 0, NULL) == VPMM_OK);
  MUST(stats_of(pool).peak_mapped_bytes >= (uint64_t)30 << 20);
  MUST(vpmm_pool_reset_peaks(pool) == VPMM_OK && stats_of(pool).peak_live_bytes == 0);
  MUST(vpmm_pool_validate(pool) == VPMM_OK);

  /* The layout, cut and whole. */
  MUST(vpmm_malloc(pool, 5 << 20, stream, &pieces[0]) == VPMM_OK);
  size_t needed = 0;
  MUST(vpmm_pool_layout(pool, NULL, 0, &needed) == VPMM_OK && needed > 1);
  char *text = malloc(needed);
  MUST(vpmm_pool_layout(pool, text, needed, NULL) == VPMM_OK && strlen(text) == needed - 1);
  char cut[2];
  MUST(vpmm_pool_layout(pool, cut, sizeof cut, &needed) == VPMM_OK);
  MUST(cut[0] == text[0] && cut[1] == 0);
  free(text);

  /* A pool that is released with something allocated ends when that is freed. */
  vpmm_pool_release(pool);
  MUST(vpmm_free_any(driver, pieces[0], stream) == VPMM_OK);
  MUST(vpmm_free_any(driver, pieces[0], stream) == VPMM_BAD_POINTER);
  MUST(vpmm_stream_destroy(driver, stream) == VPMM_OK);
  MUST(vpmm_stream_destroy(driver, stream) == VPMM_INVALID_ARGUMENT);
}

static void mistakes(vpmm_driver *driver) {
  vpmm_driver *other = NULL;
  MUST(vpmm_driver_load("tpu", &other) == VPMM_INVALID_ARGUMENT && other == NULL);
  MUST(strstr(vpmm_last_error(), "\"tpu\"") != NULL);
  MUST(vpmm_driver_load("sim", NULL) == VPMM_INVALID_ARGUMENT);
  vpmm_pool *pool = NULL;
  MUST(vpmm_pool_create(NULL, NULL, &pool) == VPMM_INVALID_ARGUMENT && pool == NULL);
  MUST(strcmp(vpmm_last_error(), "driver is null") == 0);
  MUST(vpmm_pool_create(driver, NULL, NULL) == VPMM_INVALID_ARGUMENT);
  vpmm_pool_options options;
  memset(&options, 0, sizeof options);
  MUST(vpmm_pool_create(driver, &options, &pool) == VPMM_INVALID_ARGUMENT);
  MUST(strstr(vpmm_last_error(), "vpmm_pool_options_init") != NULL);
  vpmm_pool_options_init(&options, sizeof options);
  options.profile = 7;
  MUST(vpmm_pool_create(driver, &options, &pool) == VPMM_INVALID_ARGUMENT);
  vpmm_pool_options_init(&options, sizeof options);
  options.device = 99;
  MUST(vpmm_pool_create(driver, &options, &pool) == VPMM_DRIVER_ERROR);
  MUST(strstr(vpmm_last_error(), "device 99") != NULL);
  vpmm_pool_options_init(&options, sizeof options);
  options.profile = VPMM_PROFILE_PAGED;
  options.page_size_bytes = 12345;
  MUST(vpmm_pool_create(driver, &options, &pool) == VPMM_INVALID_ARGUMENT && pool == NULL);
  vpmm_pool_options_init(&options, sizeof options);
  options.page_size_bytes = (uint64_t)2 << 20;
  MUST(vpmm_pool_create(driver, &options, &pool) == VPMM_INVALID_ARGUMENT && pool == NULL);
  MUST(strstr(vpmm_last_error(), "page_size_bytes is of the paged profile") != NULL);
  vpmm_driver *many[64];
  size_t loaded = 0;
  vpmm_status last = VPMM_OK;
  while (loaded < 64 && (last = vpmm_driver_load("sim", &many[loaded])) == VPMM_OK) loaded++;
  MUST(last == VPMM_IN_USE && strstr(vpmm_last_error(), "64 simulators") != NULL);
  while (loaded > 0) vpmm_driver_release(many[--loaded]);
  void *pointer = NULL;
  MUST(vpmm_malloc(NULL, 1, NULL, &pointer) == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_pool_destroy(NULL) == VPMM_INVALID_ARGUMENT);
  vpmm_pool_release(NULL);
  vpmm_driver_release(NULL);
  MUST(strcmp(vpmm_status_name(12345), "?") == 0);

  /* A program that was built when the structures ended after a few fields. */
  options.pending_policy = 77; /* beyond its end: neither written nor read */
  vpmm_pool_options_init(&options, offsetof(vpmm_pool_options, va_size_bytes));
  MUST(options.pending_policy == 77 && options.limit_bytes == 0);
  options.limit_bytes = (uint64_t)8 << 20;
  MUST(vpmm_pool_create(driver, &options, &pool) == VPMM_OK);
  MUST(vpmm_malloc(pool, 16 << 20, NULL, &pointer) == VPMM_OUT_OF_MEMORY);
  MUST(vpmm_malloc(pool, 1 << 20, NULL, &pointer) == VPMM_OK);
  vpmm_stats stats;
  stats.cached_bytes = 0x5a5a;
  vpmm_stats_init(&stats, offsetof(vpmm_stats, cached_bytes));
  MUST(vpmm_pool_stats(pool, &stats) == VPMM_OK);
  MUST(stats.live_bytes == 1 << 20 && stats.cached_bytes == 0x5a5a);
  stats.size = 0;
  MUST(vpmm_pool_stats(pool, &stats) == VPMM_INVALID_ARGUMENT);
  /* With what is allocated. */
  MUST(vpmm_pool_destroy(pool) == VPMM_OK);
}

int main(void) {
  MUST(vpmm_version() >= 1000);
  MUST(strcmp(vpmm_last_error(), "") == 0);
  vpmm_driver *driver = NULL;
  MUST(vpmm_driver_load(NULL, &driver) == VPMM_OK);
  uint32_t devices = 0;
  MUST(vpmm_driver_device_count(driver, &devices) == VPMM_OK && devices > 0);
  allocate_and_free(driver, VPMM_PROFILE_DEFAULT);
  allocate_and_free(driver, VPMM_PROFILE_PAGED);
  mistakes(driver);
  /* A pool keeps its driver. */
  vpmm_pool *pool = NULL;
  MUST(vpmm_pool_create(driver, NULL, &pool) == VPMM_OK);
  vpmm_driver_release(driver);
  void *pointer = NULL;
  MUST(vpmm_malloc(pool, 1 << 20, NULL, &pointer) == VPMM_OK);
  MUST(vpmm_free(pool, pointer, NULL) == VPMM_OK);
  vpmm_pool_release(pool);
  return 0;
}
