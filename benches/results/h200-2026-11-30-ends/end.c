// Threads that retain the device's primary context as `main` returns: end MILLISECONDS [CALLS].
// With CALLS other than 0 they go on to call the driver, else they sleep.
#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static void *work(void *x) {
    CUdevice d;
    CUcontext c;
    cuInit(0);
    cuDeviceGet(&d, 0);
    cuDevicePrimaryCtxRetain(&c, d);
    cuCtxSetCurrent(c);
    for (;;) {
        CUdeviceptr p;
        if (x) {
            cuMemAlloc(&p, 1000);
            cuMemFree(p);
        } else
            usleep(1000);
    }
}
int main(int n, char **v) {
    pthread_t t;
    int k = n > 3 ? atoi(v[3]) : 4;
    for (int i = 0; i < k; i++)
        pthread_create(&t, 0, work, n > 2 && atoi(v[2]) ? (void *)1 : 0);
    usleep(1000 * atoi(v[1]));
    return 0;
}
