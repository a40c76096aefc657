#include <cuda_runtime.h>
#include <thread>
#include <cstdio>
#include <cstdlib>
#define C(x) do { cudaError_t e = (x); if (e != cudaSuccess) { printf("%s: %s\n", #x, cudaGetErrorString(e)); exit(1); } } while (0)
int main(int argc, char **argv) {
  int mode = argc > 1 ? atoi(argv[1]) : 0;
  C(cudaSetDevice(0));
  cudaMemPool_t pool; cudaMemPoolProps p = {}; p.allocType = cudaMemAllocationTypePinned; p.location.type = cudaMemLocationTypeDevice; p.location.id = 0;
  C(cudaMemPoolCreate(&pool, &p)); unsigned long long all = ~0ull; C(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all));
  void *left = nullptr;
  for (int i = 0; i < 2000; i++) {
    std::thread([&] {
      C(cudaSetDevice(0));
      cudaStream_t s = cudaStreamPerThread;
      if (left) { C(cudaDeviceSynchronize()); C(cudaFreeAsync(left, s)); left = nullptr; }
      void *a, *b;
      C(cudaMallocFromPoolAsync(&a, 20000, pool, s)); C(cudaMemsetAsync(a, 1, 20000, s));
      C(cudaMallocFromPoolAsync(&b, 20000, pool, s)); C(cudaMemsetAsync(b, 1, 20000, s));
      C(cudaFreeAsync(a, s));
      if (mode == 1) C(cudaStreamSynchronize(s));
      left = b;
    }).join();
    if (i % 100 == 0) { printf("%d\n", i); fflush(stdout); }
  }
  printf("done\n");
}
