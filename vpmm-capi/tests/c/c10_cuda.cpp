// A library in the place of PyTorch's libc10_cuda.so.

#include "torch_cuda.hpp"

namespace c10::cuda::CUDACachingAllocator {

std::atomic<CUDAAllocator*> allocator{nullptr};

}  // namespace c10::cuda::CUDACachingAllocator
