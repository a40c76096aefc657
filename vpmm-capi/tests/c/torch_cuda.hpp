// PyTorch's allocators as far as a plug-in's class and its table of virtual functions matter.

#ifndef TORCH_CUDA_HPP
#define TORCH_CUDA_HPP

#include <atomic>
#include <cstddef>
#include <string>

#include "c10.hpp"

namespace c10::cuda::CUDACachingAllocator {

class SHOWN CUDAAllocator {
 public:
  virtual ~CUDAAllocator() = default;
  virtual bool initialized() = 0;
  virtual void cacheInfo(signed char device, std::size_t* largest) = 0;
  virtual std::string name() = 0;
};

/// The one that is used.
extern SHOWN std::atomic<CUDAAllocator*> allocator;

}  // namespace c10::cuda::CUDACachingAllocator

namespace torch::cuda::CUDAPluggableAllocator {

class SHOWN CUDAPluggableAllocator : public c10::cuda::CUDACachingAllocator::CUDAAllocator {
 public:
  bool initialized() override;
  void cacheInfo(signed char device, std::size_t* largest) override;
  std::string name() override;

 private:
  std::string name_ = "pluggable";
};

}  // namespace torch::cuda::CUDAPluggableAllocator

#endif  // TORCH_CUDA_HPP
