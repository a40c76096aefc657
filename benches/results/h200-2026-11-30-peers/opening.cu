// What opening memory to a second GPU takes, by the length of a mapping and by what is open to it already.
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
    for (int round = 0; round < 2; round++)
        for (int held = 0; held < 3; held++) {
            // What is open to the other device already: nothing, 2 MiB, 1 GiB.
            CUmemGenericAllocationHandle before = 0;
            size_t much = held == 1 ? 2 * MIB : 1024 * MIB;
            if (held) {
                OK(cuMemCreate(&before, much, &q, 0));
                OK(cuMemMap(at + (32ull << 30), much, 0, before, 0));
                double a = now();
                OK(cuMemSetAccess(at + (32ull << 30), much, r, 2));
                printf("the first of %zu MiB open to both: cuMemSetAccess %.0f us\n", much / MIB, now() - a);
            }
            for (size_t mib : {2, 16, 64, 256, 512, 1024})
                for (int n = 1; n <= 2; n++) {
                    CUmemGenericAllocationHandle m;
                    OK(cuMemCreate(&m, mib * MIB, &q, 0));
                    std::vector<double> t, u;
                    for (int k = 0; k < 15; k++) {
                        OK(cuMemMap(at, mib * MIB, 0, m, 0));
                        double a = now();
                        OK(cuMemSetAccess(at, mib * MIB, r, n));
                        double b = now();
                        cuMemUnmap(at, mib * MIB);
                        u.push_back(now() - b);
                        t.push_back(b - a);
                    }
                    cuMemRelease(m);
                    printf("%s; %zu MiB open to %d: cuMemSetAccess %.1f us, cuMemUnmap %.1f\n",
                           held == 0   ? "nothing open before"
                           : held == 1 ? "2 MiB open before"
                                       : "1 GiB open before",
                           mib, n, mid(t), mid(u));
                    fflush(stdout);
                }
            if (held) {
                OK(cuMemUnmap(at + (32ull << 30), much));
                OK(cuMemRelease(before));
            }
        }
}
