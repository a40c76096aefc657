// What becomes of a kernel of one device that uses memory which the host takes away on another: under_way CASE.
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
__global__ void slow(volatile unsigned *p, unsigned long long ns) {
    unsigned long long a, b;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(a));
    unsigned n = 0;
    do {
        if (p)
            *p = ++n;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(b));
    } while (b - a < ns);
}
static CUcontext C[2];
static CUstream S[2];
static CUdevice D[2];
#define T(call)                                                                                                        \
    do {                                                                                                               \
        double a_ = now();                                                                                             \
        CUresult r_ = (call);                                                                                          \
        printf("  %-70.70s %s %.1f ms; work %s\n", #call, e(r_), now() - a_,                                           \
               cuStreamQuery(S[1]) == CUDA_ERROR_NOT_READY ? "runs" : e(cuStreamQuery(S[1])));                         \
        fflush(stdout);                                                                                                \
    } while (0)
static void go(int d, void *p, int ms) {
    cuCtxSetCurrent(C[d]);
    slow<<<1, 1, 0, (cudaStream_t)S[d]>>>((volatile unsigned *)p, 1000000ull * ms);
    usleep(20000);
}
static void end() {
    for (int d = 0; d < 2; d++) {
        cuCtxSetCurrent(C[d]);
        printf("  then device %d: %s\n", d, e(cuStreamSynchronize(S[d])));
    }
    fflush(stdout);
}
int main(int n, char **v) {
    cuInit(0);
    int count;
    cuDeviceGetCount(&count);
    int one = count > 1 ? 1 : 0;
    for (int d = 0; d < 2; d++) {
        cuDeviceGet(&D[d], d ? one : 0);
        cuDevicePrimaryCtxRetain(&C[d], D[d]);
        cuCtxSetCurrent(C[d]);
        cuStreamCreate(&S[d], CU_STREAM_NON_BLOCKING);
        go(d, 0, 0);
        cuStreamSynchronize(S[d]);
    }
    const char *c = v[1];
    printf("%s\n", c);
    CUmemPoolProps pp;
    memset(&pp, 0, sizeof pp);
    pp.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    pp.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    pp.location.id = D[0];
    CUmemAccessDesc a;
    memset(&a, 0, sizeof a);
    a.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    a.location.id = D[1];
    a.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CUmemAllocationProp ap;
    memset(&ap, 0, sizeof ap);
    ap.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    ap.location = pp.location;
    if (!strncmp(c, "pool", 4)) {
        CUmemoryPool P;
        CUdeviceptr p;
        cuCtxSetCurrent(C[0]);
        cuMemPoolCreate(&P, &pp);
        T(cuMemPoolSetAccess(P, &a, 1));
        cuMemAllocFromPoolAsync(&p, 1 << 20, P, S[0]);
        cuStreamSynchronize(S[0]);
        go(1, (void *)p, 500);
        cuCtxSetCurrent(C[0]);
        a.flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
        if (!strcmp(c, "pool_none"))
            T(cuMemPoolSetAccess(P, &a, 1));
        if (!strcmp(c, "pool_trim")) {
            T(cuMemFreeAsync(p, S[0]));
            T(cuStreamSynchronize(S[0]));
            T(cuMemPoolTrimTo(P, 0));
        }
        if (!strcmp(c, "pool_destroy")) {
            T(cuMemFreeAsync(p, S[0]));
            T(cuMemPoolDestroy(P));
            T(cuStreamSynchronize(S[0]));
        }
        end();
    }
    if (!strncmp(c, "vmm", 3)) {
        CUmemGenericAllocationHandle h;
        CUdeviceptr p;
        cuCtxSetCurrent(C[0]);
        cuMemCreate(&h, 2 << 20, &ap, 0);
        cuMemAddressReserve(&p, 2 << 20, 0, 0, 0);
        cuMemMap(p, 2 << 20, 0, h, 0);
        CUmemAccessDesc b[2] = {a, a};
        b[0].location.id = D[0];
        T(cuMemSetAccess(p, 2 << 20, b, 2));
        go(1, (void *)p, 500);
        cuCtxSetCurrent(C[0]);
        if (!strcmp(c, "vmm_none")) {
            a.flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
            T(cuMemSetAccess(p, 2 << 20, &a, 1));
        }
        if (!strcmp(c, "vmm_unmap"))
            T(cuMemUnmap(p, 2 << 20));
        end();
    }
    if (!strncmp(c, "peer", 4)) {
        CUdeviceptr p;
        cuCtxSetCurrent(C[0]);
        cuMemAlloc(&p, 1 << 20);
        cuCtxSetCurrent(C[1]);
        T(cuCtxEnablePeerAccess(C[0], 0));
        go(1, (void *)p, 500);
        if (!strcmp(c, "peer_disable"))
            T(cuCtxDisablePeerAccess(C[0]));
        if (!strcmp(c, "peer_free")) {
            cuCtxSetCurrent(C[0]);
            T(cuMemFree(p));
        }
        end();
    }
    if (!strncmp(c, "host", 4)) {
        void *h, *x;
        CUdeviceptr p;
        cuCtxSetCurrent(C[0]);
        static char mine[1 << 21] __attribute__((aligned(4096)));
        if (!strcmp(c, "host_free")) {
            cuMemHostAlloc(&h, 1 << 20, 3);
            go(1, h, 500);
            cuCtxSetCurrent(C[0]);
            T(cuMemFreeHost(h));
        }
        if (!strcmp(c, "host_free_idle")) {
            cuMemHostAlloc(&h, 1 << 20, 3);
            cuMemHostAlloc(&x, 1 << 20, 3);
            go(1, x, 500);
            cuCtxSetCurrent(C[0]);
            T(cuMemFreeHost(h));
        }
        if (!strcmp(c, "host_unregister")) {
            cuMemHostRegister(mine, sizeof mine, 3);
            cuMemHostGetDevicePointer(&p, mine, 0);
            go(1, (void *)p, 500);
            cuCtxSetCurrent(C[0]);
            T(cuMemHostUnregister(mine));
        }
        if (!strcmp(c, "host_managed")) {
            cuMemAllocManaged(&p, 1 << 21, CU_MEM_ATTACH_GLOBAL);
            go(1, (void *)p, 500);
            cuCtxSetCurrent(C[0]);
            T(cuMemFree(p));
        }
        end();
    }
    if (!strcmp(c, "cross_alloc")) {
        CUmemoryPool P;
        CUdeviceptr p = 0;
        pp.location.id = D[1];
        T(cuMemPoolCreate(&P, &pp));
        cuCtxSetCurrent(C[0]);
        T(cuMemAllocFromPoolAsync(&p, 1 << 20, P, S[0]));
        T(cuMemsetD8Async(p, 1, 4096, S[0]));
        T(cuStreamSynchronize(S[0]));
        T(cuMemFreeAsync(p, S[0]));
        end();
    }
    if (!strcmp(c, "unload")) {
        CUstream s;
        CUgraph g;
        cuStreamCreate(&s, CU_STREAM_NON_BLOCKING);
        T(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
        static const char ptx[] = ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k() { ret; }\n";
        CUmodule m = 0;
        T(cuModuleLoadData(&m, ptx));
        if (m)
            T(cuModuleUnload(m));
        T(cuStreamEndCapture(s, &g));
        T(cuModuleLoadData(&m, ptx));
        T(cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
        T(cuModuleUnload(m));
        T(cuStreamEndCapture(s, &g));
        end();
    }
}
