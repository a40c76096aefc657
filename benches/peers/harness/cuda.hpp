// What the peer programs need of the CUDA runtime: checked calls and owned streams.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
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

// Has the driver be done with memory that was given back, as `vpmm bench` does it (vpmm-cli/src/device/settle.rs):
// it is scrubbed in the background, and whoever allocates next does the books of it.
inline void settle() {
    using Clock = std::chrono::steady_clock;
    const auto window = std::chrono::milliseconds(5), patience = std::chrono::milliseconds(1000);
    const auto quick = std::chrono::microseconds(200); // it maps as well
    const auto began = Clock::now();
    for (int quiet = 0; quiet < 2 && Clock::now() - began < patience;) {
        for (auto since = Clock::now(); Clock::now() - since < window;) {}
        const auto since = Clock::now();
        void *memory = nullptr;
        if (cudaMalloc(&memory, std::size_t{2} << 20) != cudaSuccess) {
            (void)cudaGetLastError();
            return;
        }
        quiet = Clock::now() - since < quick ? quiet + 1 : 0;
        (void)cudaFree(memory);
    }
}

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
