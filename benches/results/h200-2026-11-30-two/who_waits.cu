// Whose work each kind of free waits for: memory of device 0, either device's context current, work on either.
#include <cuda.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
static double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}
static const char *e(CUresult r) {
    const char *s = "?";
    cuGetErrorName(r, &s);
    return s;
}
__global__ void slow(unsigned long long ns) {
    unsigned long long a, b;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(a));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(b));
    } while (b - a < ns);
}
static CUcontext C[2];
static CUstream S[2];
static CUdevice D[2];
static char mine[1 << 21] __attribute__((aligned(4096)));
static void go(int d, int ms) {
    cuCtxSetCurrent(C[d]);
    slow<<<1, 1, 0, (cudaStream_t)S[d]>>>(1000000ull * ms);
    usleep(20000);
}
int main(int n, char **v) {
    cuInit(0);
    for (int d = 0; d < 2; d++) {
        cuDeviceGet(&D[d], d);
        cuDevicePrimaryCtxRetain(&C[d], D[d]);
        cuCtxSetCurrent(C[d]);
        cuStreamCreate(&S[d], CU_STREAM_NON_BLOCKING);
        go(d, 0);
        cuStreamSynchronize(S[d]);
    }
    const char *names[] = {"cuMemAlloc",        "cuMemHostAlloc",        "cuMemHostRegister",
                           "cuMemAllocManaged", "managed, touched by 1", "cuMemCreate"};
    for (int kind = 0; kind < 6; kind++)
        for (int B = 0; B < 2; B++)
            for (int W = 0; W < 2; W++) {
                CUdeviceptr p = 0;
                void *h = 0;
                cuCtxSetCurrent(C[0]);
                CUresult r = CUDA_SUCCESS;
                CUmemGenericAllocationHandle g;
                CUmemAllocationProp ap;
                memset(&ap, 0, sizeof ap);
                ap.type = CU_MEM_ALLOCATION_TYPE_PINNED;
                ap.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
                ap.location.id = D[0];
                CUmemAccessDesc a;
                a.location = ap.location;
                a.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
                switch (kind) {
                case 0:
                    r = cuMemAlloc(&p, 1 << 21);
                    break;
                case 1:
                    r = cuMemHostAlloc(&h, 1 << 21, 3);
                    break;
                case 2:
                    r = cuMemHostRegister(mine, sizeof mine, 3);
                    break;
                case 3:
                    r = cuMemAllocManaged(&p, 1 << 21, CU_MEM_ATTACH_GLOBAL);
                    break;
                case 4:
                    r = cuMemAllocManaged(&p, 1 << 21, CU_MEM_ATTACH_GLOBAL);
                    cuCtxSetCurrent(C[1]);
                    cuMemsetD8(p, 1, 1 << 21);
                    break;
                case 5:
                    cuMemCreate(&g, 1 << 21, &ap, 0);
                    cuMemAddressReserve(&p, 1 << 21, 0, 0, 0);
                    cuMemMap(p, 1 << 21, 0, g, 0);
                    r = cuMemSetAccess(p, 1 << 21, &a, 1);
                }
                if (r) {
                    printf("%s %s\n", names[kind], e(r));
                    continue;
                }
                go(W, 300);
                cuCtxSetCurrent(C[B]);
                double t = now();
                switch (kind) {
                case 0:
                case 3:
                case 4:
                    r = cuMemFree(p);
                    break;
                case 1:
                    r = cuMemFreeHost(h);
                    break;
                case 2:
                    r = cuMemHostUnregister(mine);
                    break;
                case 5:
                    r = cuMemUnmap(p, 1 << 21);
                }
                t = now() - t;
                printf("%-22s of device 0, current %d, work on %d: %s %.1f ms\n", names[kind], B, W, e(r), t);
                fflush(stdout);
                cuCtxSetCurrent(C[W]);
                cuStreamSynchronize(S[W]);
                if (kind == 5) {
                    cuMemRelease(g);
                    cuMemAddressFree(p, 1 << 21);
                }
            }
}
