// What opening memory to a second GPU costs: by call, by mapping, by length, by the other device's state; and what
// cuMemAlloc takes with peer access enabled.
#include <algorithm>
#include <cuda.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <vector>
static double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}
static double mid(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}
#define OK(x)                                                                                                          \
    do {                                                                                                               \
        CUresult r_ = (x);                                                                                             \
        if (r_) {                                                                                                      \
            printf("%s: %d line %d\n", #x, r_, __LINE__);                                                              \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)
static const size_t MIB = 1 << 20;
int main() {
    OK(cuInit(0));
    CUcontext c[2];
    CUdevice d[2];
    for (int i = 0; i < 2; i++) {
        OK(cuDeviceGet(&d[i], i));
        OK(cuDevicePrimaryCtxRetain(&c[i], d[i]));
    }
    OK(cuCtxSetCurrent(c[0]));
    CUdeviceptr at;
    OK(cuMemAddressReserve(&at, 64ull << 30, 2 * MIB, 0, 0));
    CUmemAllocationProp q;
    memset(&q, 0, sizeof q);
    q.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    q.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    q.location.id = 0;
    CUmemAccessDesc r[2];
    for (int i = 0; i < 2; i++) {
        r[i].location = q.location;
        r[i].location.id = i;
        r[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    }
    auto unmap = [&](size_t offset, int n, size_t mib) {
        double a = now();
        for (int i = 0; i < n; i++)
            cuMemUnmap(at + offset + i * mib * MIB, mib * MIB);
        return now() - a;
    };
    // Many mappings, opened by one call or each by its own.
    for (int round = 0; round < 2; round++)
        for (size_t mib : {2, 16})
            for (int n : {1, 4, 16, 64})
                for (int mode = 0; mode < 4; mode++) {
                    std::vector<CUmemGenericAllocationHandle> m(n);
                    for (auto &x : m)
                        OK(cuMemCreate(&x, mib * MIB, &q, 0));
                    std::vector<double> t, u;
                    for (int k = 0; k < 5; k++) {
                        for (int i = 0; i < n; i++)
                            OK(cuMemMap(at + i * mib * MIB, mib * MIB, 0, m[i], 0));
                        double a = now();
                        if (mode == 0)
                            OK(cuMemSetAccess(at, n * mib * MIB, r, 1));
                        if (mode == 1)
                            OK(cuMemSetAccess(at, n * mib * MIB, r, 2));
                        if (mode == 2)
                            for (int i = 0; i < n; i++)
                                OK(cuMemSetAccess(at + i * mib * MIB, mib * MIB, r, 2));
                        if (mode == 3) {
                            for (int i = 0; i < n; i++)
                                OK(cuMemSetAccess(at + i * mib * MIB, mib * MIB, r, 1));
                            OK(cuMemSetAccess(at, n * mib * MIB, r + 1, 1));
                        }
                        t.push_back(now() - a);
                        u.push_back(unmap(0, n, mib));
                    }
                    for (auto &x : m)
                        cuMemRelease(x);
                    const char *how[] = {"one call, own", "one call, both", "a call each, both",
                                         "a call each own, one call other"};
                    if (round)
                        printf("%d mappings of %zu MiB, %s: %.0f us, unmap each %.1f\n", n, mib, how[mode], mid(t),
                               mid(u) / n);
                    fflush(stdout);
                }
    // Lengths.
    for (size_t mib : {2, 32, 64, 96, 128, 192, 256, 512, 1024, 4096}) {
        CUmemGenericAllocationHandle m;
        OK(cuMemCreate(&m, mib * MIB, &q, 0));
        std::vector<double> t;
        for (int k = 0; k < 7; k++) {
            OK(cuMemMap(at, mib * MIB, 0, m, 0));
            OK(cuMemSetAccess(at, mib * MIB, r, 1));
            double a = now();
            OK(cuMemSetAccess(at, mib * MIB, r + 1, 1));
            t.push_back(now() - a);
            cuMemUnmap(at, mib * MIB);
        }
        cuMemRelease(m);
        printf("%zu MiB opened to the other: %.0f us\n", mib, mid(t));
        fflush(stdout);
    }
    // Where much is mapped already; where the other's context is current; where the other is busy; read only.
    CUmemGenericAllocationHandle big, m;
    OK(cuMemCreate(&big, 16ull << 30, &q, 0));
    OK(cuMemMap(at + (32ull << 30), 16ull << 30, 0, big, 0));
    OK(cuMemSetAccess(at + (32ull << 30), 16ull << 30, r, 2));
    OK(cuMemCreate(&m, 2 * MIB, &q, 0));
    CUdeviceptr work;
    OK(cuCtxSetCurrent(c[1]));
    CUstream s;
    OK(cuStreamCreate(&s, 0));
    OK(cuMemAlloc(&work, 4ull << 30));
    OK(cuCtxSetCurrent(c[0]));
    for (int mode = 0; mode < 4; mode++) {
        std::vector<double> t, o;
        for (int k = 0; k < 9; k++) {
            if (mode == 1)
                cuCtxSetCurrent(c[1]);
            if (mode == 2) {
                cuCtxSetCurrent(c[1]);
                for (int i = 0; i < 20; i++)
                    cuMemsetD8Async(work, 1, 4ull << 30, s);
                cuCtxSetCurrent(c[0]);
            }
            CUmemAccessDesc e = r[1];
            if (mode == 3)
                e.flags = CU_MEM_ACCESS_FLAGS_PROT_READ;
            OK(cuMemMap(at, 2 * MIB, 0, m, 0));
            double b = now();
            OK(cuMemSetAccess(at, 2 * MIB, r, 1));
            double a = now();
            OK(cuMemSetAccess(at, 2 * MIB, &e, 1));
            t.push_back(now() - a);
            o.push_back(a - b);
            cuMemUnmap(at, 2 * MIB);
            if (mode == 2) {
                cuCtxSetCurrent(c[1]);
                cuCtxSynchronize();
            }
            cuCtxSetCurrent(c[0]);
        }
        const char *how[] = {"beside 16 GiB open to both", "with the other's context current", "with the other busy",
                             "for reading"};
        printf("2 MiB %s: own %.0f us, other %.0f\n", how[mode], mid(o), mid(t));
        fflush(stdout);
    }
    // cuMemAlloc, and cuMemAllocAsync.
    for (int peers = 0; peers < 2; peers++) {
        if (peers) {
            OK(cuCtxSetCurrent(c[1]));
            OK(cuCtxEnablePeerAccess(c[0], 0));
            OK(cuCtxSetCurrent(c[0]));
        }
        for (size_t mib : {2, 20, 64, 256, 1024}) {
            std::vector<double> t, f;
            std::vector<CUdeviceptr> p(8);
            for (auto &x : p) {
                double a = now();
                OK(cuMemAlloc(&x, mib * MIB));
                t.push_back(now() - a);
            }
            for (auto &x : p) {
                double a = now();
                cuMemFree(x);
                f.push_back(now() - a);
            }
            printf("cuMemAlloc of %zu MiB, %s: %.0f us, cuMemFree %.0f\n", mib,
                   peers ? "peer access enabled" : "no peer access", mid(t), mid(f));
            fflush(stdout);
        }
        CUmemPoolProps pp;
        memset(&pp, 0, sizeof pp);
        pp.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
        pp.location = q.location;
        CUmemoryPool pool;
        OK(cuMemPoolCreate(&pool, &pp));
        if (peers)
            OK(cuMemPoolSetAccess(pool, r + 1, 1));
        for (size_t mib : {2, 64, 1024}) {
            std::vector<double> t;
            for (int k = 0; k < 8; k++) {
                CUdeviceptr x;
                double a = now();
                OK(cuMemAllocFromPoolAsync(&x, mib * MIB, pool, 0));
                cuStreamSynchronize(0);
                t.push_back(now() - a);
                cuMemFreeAsync(x, 0);
                cuStreamSynchronize(0);
                cuMemPoolTrimTo(pool, 0);
            }
            printf("cuMemAllocFromPoolAsync of %zu MiB, %s: %.0f us\n", mib,
                   peers ? "open to the other" : "its own only", mid(t));
            fflush(stdout);
        }
    }
}
