/* What a call of the C library takes: pairs of 1 MiB, each thread on a stream of its own.
 *
 *     cc -O2 -Ivpmm-capi/include pairs.c -Ltarget/release -lvpmm -lpthread -o pairs
 *     VPMM_DEVICE=cuda ./pairs THREADS [RESOURCE]
 *
 * With RESOURCE ("default", "statistics(default)") through vpmm_resource_allocate, else through
 * vpmm_malloc and vpmm_free, or where it is "any" vpmm_free_any. Prints the first thread's least of seven rounds, and the sum over threads. */
#include "vpmm.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { ROUNDS = 7, PAIRS = 300000, MOST_THREADS = 64, BYTES = 1 << 20 };

static struct vpmm_driver *driver;
static struct vpmm_pool *pool;
static struct vpmm_resource *resource;
static int by_address;
static pthread_barrier_t together;

static void check(enum vpmm_status status) {
    if (status != VPMM_OK) {
        fprintf(stderr, "%s\n", vpmm_last_error());
        exit(1);
    }
}

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e9 + now.tv_nsec;
}

static void pairs(void *stream, int times) {
    for (int i = 0; i < times; i++) {
        void *block;
        if (resource) {
            check(vpmm_resource_allocate(resource, BYTES, 256, stream, &block));
            check(vpmm_resource_deallocate(resource, block, BYTES, 256, stream));
        } else {
            check(vpmm_malloc(pool, BYTES, stream, &block));
            check(by_address ? vpmm_free_any(driver, block, stream) : vpmm_free(pool, block, stream));
        }
    }
}

static void *run(void *least) {
    void *stream;
    double *best = least;
    check(vpmm_stream_create(driver, 0, &stream));
    pairs(stream, 10000);
    for (int round = 0; round < ROUNDS; round++) {
        pthread_barrier_wait(&together);
        double begin = now_ns();
        pairs(stream, PAIRS);
        double each = (now_ns() - begin) / (2.0 * PAIRS);
        if (round == 0 || each < *best) *best = each;
    }
    return NULL;
}

int main(int count, char **arguments) {
    int threads = count > 1 ? atoi(arguments[1]) : 1;
    pthread_t running[MOST_THREADS];
    double least[MOST_THREADS], millions = 0;
    if (threads < 1 || threads > MOST_THREADS) return 2;
    check(vpmm_driver_load(NULL, &driver));
    check(vpmm_pool_create(driver, NULL, &pool));
    by_address = count > 2 && strcmp(arguments[2], "any") == 0;
    if (count > 2 && !by_address) check(vpmm_resource_open(driver, 0, arguments[2], NULL, &resource));
    pthread_barrier_init(&together, NULL, threads);
    for (int i = 0; i < threads; i++) pthread_create(&running[i], NULL, run, &least[i]);
    for (int i = 0; i < threads; i++) {
        pthread_join(running[i], NULL);
        millions += 1e3 / least[i];
    }
    printf("%d threads: %.1f ns a call, %.0f million calls a second\n", threads, least[0], millions);
    return 0;
}
