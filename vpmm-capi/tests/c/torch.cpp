// What PyTorch's plug-in interface does, by its signatures: requests and frees, exceptions caught by
// their type, graphs' pools with functions by value. Prints nothing if all is well.

#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>
#include <typeinfo>
#include <utility>
#include <vector>

#include "must.h"
#include "vpmm.hpp"

#ifdef WITH_C10
#include "torch_cuda.hpp"
using out_of_memory = c10::OutOfMemoryError;
using other_error = c10::Error;
#else
using out_of_memory = std::runtime_error;
using other_error = std::runtime_error;
#endif

using stream_t = void*;
using pool_id = std::pair<unsigned long long, unsigned long long>;

extern "C" {
void* vpmm_torch_alloc(ssize_t size, int device, stream_t stream);
void vpmm_torch_free(void* pointer, ssize_t size, int device, stream_t stream);
void vpmm_torch_init(int device_count);
void vpmm_torch_reset();
void vpmm_torch_memory_fraction(double fraction, int device);
void* vpmm_torch_base_alloc(void* pointer, size_t* size);
void vpmm_torch_record_stream(void* pointer, stream_t stream);
void vpmm_torch_begin_allocate_to_pool(int device, pool_id id, std::function<bool(stream_t)> filter);
void vpmm_torch_end_allocate_to_pool(int device, pool_id id);
void vpmm_torch_release_pool(int device, pool_id id);
std::uint64_t vpmm_torch_failed_frees();
std::uint64_t vpmm_torch_failed_requests(std::uint32_t device);
std::uint32_t vpmm_torch_answer_cache_info();
}

/// What a call throws of a type, as text; empty if nothing.
template <typename Error, typename Call>
static std::string thrown(Call call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

static vpmm_stats stats_of(vpmm_pool* pool) {
  vpmm_stats stats;
  vpmm_stats_init(&stats, sizeof stats);
  MUST(vpmm_pool_stats(pool, &stats) == VPMM_OK);
  return stats;
}

static void requests(vpmm_driver* driver, vpmm_pool* pool) {
  stream_t stream = nullptr;
  MUST(vpmm_stream_create(driver, 0, &stream) == VPMM_OK);
  MUST(vpmm_torch_alloc(0, 0, stream) == nullptr);
  vpmm_torch_free(nullptr, 0, 0, stream);
  for (stream_t on : {stream, stream_t{nullptr}, stream_t{reinterpret_cast<void*>(1)}}) {
    std::vector<void*> pointers;
    for (ssize_t bytes : {1, 512, 1 << 20, 20 << 20}) {
      pointers.push_back(vpmm_torch_alloc(bytes, 0, on));
      MUST(pointers.back() != nullptr);
      vpmm_torch_record_stream(pointers.back(), nullptr);
      size_t size = 0;
      char* inside = static_cast<char*>(pointers.back()) + bytes - 1;
      MUST(vpmm_torch_base_alloc(inside, &size) == pointers.back() && size >= size_t(bytes));
    }
    MUST(stats_of(pool).live_count == 4);
    for (void* pointer : pointers) vpmm_torch_free(pointer, 1, 0, on);
  }
  MUST(stats_of(pool).live_count == 0);
  // Again on the same stream: the same memory, without asking the driver anything.
  void* one = vpmm_torch_alloc(3 << 20, 0, stream);
  vpmm_torch_free(one, 3 << 20, 0, stream);
  void* two = vpmm_torch_alloc(3 << 20, 0, stream);
  MUST(one == two);
  vpmm_torch_free(two, 3 << 20, 0, stream);
  // Nothing is nothing of a stream that is known, too.
  MUST(vpmm_torch_alloc(0, 0, stream) == nullptr);
  vpmm_torch_free(nullptr, 0, 0, stream);
  MUST(vpmm_torch_failed_frees() == 0 && stats_of(pool).live_count == 0);
  MUST(stats_of(pool).mapped_bytes > 0);
  vpmm_torch_reset();
  MUST(stats_of(pool).mapped_bytes == 0);
  // Its handle may be another stream's from here on.
  std::uint32_t known = 0;
  MUST(vpmm_process_forget_stream(0, stream, &known) == VPMM_OK && known == 1);
  MUST(vpmm_process_forget_stream(0, stream, &known) == VPMM_OK && known == 0);
  MUST(vpmm_process_forget_stream(0, nullptr, &known) == VPMM_OK && known == 0);
  MUST(vpmm_stream_destroy(driver, stream) == VPMM_OK);
}

static void more_streams_than_are_kept(vpmm_driver* driver) {
  std::vector<stream_t> streams(1500);
  std::vector<void*> pointers;
  for (stream_t& stream : streams) {
    MUST(vpmm_stream_create(driver, 0, &stream) == VPMM_OK);
    pointers.push_back(vpmm_torch_alloc(512, 0, stream));
  }
  for (size_t i = 0; i < streams.size(); i++) {
    vpmm_torch_free(pointers[i], 512, 0, streams[i]);
    MUST(vpmm_process_forget_stream(0, streams[i], nullptr) == VPMM_OK);
    MUST(vpmm_stream_destroy(driver, streams[i]) == VPMM_OK);
  }
}

static void failures(vpmm_pool* pool) {
  const std::string text =
      thrown<out_of_memory>([] { vpmm_torch_alloc(ssize_t{1} << 50, 0, nullptr); });
  MUST(text.find("CUDA out of memory. Tried to allocate 1125899906842624 bytes") == 0);
  MUST(text.find("memory held") != std::string::npos);  // the map
  MUST(!thrown<other_error>([] { vpmm_torch_alloc(512, 99, nullptr); }).empty());
  MUST(!thrown<other_error>([] { vpmm_torch_alloc(512, -1, nullptr); }).empty());
  MUST(!thrown<other_error>([] { vpmm_torch_alloc(-1, 0, nullptr); }).empty());
  MUST(vpmm_torch_failed_requests(0) == 1 && vpmm_torch_failed_requests(1) == 0);
  void* const wild = reinterpret_cast<void*>(0x1000);
  MUST(!thrown<other_error>([=] { vpmm_torch_record_stream(wild, nullptr); }).empty());
  MUST(!thrown<other_error>([=] { vpmm_torch_base_alloc(wild, nullptr); }).empty());
  MUST(!thrown<other_error>([] { vpmm_torch_memory_fraction(1.5, 0); }).empty());
  MUST(!thrown<other_error>([] { vpmm_torch_end_allocate_to_pool(0, {1, 2}); }).empty());
  MUST(!thrown<other_error>([] { vpmm_torch_release_pool(0, {1, 2}); }).empty());
  MUST(!thrown<other_error>([] { vpmm_torch_begin_allocate_to_pool(0, {1, 2}, nullptr); }).empty());

  vpmm_torch_memory_fraction(0.001, 0);
  MUST(!thrown<out_of_memory>([] { vpmm_torch_alloc(ssize_t{1} << 30, 0, nullptr); }).empty());
  vpmm_torch_memory_fraction(1.0, 0);
  void* pointer = vpmm_torch_alloc(ssize_t{1} << 30, 0, nullptr);
  vpmm_torch_free(pointer, ssize_t{1} << 30, 0, nullptr);
  MUST(stats_of(pool).live_count == 0);
#ifdef WITH_C10
  // Not any c10::Error is one of memory; each is ended once.
  bool is_memory = false;
  try {
    vpmm_torch_base_alloc(wild, nullptr);
  } catch (const c10::OutOfMemoryError&) {
    is_memory = true;
  } catch (const c10::Error& error) {
    MUST(std::strcmp(error.location().file, "vpmm") == 0);
    MUST(c10::alive() == 1);
  }
  MUST(!is_memory && c10::alive() == 0);
#endif
  // From a thread of its own, through a frame with something to end.
  std::thread([] {
    auto ended = std::make_shared<int>(0);
    const std::weak_ptr<int> weak = ended;
    const std::string text = thrown<out_of_memory>([held = std::move(ended)] {
      vpmm_torch_alloc(ssize_t{1} << 50, 0, nullptr);
    });
    MUST(!text.empty() && weak.expired());
  }).join();
}

static void graphs(vpmm_driver* driver, vpmm_pool* pool) {
  stream_t taken = nullptr, other = nullptr;
  MUST(vpmm_stream_create(driver, 0, &taken) == VPMM_OK);
  MUST(vpmm_stream_create(driver, 0, &other) == VPMM_OK);
  const pool_id id{0x1234567890abcdef, 7};
  auto counted = std::make_shared<int>(0);
  // Too large for the function's own room, so that copies of it are made and ended.
  const std::vector<stream_t> streams{taken};
  std::function<bool(stream_t)> filter = [counted, streams](stream_t stream) {
    ++*counted;
    return stream == streams[0];
  };
  const long before = counted.use_count();
  const std::uint64_t reserved = stats_of(pool).reserved_bytes;
  vpmm_torch_begin_allocate_to_pool(0, id, filter);
  MUST(counted.use_count() == before + 1);
  MUST(stats_of(pool).reserved_bytes > reserved);  // addresses of its own
  void* inside = vpmm_torch_alloc(1 << 20, 0, taken);
  void* outside = vpmm_torch_alloc(1 << 20, 0, other);
  MUST(*counted >= 2);
  // Far from each other: the graph's addresses are not the pool's.
  const auto a = reinterpret_cast<std::uintptr_t>(inside);
  const auto b = reinterpret_cast<std::uintptr_t>(outside);
  MUST((a > b ? a - b : b - a) > (std::uintptr_t{1} << 30));
  vpmm_torch_free(inside, 1 << 20, 0, taken);
  vpmm_torch_free(outside, 1 << 20, 0, other);
  MUST(!thrown<other_error>([&] { vpmm_torch_begin_allocate_to_pool(0, id, filter); }).empty());
  vpmm_torch_end_allocate_to_pool(0, id);
  MUST(counted.use_count() == before);
  // A second capture shares the pool; it is given up when both are released.
  vpmm_torch_begin_allocate_to_pool(0, id, filter);
  void* again = vpmm_torch_alloc(1 << 20, 0, taken);
  MUST(again == inside);
  vpmm_torch_end_allocate_to_pool(0, id);
  vpmm_torch_release_pool(0, id);
  vpmm_torch_release_pool(0, id);
  MUST(!thrown<other_error>([&] { vpmm_torch_release_pool(0, id); }).empty());
  vpmm_torch_free(again, 1 << 20, 0, other);
  MUST(stats_of(pool).live_count == 0);
  vpmm_torch_reset();
}

/// What a filter throws, or its copy, comes out of the call that asks it; all goes on from there.
static void filters_that_throw(vpmm_driver* driver, vpmm_pool* pool) {
  struct refusal {
    const std::vector<stream_t> alive{nullptr};  // something to end
  };
  struct copied {
    bool* throws;
    explicit copied(bool* throws) : throws(throws) {}
    copied(const copied& other) : throws(other.throws) {
      if (*throws) throw refusal();
    }
    bool operator()(stream_t) const {
      if (*throws) throw refusal();
      return false;
    }
  };
  const auto throws_refusal = [](auto call) {
    try {
      call();
    } catch (const refusal&) {
      return true;
    }
    return false;
  };
  const pool_id id{3, 9};
  stream_t stream = nullptr;
  MUST(vpmm_stream_create(driver, 0, &stream) == VPMM_OK);
  bool throws = false;
  vpmm_torch_begin_allocate_to_pool(0, id, copied(&throws));
  throws = true;
  for (int i = 0; i < 3; i++) {
    MUST(throws_refusal([=] { vpmm_torch_alloc(512, 0, stream); }));
  }
  throws = false;
  vpmm_torch_free(vpmm_torch_alloc(512, 0, stream), 512, 0, stream);
  vpmm_torch_end_allocate_to_pool(0, id);
  vpmm_torch_release_pool(0, id);
  std::function<bool(stream_t)> filter = copied(&throws);
  throws = true;
  // Moved, so that it is copied by the library alone.
  MUST(throws_refusal([&] { vpmm_torch_begin_allocate_to_pool(0, id, std::move(filter)); }));
  throws = false;
  MUST(!thrown<other_error>([&] { vpmm_torch_end_allocate_to_pool(0, id); }).empty());
  vpmm_torch_free(vpmm_torch_alloc(512, 0, stream), 512, 0, stream);
  MUST(vpmm_process_forget_stream(0, stream, nullptr) == VPMM_OK);
  MUST(vpmm_stream_destroy(driver, stream) == VPMM_OK);
  MUST(stats_of(pool).live_count == 0);
}

/// A filter may free memory as it ends, also while another pool is open.
static void filters_that_free(vpmm_pool* pool) {
  const auto never = [](stream_t) { return false; };
  const auto holder = [=] {
    std::shared_ptr<void> held(vpmm_torch_alloc(512, 0, nullptr),
                               [](void* pointer) { vpmm_torch_free(pointer, 512, 0, nullptr); });
    return [held, never](stream_t stream) { return never(stream); };
  };
  vpmm_torch_begin_allocate_to_pool(0, {4, 1}, never);
  for (const bool is_ended : {true, false}) {
    vpmm_torch_begin_allocate_to_pool(0, {4, 2}, holder());
    MUST(stats_of(pool).live_count == 1);
    if (is_ended) vpmm_torch_end_allocate_to_pool(0, {4, 2});
    vpmm_torch_release_pool(0, {4, 2});
    MUST(stats_of(pool).live_count == 0);
  }
  vpmm_torch_end_allocate_to_pool(0, {4, 1});
  vpmm_torch_release_pool(0, {4, 1});
}

/// A free that fails is told of; where nobody can read that any more it is counted all the same.
static void frees_that_fail() {
  std::signal(SIGPIPE, SIG_IGN);
  const int kept = dup(STDERR_FILENO);
  int ends[2];
  MUST(kept >= 0 && pipe(ends) == 0);
  MUST(close(ends[0]) == 0 && dup2(ends[1], STDERR_FILENO) >= 0);
  vpmm_torch_free(reinterpret_cast<void*>(0x1000), 512, 0, nullptr);
  MUST(dup2(kept, STDERR_FILENO) >= 0 && close(kept) == 0 && close(ends[1]) == 0);
  MUST(vpmm_torch_failed_frees() == 1);
}

#ifdef WITH_C10
/// Only the object that is used answers, and is what it was in all else.
static void the_longest_block(vpmm_pool* pool, stream_t stream) {
  using torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator;
  auto& used = c10::cuda::CUDACachingAllocator::allocator;
  const auto longest = [&](int device, size_t at_least) {
    used.load()->cacheInfo(static_cast<signed char>(device), &at_least);
    return at_least;
  };
  const auto refused = [&](int device) {
    return thrown<c10::Error>([&] { longest(device, 0); });
  };
  MUST(vpmm_torch_answer_cache_info() == 0);
  struct derived : CUDAPluggableAllocator {};
  const auto other = std::make_unique<derived>();
  used = other.get();
  MUST(vpmm_torch_answer_cache_info() == 0);
  MUST(refused(0) == "pluggable does not yet support cacheInfo");
  auto plugged = std::make_unique<CUDAPluggableAllocator>();
  const auto beside = std::make_unique<CUDAPluggableAllocator>();
  used = plugged.get();
  MUST(vpmm_torch_answer_cache_info() == 1);
  MUST(vpmm_torch_answer_cache_info() == 1);
  MUST(used.load()->initialized() && used.load()->name() == "pluggable");
  MUST(dynamic_cast<CUDAPluggableAllocator*>(used.load()) == plugged.get());
  MUST(typeid(*used.load()) == typeid(*beside));

  vpmm_torch_free(vpmm_torch_alloc(30 << 20, 0, stream), 30 << 20, 0, stream);
  const vpmm_stats now = stats_of(pool);
  const size_t held = now.idle_bytes + now.cached_bytes;
  MUST(held >= 30 << 20 && longest(0, 1) == held && longest(0, held + 7) == held + 7);
  // With 0 the device's memory counts, and so much there is in one piece.
  const size_t all = longest(0, 0);
  MUST(all > held + (size_t{1} << 30));
  void* block = vpmm_torch_alloc(all - (256 << 20), 0, stream);
  MUST(block != nullptr && longest(0, 0) <= 256 << 20);
  vpmm_torch_free(block, 0, 0, stream);
  vpmm_torch_reset();
  MUST(refused(40).find("cacheInfo") != std::string::npos);
  MUST(refused(-1).find("there is no device -1") != std::string::npos);

  used = beside.get();
  MUST(refused(0) == "pluggable does not yet support cacheInfo");
  used = nullptr;
  plugged.reset();
}
#else
static void the_longest_block(vpmm_pool*, stream_t) { MUST(vpmm_torch_answer_cache_info() == 0); }
#endif

int main() {
  vpmm_torch_init(1);
  vpmm_pool_options options;
  vpmm_pool_options_init(&options, sizeof options);
  options.device = VPMM_EVERY_DEVICE;
  MUST(vpmm_process_configure(&options) == VPMM_OK);
  vpmm_driver* driver = nullptr;
  vpmm_pool* pool = nullptr;
  MUST(vpmm_process_driver(&driver) == VPMM_OK);
  MUST(vpmm_process_pool(0, &pool) == VPMM_OK);
  MUST(vpmm_process_configure(&options) == VPMM_IN_USE);
  the_longest_block(pool, nullptr);
  requests(driver, pool);
  more_streams_than_are_kept(driver);
  failures(pool);
  graphs(driver, pool);
  filters_that_throw(driver, pool);
  filters_that_free(pool);
  MUST(vpmm_torch_failed_frees() == 0);
  frees_that_fail();
  MUST(vpmm_pool_validate(pool) == VPMM_OK);
  vpmm_pool_release(pool);
  vpmm_driver_release(driver);
  return 0;
}
