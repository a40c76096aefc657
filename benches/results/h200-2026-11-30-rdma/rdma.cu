// What memory made for GPUDirect RDMA costs, beside other: median microseconds of each call.
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
int main() {
    cuInit(0);
    CUdevice d;
    cuDeviceGet(&d, 0);
    CUcontext c;
    cuDevicePrimaryCtxRetain(&c, d);
    cuCtxSetCurrent(c);
    int a = -1, b = -1, f = -1;
    cuDeviceGetAttribute(&a, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, d);
    cuDeviceGetAttribute(&b, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, d);
    cuDeviceGetAttribute(&f, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, d);
    unsigned is = 7;
    CUdeviceptr p;
    cuMemAlloc(&p, 1000);
    cuPointerGetAttribute(&is, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE, p);
    printf("GPU_DIRECT_RDMA_SUPPORTED %d, WITH_CUDA_VMM_SUPPORTED %d, DMA_BUF_SUPPORTED %d, cuMemAlloc's memory %u\n",
           a, b, f, is);
    cuMemAllocAsync(&p, 1000, 0);
    is = 7;
    cuPointerGetAttribute(&is, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE, p);
    printf("cuMemAllocAsync's %u\n", is);
    CUdeviceptr at;
    cuMemAddressReserve(&at, 8ull << 30, 0, 0, 0);
    for (int round = 0; round < 2; round++)
        for (size_t mib : {2, 32, 1024})
            for (int flag = 0; flag < 2; flag++) {
                CUmemAllocationProp q;
                memset(&q, 0, sizeof q);
                q.type = CU_MEM_ALLOCATION_TYPE_PINNED;
                q.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
                q.location.id = 0;
                q.allocFlags.gpuDirectRDMACapable = flag;
                CUmemAccessDesc r;
                r.location = q.location;
                r.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
                size_t n = mib << 20, g = 0;
                cuMemGetAllocationGranularity(&g, &q, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
                std::vector<double> t[5];
                is = 7;
                CUresult bad = CUDA_SUCCESS;
                for (int i = 0; i < (mib > 100 ? 7 : 100); i++) {
                    CUmemGenericAllocationHandle h;
                    double x[6];
                    CUresult e[5];
                    x[0] = now();
                    e[0] = cuMemCreate(&h, n, &q, 0);
                    x[1] = now();
                    e[1] = cuMemMap(at, n, 0, h, 0);
                    x[2] = now();
                    e[2] = cuMemSetAccess(at, n, &r, 1);
                    x[3] = now();
                    if (!i)
                        cuPointerGetAttribute(&is, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE, at);
                    double y = now();
                    e[3] = cuMemUnmap(at, n);
                    x[4] = now();
                    e[4] = cuMemRelease(h);
                    x[5] = now();
                    for (int k = 0; k < 5; k++) {
                        if (e[k])
                            bad = e[k];
                        t[k].push_back(x[k + 1] - (k == 3 ? y : x[k]));
                    }
                }
                printf("%5zu MiB, made for RDMA %d: is so %u, granularity %zu; create %.1f, map %.1f, access %.1f, "
                       "unmap %.1f, release %.1f us%s\n",
                       mib, flag, is, g, mid(t[0]), mid(t[1]), mid(t[2]), mid(t[3]), mid(t[4]), bad ? " FAILED" : "");
                fflush(stdout);
            }
}
