// A library in the place of PyTorch's libtorch_cuda.so.

#include "torch_cuda.hpp"

namespace torch::cuda::CUDAPluggableAllocator {

bool CUDAPluggableAllocator::initialized() { return !name_.empty(); }

void CUDAPluggableAllocator::cacheInfo(signed char, std::size_t*) {
  throw c10::Error({"cacheInfo", __FILE__, __LINE__}, name_ + " does not yet support cacheInfo");
}

std::string CUDAPluggableAllocator::name() { return name_; }

}  // namespace torch::cuda::CUDAPluggableAllocator
