// What the peer programs need of the CUDA runtime: checked calls and owned streams.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

namespace peers {

inline void check(cudaError_t status, const char *call) {
    if (status == cudaSuccess) return;
    (void)cudaGetLastError(); // so that the next call does not report this failure again
    throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}

inline void synchronize() { check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

// The device as `vpmm bench` names it.
inline std::string device_name() {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    return std::string("cuda:0 ") + properties.name;
}

// Non-blocking streams. They live as long as the process: caching allocators keep memory by
// stream handle, and a handle that the driver gave out again would bring that memory back.
class Streams {
  public:
    cudaStream_t operator[](std::size_t index) {
        while (streams_.size() <= index) {
            cudaStream_t stream = nullptr;
            check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
            streams_.push_back(stream);
        }
        return streams_[index];
    }

    // That many, in order.
    std::vector<cudaStream_t> first(std::size_t count) {
        if (count > 0) (void)(*this)[count - 1];
        return {streams_.begin(), streams_.begin() + static_cast<std::ptrdiff_t>(count)};
    }

  private:
    std::vector<cudaStream_t> streams_;
};

} // namespace peers
