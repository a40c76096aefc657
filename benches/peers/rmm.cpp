// Measures RMM's memory resources: the cases of `vpmm bench` and replays of traces, one JSON object
// per line. Built by build-rmm.sh against librmm's headers; options are in harness/options.hpp.
//
// Pools start as RMM's own benchmarks start them: with half of the free memory for the cases, so
// that they never grow, and empty for replays and growth. An arena cannot grow and always gets
// half. Resources are called by their own types, without the virtual call of a resource_ref.
#include "harness/cases.hpp"
#include "harness/options.hpp"
#include "harness/replay.hpp"

#include <rmm/cuda_device.hpp>
#include <rmm/mr/arena_memory_resource.hpp>
#include <rmm/mr/binning_memory_resource.hpp>
#include <rmm/mr/cuda_async_memory_resource.hpp>
#include <rmm/mr/cuda_memory_resource.hpp>
#include <rmm/mr/pool_memory_resource.hpp>

#include <cuda/stream_ref>

#include <cstdio>
#include <exception>
#include <memory>
#include <utility>

namespace {

using rmm::mr::arena_memory_resource;
using rmm::mr::binning_memory_resource;
using rmm::mr::cuda_async_memory_resource;
using rmm::mr::cuda_memory_resource;
using rmm::mr::pool_memory_resource;

constexpr std::size_t kAlignment = 256;

// What a resource holds, as far as it tells. Resources are handles that share their state.
struct Unknown {
    std::optional<std::uint64_t> operator()() const { return std::nullopt; }
};

struct SizeOf {
    pool_memory_resource pool; // never shrinks, so its size is its peak
    std::optional<std::uint64_t> operator()() const { return pool.pool_size(); }
};

struct HighWater {
    cuda_async_memory_resource resource;
    std::optional<std::uint64_t> operator()() const {
        std::uint64_t bytes = 0;
        peers::check(cudaMemPoolGetAttribute(resource.pool_handle(),
                                             cudaMemPoolAttrReservedMemHigh, &bytes),
                     "cudaMemPoolGetAttribute");
        return bytes;
    }
};

template <class Resource, class Held> class Allocator {
  public:
    Allocator(Resource resource, Held held)
        : resource_(std::move(resource)), held_(std::move(held)) {}

    void *allocate(std::size_t bytes, cudaStream_t stream) {
        return resource_.allocate(cuda::stream_ref{stream}, bytes, kAlignment);
    }
    void free(void *pointer, std::size_t bytes, cudaStream_t stream) {
        resource_.deallocate(cuda::stream_ref{stream}, pointer, bytes, kAlignment);
    }
    void free_elsewhere(void *pointer, std::size_t bytes, cudaStream_t stream) {
        free(pointer, bytes, stream);
    }
    std::optional<std::uint64_t> peak_mapped_bytes() const { return held_(); }

  private:
    Resource resource_;
    Held held_;
};

template <class Resource, class Held> auto allocator(Resource resource, Held held) {
    return std::make_unique<Allocator<Resource, Held>>(std::move(resource), std::move(held));
}

std::size_t half_of_free_memory() { return rmm::percent_of_free_device_memory(50); }

auto cuda_async() {
    cuda_async_memory_resource resource;
    return allocator(resource, HighWater{resource});
}

auto pool(std::size_t initial_bytes) {
    pool_memory_resource resource(cuda_memory_resource{}, initial_bytes);
    return allocator(resource, SizeOf{resource});
}

auto arena() {
    return allocator(arena_memory_resource(cuda_memory_resource{}, half_of_free_memory()),
                     Unknown{});
}

// Bins of 256 KiB to 4 MiB over a pool, as in RMM's own benchmarks.
auto binning(std::size_t initial_bytes) {
    pool_memory_resource upstream(cuda_memory_resource{}, initial_bytes);
    return allocator(binning_memory_resource(upstream, 18, 22), SizeOf{upstream});
}

template <class Make, class MakeEmpty>
void run(const peers::Options &options, const std::string &name, Make make, MakeEmpty make_empty) {
    if (!options.wants_allocator(name)) return;
    if (options.command == "bench") {
        peers::run_cases(name, make, make_empty,
                         [&](const std::string &wanted) { return options.wants_case(wanted); });
        return;
    }
    auto make_for_replay = [&] {
        auto empty = make_empty();
        return empty ? std::move(empty) : make();
    };
    for (const auto &path : options.traces) {
        peers::replay(name, make_for_replay, peers::TraceReader::read(path));
    }
}

} // namespace

int main(int argc, char **argv) {
    auto options = peers::Options::parse(argc, argv);
    if (options.command == "fit") {
        std::fprintf(stderr, "fit: these resources have no common limit to search for\n");
        return 2;
    }
    try {
        peers::check(cudaSetDevice(0), "cudaSetDevice");
        peers::check(cudaFree(nullptr), "cudaFree");
        run(options, "rmm-cuda-async", cuda_async, cuda_async);
        run(
            options, "rmm-pool", [] { return pool(half_of_free_memory()); },
            [] { return pool(0); });
        run(options, "rmm-arena", arena, [] { return decltype(arena()){}; });
        run(
            options, "rmm-binning", [] { return binning(half_of_free_memory()); },
            [] { return binning(0); });
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
