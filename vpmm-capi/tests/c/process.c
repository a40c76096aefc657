/* A program in C: the process's own pool, copies, snapshots, tags of a thread, a limit that changes.
   Prints nothing if all is well. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "must.h"
#include "vpmm.h"

#define MIB ((size_t)1 << 20)

struct text {
  char bytes[1 << 16];
  size_t length;
};

static void append(void *context, const char *bytes, size_t length) {
  struct text *text = context;
  MUST(text->length + length < sizeof text->bytes);
  memcpy(text->bytes + text->length, bytes, length);
  text->length += length;
}

static int count(struct text *text, const char *part) {
  int found = 0;
  text->bytes[text->length] = '\0';
  for (const char *at = text->bytes; (at = strstr(at, part)) != NULL; at++) found++;
  return found;
}

static void process_pool(void) {
  static struct text text;
  void *stream = NULL, *pointer = NULL, *other = NULL;
  vpmm_driver *driver = NULL;
  vpmm_pool *pool = NULL;
  MUST(vpmm_process_driver(&driver) == VPMM_OK && vpmm_process_pool(0, &pool) == VPMM_OK);
  MUST(vpmm_stream_create(driver, 0, &stream) == VPMM_OK);
  MUST(vpmm_process_record_history(10, NULL, NULL) == VPMM_OK);
  MUST(vpmm_process_malloc(0, 1000, stream, &pointer) == VPMM_OK);
  MUST(vpmm_process_malloc(0, 1000, NULL, &other) == VPMM_OK);
  MUST(vpmm_process_malloc(77, 1000, NULL, &other) == VPMM_DRIVER_ERROR);
  char bytes[1000], back[1000];
  for (int i = 0; i < 1000; i++) bytes[i] = (char)(i * 7);
  MUST(vpmm_process_upload(0, pointer, bytes, 1000, stream) == VPMM_OK);
  MUST(vpmm_process_wait_for(0, NULL, stream) == VPMM_OK);
  MUST(vpmm_process_copy(0, other, pointer, 1000, NULL) == VPMM_OK);
  MUST(vpmm_process_fill(0, other, 5, 10, NULL) == VPMM_OK);
  MUST(vpmm_process_download(0, back, other, 1000, NULL) == VPMM_OK);
  MUST(memcmp(back + 10, bytes + 10, 990) == 0 && back[0] == 5 && back[9] == 5);
  MUST(vpmm_process_download(0, back, (void *)0x1000, 1000, NULL) == VPMM_DRIVER_ERROR);
  MUST(vpmm_process_record_stream(pointer, NULL) == VPMM_OK);
  MUST(vpmm_process_synchronize(0, stream) == VPMM_OK);
  MUST(vpmm_process_snapshot(append, &text) == VPMM_OK);
  MUST(strstr(text.bytes, "\"state\":\"active_allocated\"") && strstr(text.bytes, "\"action\":\"alloc\""));
  MUST(strstr(text.bytes, "\"size\":1000"));
  MUST(vpmm_pool_snapshot(pool, NULL, NULL) == VPMM_INVALID_ARGUMENT);
  text.length = 0;
  MUST(vpmm_pool_snapshot(pool, append, &text) == VPMM_OK && text.length > 0);
  MUST(vpmm_process_free(0, pointer, stream) == VPMM_OK);
  MUST(vpmm_process_free(0, other, NULL) == VPMM_OK);
  /* What fails is no free, for the history either. */
  MUST(vpmm_process_free(0, other, NULL) != VPMM_OK);
  MUST(vpmm_process_free(0, (void *)0x1000, NULL) == VPMM_BAD_POINTER);
  text.length = 0;
  MUST(vpmm_process_snapshot(append, &text) == VPMM_OK);
  MUST(count(&text, "\"action\":\"alloc\"") == 2);
  MUST(count(&text, "\"action\":\"free_completed\"") == 2);
  MUST(vpmm_process_record_history(0, NULL, NULL) == VPMM_OK);
  uint64_t total = 0, unused = 0;
  MUST(vpmm_driver_memory(driver, 0, &total, &unused) == VPMM_OK && unused <= total && total > 0);
  MUST(vpmm_process_forget_stream(0, stream, NULL) == VPMM_OK);
  MUST(vpmm_stream_destroy(driver, stream) == VPMM_OK);
  vpmm_pool_release(pool);
  vpmm_driver_release(driver);
}

static void limits(vpmm_driver *driver) {
  vpmm_pool *pool = NULL;
  vpmm_stats stats;
  MUST(vpmm_pool_create(driver, NULL, &pool) == VPMM_OK);
  void *pointer = NULL, *kept = NULL;
  MUST(vpmm_malloc(pool, 8 * MIB, NULL, &kept) == VPMM_OK);
  MUST(vpmm_pool_limit_to(pool, 18 * MIB) == VPMM_OK);
  MUST(vpmm_malloc(pool, 20 * MIB, NULL, &pointer) == VPMM_OUT_OF_MEMORY);
  MUST(strstr(vpmm_last_error(), "at most 18 MiB") != NULL);
  MUST(vpmm_malloc(pool, 10 * MIB, NULL, &pointer) == VPMM_OK);
  MUST(vpmm_free(pool, pointer, NULL) == VPMM_OK);
  MUST(vpmm_pool_limit_to(pool, 0) == VPMM_OK);
  MUST(vpmm_malloc(pool, 20 * MIB, NULL, &pointer) == VPMM_OK);
  vpmm_stats_init(&stats, sizeof stats);
  MUST(vpmm_pool_stats(pool, &stats) == VPMM_OK && stats.mapped_bytes >= 28 * MIB);
  MUST(vpmm_free(pool, pointer, NULL) == VPMM_OK && vpmm_free(pool, kept, NULL) == VPMM_OK);
  MUST(vpmm_pool_limit_to(NULL, 0) == VPMM_INVALID_ARGUMENT);
  vpmm_pool_release(pool);
}

static void tags(void) {
  vpmm_pool *pool = NULL;
  void *pointer = NULL;
  uint64_t went = 0, came = 0;
  MUST(vpmm_process_pool(0, &pool) == VPMM_OK);
  MUST(vpmm_process_pop_tag() == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_process_push_tag(NULL) == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_process_push_tag("\xff") == VPMM_INVALID_ARGUMENT);
  MUST(vpmm_process_push_tag("weights") == VPMM_OK);
  MUST(vpmm_process_malloc(0, 5 * MIB, NULL, &pointer) == VPMM_OK);
  MUST(vpmm_process_pop_tag() == VPMM_OK);
  MUST(vpmm_suspend(pool, "weights", NULL, VPMM_CONTENTS_KEEP, NULL, &went) == VPMM_OK);
  MUST(vpmm_resume(pool, "weights", NULL, 0, &came) == VPMM_OK);
  MUST(went == came && went >= 5 * MIB);
  MUST(vpmm_process_free(0, pointer, NULL) == VPMM_OK);
  vpmm_pool_release(pool);
}

int main(void) {
  vpmm_driver *driver = NULL;
  MUST(vpmm_driver_load("sim", &driver) == VPMM_OK);
  limits(driver);
  process_pool();
  tags();
  vpmm_driver_release(driver);
  return 0;
}
