// A program in C++: handles, exceptions, both resources. Prints nothing if all is well.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <thread>
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

/// What a handler has captured: says where it is when it ends.
struct captured {
  explicit captured(std::atomic<bool>& ended) : ended_(&ended) {}
  ~captured() { ended_->store(true); }
  bool is_there() const { return !ended_->load(); }

 private:
  std::atomic<bool>* ended_;
};

/// Asks for more than there is.
static void run_out(const vpmm::pool& pool) {
  try {
    pool.malloc(60 << 20, nullptr);
    MUST(false);
  } catch (const vpmm::out_of_memory&) {
  }
}

/// A handler may end while a thread is in it: by another thread, by itself, or when another is moved there.
static void handlers_that_end(const vpmm::pool& pool) {
  void* const held = pool.malloc(40 << 20, nullptr);
  std::atomic<bool> ended{false}, is_inside{false}, may_leave{false}, was_there{false};
  {
    auto kept = std::make_shared<captured>(ended);
    std::optional<vpmm::shortage_handler> handler(std::in_place, pool, [&, kept](const char*) {
      is_inside = true;
      while (!may_leave) std::this_thread::yield();
      was_there = kept->is_there();
      return false;
    });
    kept.reset();
    std::thread thread(run_out, pool);
    while (!is_inside) std::this_thread::yield();
    handler.reset();
    MUST(!ended);
    may_leave = true;
    thread.join();
    MUST(was_there && ended);
  }
  ended = false;
  {
    std::optional<vpmm::shortage_handler> handler;
    auto kept = std::make_shared<captured>(ended);
    handler.emplace(pool, [&, kept](const char*) {
      handler.reset();
      was_there = kept->is_there();
      return true;
    });
    kept.reset();
    was_there = false;
    run_out(pool);
    MUST(was_there && ended);
  }
  int first = 0, second = 0;
  ended = false;
  auto kept = std::make_shared<captured>(ended);
  vpmm::shortage_handler handler(pool, [&, kept](const char*) { return ++first < 0; });
  kept.reset();
  handler = vpmm::shortage_handler(pool, [&](const char*) { return ++second < 0; });
  MUST(ended);
  run_out(pool);
  MUST(first == 0 && second == 1);
  pool.free(held, nullptr);
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

  handlers_that_end(pool);
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
