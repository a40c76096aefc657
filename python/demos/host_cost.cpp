// What a request and a free cost the host, without an interpreter around them: host_cost.py builds this
// and calls it.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <vector>

#ifdef WITH_TORCH
#include <c10/cuda/CUDACachingAllocator.h>
#endif

namespace {

/// What is done: `live` blocks are held, and the oldest is freed and one allocated, again and again. Sizes
/// take turns.
struct Work {
  const std::size_t* sizes;
  std::size_t size_count;
  std::size_t live;
  std::size_t steps;
  std::size_t rounds;
};

/// Nanoseconds of a request or a free, the mean of each round.
template <typename Allocate, typename Free>
void measure(const Work& work, Allocate allocate, Free free, double* ns) {
  std::vector<void*> blocks(work.live);
  std::size_t next_size = 0, oldest = 0;
  const auto request = [&] {
    void* block = allocate(work.sizes[next_size]);
    next_size = next_size + 1 < work.size_count ? next_size + 1 : 0;
    return block;
  };
  const auto run = [&](std::size_t steps) {
    for (std::size_t step = 0; step < steps; step++) {
      free(blocks[oldest]);
      blocks[oldest] = request();
      oldest = oldest + 1 < work.live ? oldest + 1 : 0;
    }
  };
  for (void*& block : blocks) block = request();
  run(work.steps);  // warm
  for (std::size_t round = 0; round < work.rounds; round++) {
    const auto begin = std::chrono::steady_clock::now();
    run(work.steps);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    ns[round] = took.count() / (2.0 * static_cast<double>(work.steps));
  }
  for (void* block : blocks) free(block);
}

template <typename Call>
int guarded(Call call) {
  try {
    call();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "host_cost: %s\n", error.what());
    return 1;
  }
}

}  // namespace

extern "C" {

/// Through the two functions of a plug-in, by their addresses.
int host_cost_raw(void* (*allocate)(std::ptrdiff_t, int, void*),
                  void (*free)(void*, std::ptrdiff_t, int, void*), void* stream, const std::size_t* sizes,
                  std::size_t size_count, std::size_t live, std::size_t steps, std::size_t rounds,
                  double* ns) {
  const Work work{sizes, size_count, live, steps, rounds};
  return guarded([&] {
    measure(
        work, [&](std::size_t bytes) { return allocate(static_cast<std::ptrdiff_t>(bytes), 0, stream); },
        [&](void* block) { free(block, 0, 0, stream); }, ns);
  });
}

#ifdef WITH_TORCH
/// Through PyTorch's allocator, whichever it is. Without a stream it is PyTorch's current one.
int host_cost_torch(void* stream, const std::size_t* sizes, std::size_t size_count, std::size_t live,
                    std::size_t steps, std::size_t rounds, double* ns) {
  const Work work{sizes, size_count, live, steps, rounds};
  return guarded([&] {
    auto* const allocator = c10::cuda::CUDACachingAllocator::get();
    const auto free = [&](void* block) { allocator->raw_delete(block); };
    if (stream == nullptr) {
      measure(work, [&](std::size_t bytes) { return allocator->raw_alloc(bytes); }, free, ns);
    } else {
      const auto on = static_cast<cudaStream_t>(stream);
      const auto allocate = [&](std::size_t bytes) { return allocator->raw_alloc_with_stream(bytes, on); };
      measure(work, allocate, free, ns);
    }
  });
}
#endif

/// A plug-in that does nothing: what is left is PyTorch's own. Addresses come again after a million.
void* host_cost_nothing_alloc(std::ptrdiff_t, int, void*) {
  static std::uintptr_t count = 0;
  count = (count + 1) % 1'000'000;
  return reinterpret_cast<void*>((std::uintptr_t{1} << 40) + count * 512);
}

void host_cost_nothing_free(void*, std::ptrdiff_t, int, void*) {}

}  // extern "C"
