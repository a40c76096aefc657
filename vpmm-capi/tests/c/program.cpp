// A program in C++: handles, exceptions, resources, memory for another process. Prints nothing if all is
// well.

#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <thread>
#include <vector>

#include "must.h"
#include "vpmm.hpp"

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

/// The other process, for which a thread with a driver of its own stands.
static void receive(int socket) {
  const vpmm::driver driver("sim");
  const vpmm::imported one(driver, 0, socket, VPMM_ACCESS_READ);
  MUST(one.data() != nullptr && one.size() == 3 << 20);
  const vpmm::imported all(driver, 0, socket, VPMM_ACCESS_READ_WRITE);
  const std::uint64_t before = all.size();
  MUST(all.data() == nullptr && before > 0);
  all.receive_more(socket);
  MUST(all.size() > before);
  std::uint64_t there = 0;
  MUST(read(socket, &there, sizeof there) == sizeof there);
  MUST(all.translate(there) != nullptr);
  try {
    all.translate(1);
    MUST(false);
  } catch (const vpmm::error& error) {
    MUST(error.status() == VPMM_BAD_POINTER);
  }
}

static void shared_pools(const vpmm::driver& driver) {
  vpmm::pool_options options;
  options.sharing = VPMM_SHARING_FILE_DESCRIPTOR;
  const vpmm::pool pool(driver, options);
  int sockets[2];
  MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
  std::thread thread(receive, sockets[1]);
  void* const one = pool.malloc(3 << 20, nullptr);
  pool.send(one, sockets[0]);
  const vpmm::exported all(pool);
  all.send(sockets[0]);
  void* const two = pool.malloc(50 << 20, nullptr);
  all.send(sockets[0]);
  const std::uint64_t there = reinterpret_cast<std::uintptr_t>(two);
  MUST(write(sockets[0], &there, sizeof there) == sizeof there);
  thread.join();
  MUST(close(sockets[0]) == 0 && close(sockets[1]) == 0);
  pool.free(one, nullptr);
  pool.free(two, nullptr);
}

/// Two devices, one of which reaches the other's pool.
static void access_of_others() {
  const vpmm::driver driver("sim:1");
  vpmm::pool_options options;
  options.device = 1;
  const vpmm::pool pool(driver, options);
  MUST(pool.device() == 1);
  pool.set_access(0, VPMM_ACCESS_READ_WRITE);
  MUST(pool.access(0) == VPMM_ACCESS_READ_WRITE);
  pool.set_access(0, VPMM_ACCESS_NONE);
  MUST(pool.access(0) == VPMM_ACCESS_NONE);
  try {
    pool.set_access(1, VPMM_ACCESS_NONE);
    MUST(false);
  } catch (const vpmm::error&) {
  }
  // On its own device's default stream, and of it.
  const vpmm::device_memory_resource resource(pool);
  resource.deallocate_sync(resource.allocate_sync(1000), 1000);
  vpmm::resource(pool).make_current();
  MUST(vpmm::resource::current(driver, 1) == vpmm::resource(pool));
  MUST(vpmm::resource::current(driver, 0) != vpmm::resource(pool));
  vpmm::resource::reset_current(driver, 1);
}

static void current_resources(const vpmm::driver& driver) {
  const vpmm::resource former = vpmm::resource::current(driver);
  {
    const vpmm::resource arena(driver, "arena");
    MUST(arena.facts().device_accessible == 1 && former != arena);
    arena.make_current();
    MUST(vpmm::resource::current(driver) == arena);
  }
  // It lives on as the current one.
  const vpmm::resource current = vpmm::resource::current(driver);
  current.deallocate(nullptr, current.allocate(nullptr, 1000), 1000);
  vpmm::resource::reset_current(driver);
  MUST(vpmm::resource::current(driver) == former);
}

static void pools_of_the_process() {
  const vpmm::driver driver = vpmm::driver::of_process();
  const vpmm::pool pool = vpmm::pool::of_process();
  MUST(vpmm::resource::current(driver) == vpmm::resource(pool));
  void* const pointer = pool.malloc(1000, nullptr);
  MUST(vpmm::pool::of_process().stats().live_count == 1);
  MUST(vpmm::process_snapshot().find("\"state\":\"active_allocated\"") != std::string::npos);
  pool.free(pointer, nullptr);
}

/// A stream that was noted may end before the free if its end is told.
static void streams_that_end(const vpmm::driver& driver, const vpmm::pool& pool) {
  const vpmm::lent_stream lent(driver, nullptr);  // there is nothing to do for a default one
  MUST(lent.get() == nullptr);
  void* const pointer = pool.malloc(3 << 20, lent);
  {
    const vpmm::stream further(driver);
    pool.record_stream(pointer, further);
  }
  pool.free(pointer, lent);
  const vpmm::stream own(driver);
  {
    const vpmm::lent_stream known(driver, vpmm::stream_ref(own));  // whoever lends what it is given
  }
  own.synchronize();  // it is still there
  pool.free(pool.malloc(1 << 20, own), own);
  MUST(vpmm_pool_validate(pool.get()) == VPMM_OK && pool.stats().live_count == 0);
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
  // The standard has an address for nothing, too; kept, lest the compiler go by its word for that.
  void* volatile of_nothing = pmr.allocate(0);
  MUST(reinterpret_cast<std::uintptr_t>(of_nothing) != 0 && pool.stats().live_count == 1);
  pmr.deallocate(of_nothing, 0);
  MUST(pool.stats().live_count == 0);
  stream.synchronize();
  MUST(pool.trim_to(0) > 0);

  handlers_that_end(pool);
  streams_that_end(driver, pool);
  shared_pools(driver);
  access_of_others();
  current_resources(driver);
  pools_of_the_process();
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
    const vpmm::resource counted("statistics(limiting(1MiB))", vpmm::resource(pool));
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
    MUST(vpmm::resource(pool) == vpmm::resource(pool));
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
