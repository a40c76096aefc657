// Resources as cuda::mr wants them, and so RMM. Prints nothing if all is well.

#include <cstdio>
#include <cstdlib>
#include <type_traits>

#define VPMM_WITH_CCCL
#include "must.h"
#include "vpmm.hpp"

template <class Resource>
inline constexpr bool is_the_devices = cuda::mr::resource_with<Resource, cuda::mr::device_accessible> &&
                                       !cuda::has_property<Resource, cuda::mr::host_accessible>;

static_assert(is_the_devices<vpmm::device_memory_resource> && is_the_devices<vpmm::device_resource>);
// Of these nobody knows before they are made.
static_assert(cuda::mr::resource<vpmm::resource> &&
              !cuda::has_property<vpmm::resource, cuda::mr::device_accessible>);

/// As RMM has had one, and as it has one.
struct stream_view {
  CUstream_st* raw;
  CUstream_st* value() const { return raw; }
};
struct stream_view_with_both : stream_view {
  CUstream_st* get() const { return raw; }
};

static_assert(std::is_convertible_v<cuda::stream_ref, vpmm::stream_ref> &&
              std::is_convertible_v<stream_view, vpmm::stream_ref> &&
              std::is_convertible_v<stream_view_with_both, vpmm::stream_ref> &&
              std::is_convertible_v<vpmm::stream, vpmm::stream_ref> &&
              std::is_convertible_v<CUstream_st*, vpmm::stream_ref>);
// A pointer to memory in the place of a stream is found by the compiler.
static_assert(!std::is_convertible_v<void*, vpmm::stream_ref> &&
              !std::is_convertible_v<int*, vpmm::stream_ref> &&
              !std::is_convertible_v<vpmm::pool, vpmm::stream_ref>);
// It would be destroyed when it is taken back.
static_assert(!std::is_constructible_v<vpmm::lent_stream, vpmm::driver, const vpmm::stream&>);

template <class Resource>
static void serves(const Resource& resource, const vpmm::stream& stream) {
  const cuda::stream_ref typed(stream.get());
  void* const one = resource.allocate(typed, 1000, 256);
  void* const two = resource.allocate_sync(1000, 256);
  MUST(one != nullptr && two != nullptr && one != two);
  resource.deallocate_sync(two, 1000, 256);
  resource.deallocate(stream_view{stream.get()}, one, 1000, 256);
}

int main() {
  const vpmm::driver driver;
  const vpmm::stream stream(driver);
  const vpmm::pool pool(driver);
  serves(vpmm::device_memory_resource(pool), stream);
  MUST(pool.stats().live_count == 0);
  serves(vpmm::resource(driver, "arena"), stream);
  serves(vpmm::device_resource(vpmm::resource(pool)), stream);
  MUST(pool.stats().live_count == 0);
  try {
    vpmm::device_resource(vpmm::resource(driver, "host"));
    MUST(false);
  } catch (const vpmm::error& error) {
    MUST(error.status() == VPMM_UNSUPPORTED);
  }
  return 0;
}
