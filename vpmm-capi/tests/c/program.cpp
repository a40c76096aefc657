// A program in C++: handles, exceptions, both resources. Prints nothing if all is well.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "vpmm.hpp"

#define MUST(condition)                                                    \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (0)

/// Whether this thread's next requests of the host's memory are refused.
static thread_local bool refuses = false;

// Not inlined: the compiler would see them by halves, and warn of it.
__attribute__((noinline)) void* operator new(std::size_t bytes) {
  void* const room = refuses ? nullptr : std::malloc(bytes);
  if (room == nullptr) throw std::bad_alloc();
  return room;
}
__attribute__((noinline)) void operator delete(void* room) noexcept { std::free(room); }
__attribute__((noinline)) void operator delete(void* room, std::size_t) noexcept {
  std::free(room);
}

/// What a text is appended to may throw: not through the library, but to who asked for it.
static void snapshots_without_memory(const vpmm::pool& pool) {
  bool thrown = false;
  refuses = true;
  try {
    pool.snapshot();
  } catch (const std::bad_alloc&) {
    thrown = true;
  }
  refuses = false;
  MUST(thrown && !pool.snapshot().empty());
}

int main() {
  vpmm::driver driver;
  MUST(driver.device_count() > 0);
  vpmm::stream stream(driver);
  vpmm::pool_options options;
  options.limit_bytes = std::uint64_t{64} << 20;
  vpmm::pool pool(driver, options);
  const vpmm::pool same = pool;
  MUST(same == pool && vpmm::pool(driver) != pool);

  void* pointer = pool.malloc(3 << 20, stream.get());
  same.record_stream(pointer, nullptr);
  pool.free(pointer, stream.get());
  MUST(pool.stats().live_count == 0);
  MUST(!pool.layout().empty());
  MUST(pool.snapshot().find("\"state\":\"inactive\"") != std::string::npos);
  snapshots_without_memory(pool);
  pool.limit_to(2 << 20);
  try {
    pool.malloc(30 << 20, stream.get());
    MUST(false);
  } catch (const vpmm::out_of_memory&) {
  }
  pool.limit_to(0);
  try {
    pool.free(reinterpret_cast<void*>(0x1000), stream.get());
    MUST(false);
  } catch (const vpmm::error& error) {
    MUST(error.status() == VPMM_BAD_POINTER);
    MUST(std::strstr(error.what(), "VPMM_BAD_POINTER") != nullptr);
  }
  try {
    pool.malloc(std::size_t{1} << 40, stream.get());
    MUST(false);
  } catch (const std::bad_alloc& error) {
    MUST(std::strstr(error.what(), "out of memory") != nullptr);
  }

  vpmm::device_memory_resource resource(pool);
  MUST(resource == vpmm::device_memory_resource(same));
  void* block = resource.allocate(stream.get(), 1000);
  resource.deallocate(stream.get(), block, 1000);
  resource.deallocate(stream.get(), block, 1000);  // noexcept, whatever it is given
  try {
    resource.allocate(stream.get(), 1000, 3);
    MUST(false);
  } catch (const vpmm::error& error) {
    MUST(error.status() == VPMM_INVALID_ARGUMENT);
  }

  vpmm::pmr_resource pmr(pool, stream.get()), equal(same, stream.get()), other(pool, nullptr);
  MUST(pmr == equal && pmr != other);
  void* of_pmr = pmr.allocate(5000, 64);
  MUST(pool.stats().live_count == 1);
  pmr.deallocate(of_pmr, 5000, 64);
  stream.synchronize();
  MUST(pool.trim_to(0) > 0);

  {
    vpmm::tagged weights(pool, "weights");
    void* tensor = weights.malloc(40 << 20, stream.get());
    MUST(weights.suspend(stream.get()) >= 40 << 20 && weights.is_asleep());
    try {
      weights.malloc(1, stream.get());
      MUST(false);
    } catch (const vpmm::error& error) {
      MUST(error.status() == VPMM_BAD_STATE);
    }
    MUST(weights.resume(stream.get()) >= 40 << 20 && !weights.is_asleep());
    MUST(weights.stats().live_count == 1);
    // What is in the way is given up when asked for: here the weights.
    int asked = 0;
    vpmm::shortage_handler handler(pool, [&](const char* text) {
      MUST(std::strstr(text, "out of memory") != nullptr);
      if (asked++ > 0) throw 1;  // is "no"
      weights.suspend(stream.get(), VPMM_CONTENTS_DISCARD);
      return true;
    });
    pool.free(pool.malloc(50 << 20, stream.get()), stream.get());
    MUST(asked == 1 && weights.is_asleep());
    try {
      pool.malloc(70 << 20, stream.get());
      MUST(false);
    } catch (const vpmm::out_of_memory&) {
    }
    weights.free(tensor, stream.get());
  }
  {
    const vpmm::resource counted("statistics(limiting(1MiB))", vpmm::resource(driver, pool));
    MUST(counted.describe() ==
         "statistics\n└─ limiting(limit=1 MiB)\n   └─ vpmm(profile=default device=0)");
    void* held = counted.allocate(stream.get(), 1000);
    MUST(counted.counters().bytes.current == 1000);
    try {
      counted.allocate(stream.get(), 2 << 20);
      MUST(false);
    } catch (const vpmm::out_of_memory&) {
    }
    counted.deallocate(stream.get(), held, 1000);
    MUST(counted.counters().allocations.current == 0);
    MUST(vpmm::resource(driver, pool) == vpmm::resource(driver, pool));
    MUST(vpmm::resource(driver, "default") != vpmm::resource(driver, "default"));
    try {
      vpmm::resource(driver, "arenas");
      MUST(false);
    } catch (const vpmm::error& error) {
      MUST(error.status() == VPMM_INVALID_ARGUMENT);
    }
  }
  vpmm::graph_pool graph(pool);
  graph.begin(stream.get());
  pool.free(pool.malloc(1 << 20, stream.get()), stream.get());
  graph.end(stream.get());
  graph.finish(stream.get());
  return 0;
}
