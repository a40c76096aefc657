// Which copies between two devices' memory the driver makes where neither has access to the other's.
#include <cuda.h>
#include <stdio.h>
#include <string.h>
#include <vector>
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
    CUstream s[2];
    CUdeviceptr p[2][3];
    const char *kinds[] = {"cuMemAlloc", "mapped", "cuMemAllocAsync"};
    for (int i = 0; i < 2; i++) {
        OK(cuDeviceGet(&d[i], i));
        OK(cuDevicePrimaryCtxRetain(&c[i], d[i]));
        OK(cuCtxSetCurrent(c[i]));
        OK(cuStreamCreate(&s[i], 0));
        OK(cuMemAlloc(&p[i][0], 4 * MIB));
        CUmemAllocationProp q;
        memset(&q, 0, sizeof q);
        q.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        q.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        q.location.id = i;
        CUmemAccessDesc r;
        r.location = q.location;
        r.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        CUmemGenericAllocationHandle m;
        OK(cuMemCreate(&m, 4 * MIB, &q, 0));
        OK(cuMemAddressReserve(&p[i][1], 4 * MIB, 0, 0, 0));
        OK(cuMemMap(p[i][1], 4 * MIB, 0, m, 0));
        OK(cuMemSetAccess(p[i][1], 4 * MIB, &r, 1));
        OK(cuMemAllocAsync(&p[i][2], 4 * MIB, s[i]));
        OK(cuStreamSynchronize(s[i]));
    }
    std::vector<unsigned> h(MIB), g(MIB);
    unsigned n = 0;
    for (int from = 0; from < 3; from++)
        for (int to = 0; to < 3; to++)
            for (int on = 0; on < 2; on++)
                for (int how = 0; how < 4; how++) {
                    n++;
                    for (auto &x : h)
                        x = n;
                    CUdeviceptr a = p[0][from], b = p[1][to];
                    OK(cuCtxSetCurrent(c[0]));
                    OK(cuMemcpyHtoD(a, h.data(), 4 * MIB));
                    OK(cuCtxSynchronize());
                    OK(cuCtxSetCurrent(c[1]));
                    OK(cuMemsetD32(b, 0, MIB));
                    OK(cuCtxSynchronize());
                    OK(cuCtxSetCurrent(c[on]));
                    CUresult x = how == 0   ? cuMemcpyDtoDAsync(b, a, 4 * MIB, s[on])
                                 : how == 1 ? cuMemcpyAsync(b, a, 4 * MIB, s[on])
                                 : how == 2 ? cuMemcpyPeerAsync(b, c[1], a, c[0], 4 * MIB, s[on])
                                            : cuMemcpyDtoD(b, a, 4 * MIB);
                    CUresult y = cuStreamSynchronize(s[on]);
                    OK(cuCtxSynchronize());
                    OK(cuCtxSetCurrent(c[1]));
                    OK(cuMemcpyDtoH(g.data(), b, 4 * MIB));
                    const char *hows[] = {"DtoDAsync", "Async", "PeerAsync", "DtoD"};
                    printf("%s of 0 to %s of 1, stream of %d, cuMemcpy%s: %d %d, %s\n", kinds[from], kinds[to], on,
                           hows[how], x, y, g == h ? "arrived" : "not there");
                    fflush(stdout);
                }
}
