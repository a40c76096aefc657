// C++ on the C ABI of vpmm: handles that are given back by themselves, errors as exceptions, resources in
// the shape of RMM's, and one for std::pmr.
//
// Nothing of CUDA is needed to include it. With VPMM_WITH_CCCL defined it includes <cuda/memory_resource>,
// and resources say what cuda::mr asks of them: RMM's references and containers then take them.

#ifndef VPMM_HPP
#define VPMM_HPP

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <memory_resource>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#ifdef VPMM_WITH_CCCL
#include <cuda/memory_resource>
#endif

#include "vpmm.h"

struct CUstream_st;  // what a CUstream, which is a cudaStream_t, points to

namespace vpmm {

/// A call that failed.
class error : public std::runtime_error {
 public:
  error(vpmm_status status, const std::string& text) : std::runtime_error(text), status_(status) {}
  vpmm_status status() const noexcept { return status_; }

 private:
  vpmm_status status_;
};

/// A request that there is no memory for. Also a std::bad_alloc, for code that catches that.
class out_of_memory : public std::bad_alloc {
 public:
  explicit out_of_memory(const std::string& text) : text_(std::make_shared<std::string>(text)) {}
  const char* what() const noexcept override { return text_->c_str(); }

 private:
  std::shared_ptr<std::string> text_;  // copies of an exception must not throw
};

/// Throws unless a call went well.
inline void check(vpmm_status status) {
  if (status == VPMM_OK) return;
  const std::string text = std::string(vpmm_status_name(status)) + ": " + vpmm_last_error();
  if (status == VPMM_OUT_OF_MEMORY) throw out_of_memory(text);
  throw error(status, text);
}

namespace detail {

/// Text that the library writes piece by piece. What a piece throws waits here until the call is over: it
/// must not pass through the library.
class written {
 public:
  static void append(void* context, const char* bytes, std::size_t length) noexcept {
    auto& self = *static_cast<written*>(context);
    if (self.thrown_) return;
    try {
      self.text_.append(bytes, length);
    } catch (...) {
      self.thrown_ = std::current_exception();
    }
  }
  std::string take() {
    if (thrown_) std::rethrow_exception(thrown_);
    return std::move(text_);
  }

 private:
  std::string text_;
  std::exception_ptr thrown_;
};

/// What a stream of another library has as its get(), or else as its value().
template <class Stream>
constexpr auto raw_of(const Stream& of, int /*first*/) noexcept
    -> std::enable_if_t<std::is_same_v<decltype(of.get()), CUstream_st*>, CUstream_st*> {
  return of.get();
}
template <class Stream>
constexpr auto raw_of(const Stream& of, long /*then*/) noexcept
    -> std::enable_if_t<std::is_same_v<decltype(of.value()), CUstream_st*>, CUstream_st*> {
  return of.value();
}

}  // namespace detail

/// A stream, as calls take it: made of a cudaStream_t, of null for the default stream, or of whatever has one
/// as its get() or value(), as cuda::stream_ref and rmm::cuda_stream_view have.
class stream_ref {
 public:
  constexpr stream_ref(std::nullptr_t) noexcept {}
  constexpr stream_ref(CUstream_st* raw) noexcept : raw_(raw) {}
  /// Not by itself: anything's address would be a stream.
  constexpr explicit stream_ref(void* raw) noexcept : raw_(static_cast<CUstream_st*>(raw)) {}
  template <class Stream, class = decltype(detail::raw_of(std::declval<const Stream&>(), 0))>
  constexpr stream_ref(const Stream& of) noexcept : raw_(detail::raw_of(of, 0)) {}

  constexpr CUstream_st* get() const noexcept { return raw_; }

 private:
  CUstream_st* raw_ = nullptr;
};

/// A driver: CUDA's, or the simulated one.
class driver {
 public:
  /// "cuda", "sim", "sim:1" for two simulated devices, or null for what VPMM_DEVICE says.
  explicit driver(const char* device = nullptr) {
    vpmm_driver* handle = nullptr;
    check(vpmm_driver_load(device, &handle));
    handle_.reset(handle, vpmm_driver_release);
  }

  /// The process's own, which everything that plugs into the process shares.
  static driver of_process() {
    vpmm_driver* handle = nullptr;
    check(vpmm_process_driver(&handle));
    return driver(handle);
  }

  std::uint32_t device_count() const {
    std::uint32_t count = 0;
    check(vpmm_driver_device_count(get(), &count));
    return count;
  }

  vpmm_driver* get() const noexcept { return handle_.get(); }

 private:
  explicit driver(vpmm_driver* handle) : handle_(handle, vpmm_driver_release) {}

  std::shared_ptr<vpmm_driver> handle_;
};

/// A stream of the library's own, destroyed at the end.
class stream {
 public:
  explicit stream(const driver& of, std::uint32_t device = 0) : driver_(of), device_(device) {
    check(vpmm_stream_create(driver_.get(), device, &raw_));
  }
  stream(const stream&) = delete;
  stream& operator=(const stream&) = delete;
  ~stream() { vpmm_stream_destroy(driver_.get(), raw_); }

  CUstream_st* get() const noexcept { return static_cast<CUstream_st*>(raw_); }
  void synchronize() const { check(vpmm_stream_synchronize(driver_.get(), device_, raw_)); }

 private:
  driver driver_;
  std::uint32_t device_;
  void* raw_ = nullptr;
};

/// Tells of a stream that was made elsewhere and lasts longer than this: pools serve it without a driver call
/// meanwhile. The stream is lent until the first of several that lend it ends.
class lent_stream {
 public:
  lent_stream(const driver& of, stream_ref stream, std::uint32_t device = 0)
      : driver_(of), stream_(stream) {
    check(vpmm_stream_lend(driver_.get(), device, stream_.get()));
  }
  /// One of the library's own is known; where it comes as a stream_ref nothing is done.
  lent_stream(const driver& of, const stream& own, std::uint32_t device = 0) = delete;
  lent_stream(const lent_stream&) = delete;
  lent_stream& operator=(const lent_stream&) = delete;
  ~lent_stream() { vpmm_stream_take_back(driver_.get(), stream_.get()); }

  CUstream_st* get() const noexcept { return stream_.get(); }

 private:
  driver driver_;
  stream_ref stream_;
};

/// What a pool is made with.
struct pool_options : vpmm_pool_options {
  pool_options() noexcept { vpmm_pool_options_init(this, sizeof(vpmm_pool_options)); }
};

/// A pool. Copies share it; it ends with the last of them.
class pool {
 public:
  explicit pool(const vpmm::driver& of, const pool_options& options = {})
      : driver_(of), device_(options.device) {
    vpmm_pool* handle = nullptr;
    check(vpmm_pool_create(driver_.get(), &options, &handle));
    handle_.reset(handle, vpmm_pool_release);
  }

  /// The process's own on a device, which lasts as long as the process.
  static pool of_process(std::uint32_t device = 0) {
    vpmm::driver own = vpmm::driver::of_process();
    vpmm_pool* handle = nullptr;
    check(vpmm_process_pool(device, &handle));
    return pool(std::move(own), device, handle);
  }

  void* malloc(std::size_t bytes, stream_ref stream) const {
    void* pointer = nullptr;
    check(vpmm_malloc(get(), bytes, stream.get(), &pointer));
    return pointer;
  }
  void free(void* pointer, stream_ref stream) const {
    check(vpmm_free(get(), pointer, stream.get()));
  }
  /// See vpmm_record_stream for how long the stream has to last.
  void record_stream(void* pointer, stream_ref stream) const {
    check(vpmm_record_stream(get(), pointer, stream.get()));
  }
  std::uint64_t trim_to(std::uint64_t keep_bytes) const {
    std::uint64_t returned = 0;
    check(vpmm_pool_trim_to(get(), keep_bytes, &returned));
    return returned;
  }
  /// The most bytes that it may hold; 0 for what it was made with.
  void limit_to(std::uint64_t bytes) const { check(vpmm_pool_limit_to(get(), bytes)); }
  /// What a device may do with its memory.
  vpmm_access access(std::uint32_t device) const {
    std::uint32_t found = 0;
    check(vpmm_pool_access(get(), device, &found));
    return static_cast<vpmm_access>(found);
  }
  /// Gives a device access to all of its memory, or takes it away.
  void set_access(std::uint32_t device, vpmm_access access) const {
    check(vpmm_pool_set_access(get(), device, access));
  }
  /// Sends an allocation to the process at the other end of a connected Unix stream socket, which makes an
  /// `imported` of it, and waits until it has. The pool was made with `sharing`.
  void send(void* pointer, int socket) const { check(vpmm_export_send(get(), pointer, socket)); }
  /// What it holds, block by block, as JSON.
  std::string snapshot() const {
    detail::written text;
    check(vpmm_pool_snapshot(get(), detail::written::append, &text));
    return text.take();
  }
  void reset_peaks() const { check(vpmm_pool_reset_peaks(get())); }
  vpmm_stats stats() const {
    vpmm_stats stats;
    vpmm_stats_init(&stats, sizeof stats);
    check(vpmm_pool_stats(get(), &stats));
    return stats;
  }
  std::string layout() const {
    std::size_t needed = 0;
    check(vpmm_pool_layout(get(), nullptr, 0, &needed));
    std::string text(needed, '\0');
    check(vpmm_pool_layout(get(), text.data(), text.size(), &needed));
    text.resize(needed < text.size() ? needed - 1 : text.size() - 1);
    return text;
  }

  const vpmm::driver& driver() const noexcept { return driver_; }
  std::uint32_t device() const noexcept { return device_; }
  vpmm_pool* get() const noexcept { return handle_.get(); }
  bool operator==(const pool& other) const noexcept { return handle_ == other.handle_; }
  bool operator!=(const pool& other) const noexcept { return !(*this == other); }

 private:
  pool(vpmm::driver of, std::uint32_t device, vpmm_pool* handle)
      : driver_(std::move(of)), device_(device), handle_(handle, vpmm_pool_release) {}

  vpmm::driver driver_;  // first, so that it is there when the pool ends
  std::uint32_t device_;
  std::shared_ptr<vpmm_pool> handle_;
};

/// A heap of a pool whose memory sleeps and wakes as one.
class tagged {
 public:
  tagged(pool of, std::string tag) : pool_(std::move(of)), tag_(std::move(tag)) {
    vpmm_tagged* handle = nullptr;
    check(vpmm_tagged_open(pool_.get(), tag_.c_str(), &handle));
    handle_.reset(handle, vpmm_tagged_release);
  }

  void* malloc(std::size_t bytes, stream_ref stream) const {
    void* pointer = nullptr;
    check(vpmm_tagged_malloc(get(), bytes, stream.get(), &pointer));
    return pointer;
  }
  void free(void* pointer, stream_ref stream) const { pool_.free(pointer, stream); }
  /// Gives the memory to the device; returns how much. What the memory holds is kept on the host.
  std::uint64_t suspend(stream_ref stream, vpmm_contents contents = VPMM_CONTENTS_KEEP) const {
    std::uint64_t bytes = 0;
    check(vpmm_suspend(pool_.get(), tag_.c_str(), stream.get(), contents, nullptr, &bytes));
    return bytes;
  }
  /// The same, but that what the memory holds is written to a file.
  std::uint64_t suspend_to(const std::string& path, stream_ref stream) const {
    std::uint64_t bytes = 0;
    check(vpmm_suspend(pool_.get(), tag_.c_str(), stream.get(), VPMM_CONTENTS_SAVE, path.c_str(),
                       &bytes));
    return bytes;
  }
  /// Brings the memory back; returns how much. Without contents what was kept is given up.
  std::uint64_t resume(stream_ref stream, bool with_contents = true) const {
    std::uint64_t bytes = 0;
    check(vpmm_resume(pool_.get(), tag_.c_str(), stream.get(), with_contents ? 0 : 1, &bytes));
    return bytes;
  }
  bool is_asleep() const {
    std::uint32_t asleep = 0;
    check(vpmm_tagged_is_asleep(get(), &asleep));
    return asleep != 0;
  }
  vpmm_stats stats() const {
    vpmm_stats stats;
    vpmm_stats_init(&stats, sizeof stats);
    check(vpmm_tagged_stats(get(), &stats));
    return stats;
  }

  vpmm_tagged* get() const noexcept { return handle_.get(); }

 private:
  pool pool_;
  std::string tag_;
  std::shared_ptr<vpmm_tagged> handle_;
};

/// A pool for the memory of one CUDA graph, or of several that never run at the same time.
class graph_pool {
 public:
  explicit graph_pool(const pool& of) {
    vpmm_graph_pool* handle = nullptr;
    check(vpmm_graph_pool_create(of.get(), &handle));
    handle_.reset(handle, vpmm_graph_pool_release);
  }

  void begin(stream_ref stream) const { check(vpmm_graph_pool_begin(get(), stream.get())); }
  void end(stream_ref stream) const { check(vpmm_graph_pool_end(get(), stream.get())); }
  void finish(stream_ref stream) const { check(vpmm_graph_pool_finish(get(), stream.get())); }

  vpmm_graph_pool* get() const noexcept { return handle_.get(); }

 private:
  std::shared_ptr<vpmm_graph_pool> handle_;
};

/// A whole pool on its way to another process: one of these for each receiver.
class exported {
 public:
  explicit exported(const pool& of) {
    vpmm_export* handle = nullptr;
    check(vpmm_export_create(of.get(), &handle));
    handle_.reset(handle, vpmm_export_release);
  }

  /// Sends what the pool has; from the second time on what it has made since, for `receive_more`.
  void send(int socket) const { check(vpmm_export_send_all(get(), socket)); }

  vpmm_export* get() const noexcept { return handle_.get(); }

 private:
  std::shared_ptr<vpmm_export> handle_;
};

/// Memory of another process's pool.
class imported {
 public:
  imported(const driver& of, std::uint32_t device, int socket, vpmm_access access) {
    vpmm_import* handle = nullptr;
    check(vpmm_import_receive(of.get(), device, socket, access, &handle));
    handle_.reset(handle, vpmm_import_release);
  }

  /// Takes what a whole pool has made since it was sent last.
  void receive_more(int socket) const { check(vpmm_import_receive_more(get(), socket)); }
  /// Where an address of the other process is in this one.
  void* translate(std::uint64_t there) const {
    void* here = nullptr;
    check(vpmm_import_translate(get(), there, &here));
    return here;
  }
  /// The start of an allocation; null of a whole pool.
  void* data() const {
    void* pointer = nullptr;
    check(vpmm_import_memory(get(), &pointer, nullptr));
    return pointer;
  }
  std::uint64_t size() const {
    std::uint64_t bytes = 0;
    check(vpmm_import_memory(get(), nullptr, &bytes));
    return bytes;
  }

  vpmm_import* get() const noexcept { return handle_.get(); }

 private:
  std::shared_ptr<vpmm_import> handle_;
};

/// Asks a function whenever memory runs out, as long as it lives: true tries again. What the function throws
/// counts as false.
///
/// When it ends another thread may still be in the function. The function, with what it has captured, is
/// there until that call has ended; what it only refers to must be as well.
class shortage_handler {
 public:
  shortage_handler(const pool& of, std::function<bool(const char*)> function) {
    auto kept = std::make_unique<std::function<bool(const char*)>>(std::move(function));
    vpmm_shortage* handle = nullptr;
    check(vpmm_pool_on_out_of_memory(of.get(), ask, kept.get(), finish, &handle));
    handle_.reset(handle);
    kept.release();  // to `finish`
  }

 private:
  static std::uint32_t ask(void* context, const char* text) noexcept {
    try {
      return (*static_cast<std::function<bool(const char*)>*>(context))(text) ? 1 : 0;
    } catch (...) {
      return 0;  // an exception must not pass through the library
    }
  }
  static void finish(void* context) noexcept {
    delete static_cast<std::function<bool(const char*)>*>(context);
  }
  struct release {
    void operator()(vpmm_shortage* handle) const noexcept { vpmm_shortage_release(handle); }
  };

  std::unique_ptr<vpmm_shortage, release> handle_;
};

namespace detail {

/// The calls of a resource without a stream: memory that any stream may use at once, and that none uses any
/// more. By way of the default stream, for which the host waits.
template <class Resource>
void* allocate_sync(const Resource& from, const driver& of, std::uint32_t device, std::size_t bytes,
                    std::size_t alignment) {
  void* const pointer = from.allocate(nullptr, bytes, alignment);
  try {
    check(vpmm_stream_synchronize(of.get(), device, nullptr));
  } catch (...) {
    from.deallocate(nullptr, pointer, bytes, alignment);
    throw;
  }
  return pointer;
}

}  // namespace detail

/// In the shape of RMM's and cuda::mr's device resources: streams with each call, sizes given back, no
/// exception out of a free.
class device_memory_resource {
 public:
  explicit device_memory_resource(pool of) noexcept : pool_(std::move(of)) {}

  void* allocate(stream_ref stream, std::size_t bytes, std::size_t alignment = 256) const {
    if (alignment > 256 || (alignment & (alignment - 1)) != 0) {
      throw error(VPMM_INVALID_ARGUMENT, "alignments are powers of two, of at most 256 bytes");
    }
    return pool_.malloc(bytes, stream);
  }
  void deallocate(stream_ref stream, void* pointer, std::size_t /*bytes*/,
                  std::size_t /*alignment*/ = 256) const noexcept {
    // Nobody to tell; the text stays in vpmm_last_error.
    static_cast<void>(vpmm_free(pool_.get(), pointer, stream.get()));
  }
  /// For use on any stream at once. Waits for the default stream.
  void* allocate_sync(std::size_t bytes, std::size_t alignment = 256) const {
    return detail::allocate_sync(*this, pool_.driver(), pool_.device(), bytes, alignment);
  }
  /// Of memory that no work uses any more.
  void deallocate_sync(void* pointer, std::size_t bytes, std::size_t alignment = 256) const noexcept {
    deallocate(nullptr, pointer, bytes, alignment);
  }
  bool operator==(const device_memory_resource& other) const noexcept {
    return pool_ == other.pool_;
  }
  bool operator!=(const device_memory_resource& other) const noexcept { return !(*this == other); }

#ifdef VPMM_WITH_CCCL
  friend void get_property(const device_memory_resource&, cuda::mr::device_accessible) noexcept {}
#endif

 private:
  pool pool_;
};

/// Any resource, by its text or on another one: "statistics(limiting(1GiB,arena))". Copies share it; it
/// ends with the last of them, and of what stands on it. The shape is device_memory_resource's, but that
/// nothing is said of who can reach the memory: see `device_resource`.
class resource {
 public:
  resource(const driver& of, const std::string& text, std::uint32_t device = 0)
      : resource(of, device, text, nullptr) {}
  /// What a text says, standing on another resource: "limiting(1GiB)".
  resource(const std::string& text, const resource& upstream)
      : resource(upstream.driver_, upstream.device_, text, upstream.get()) {}
  explicit resource(const pool& from) : driver_(from.driver()), device_(from.device()) {
    vpmm_resource* handle = nullptr;
    check(vpmm_resource_of_pool(from.get(), &handle));
    handle_.reset(handle, vpmm_resource_release);
  }

  /// A device's current one: the last that was made so, else its pool.
  static resource current(const driver& of, std::uint32_t device = 0) {
    vpmm_resource* handle = nullptr;
    check(vpmm_resource_current(of.get(), device, &handle));
    return resource(of, device, handle);
  }
  /// The driver keeps a current resource: to be called before the last of the driver's handles ends.
  static void reset_current(const driver& of, std::uint32_t device = 0) {
    check(vpmm_resource_set_current(of.get(), device, nullptr));
  }

  void* allocate(stream_ref stream, std::size_t bytes, std::size_t alignment = 0) const {
    void* pointer = nullptr;
    check(vpmm_resource_allocate(get(), bytes, alignment, stream.get(), &pointer));
    return pointer;
  }
  void deallocate(stream_ref stream, void* pointer, std::size_t bytes,
                  std::size_t alignment = 0) const noexcept {
    // Nobody to tell; the text stays in vpmm_last_error.
    static_cast<void>(vpmm_resource_deallocate(get(), pointer, bytes, alignment, stream.get()));
  }
  /// For use on any stream at once. Waits for the default stream.
  void* allocate_sync(std::size_t bytes, std::size_t alignment = 0) const {
    return detail::allocate_sync(*this, driver_, device_, bytes, alignment);
  }
  /// Of memory that no work uses any more.
  void deallocate_sync(void* pointer, std::size_t bytes, std::size_t alignment = 0) const noexcept {
    deallocate(nullptr, pointer, bytes, alignment);
  }
  /// See vpmm_record_stream for how long the stream has to last.
  void record_stream(void* pointer, stream_ref stream) const {
    check(vpmm_resource_record_stream(get(), pointer, stream.get()));
  }
  vpmm_facts facts() const {
    vpmm_facts facts;
    vpmm_facts_init(&facts, sizeof facts);
    check(vpmm_resource_facts(get(), &facts));
    return facts;
  }
  /// It and what it stands on, as a tree.
  std::string describe() const {
    std::size_t needed = 0;
    check(vpmm_resource_describe(get(), nullptr, 0, &needed));
    std::string text(needed, '\0');
    check(vpmm_resource_describe(get(), text.data(), text.size(), &needed));
    text.resize(text.size() - 1);
    return text;
  }
  vpmm_counters counters() const {
    vpmm_counters counters;
    vpmm_counters_init(&counters, sizeof counters);
    check(vpmm_resource_counters(get(), &counters));
    return counters;
  }
  /// For all threads, until another one is or `reset_current` is called.
  void make_current() const { check(vpmm_resource_set_current(driver_.get(), device_, get())); }

  vpmm_resource* get() const noexcept { return handle_.get(); }
  /// Whether each may deallocate what the other has allocated.
  bool operator==(const resource& other) const noexcept {
    std::uint32_t equal = 0;
    return vpmm_resource_is_equal(get(), other.get(), &equal) == VPMM_OK && equal != 0;
  }
  bool operator!=(const resource& other) const noexcept { return !(*this == other); }

 private:
  resource(const driver& of, std::uint32_t device, vpmm_resource* handle)
      : driver_(of), device_(device), handle_(handle, vpmm_resource_release) {}
  resource(const driver& of, std::uint32_t device, const std::string& text, const vpmm_resource* upstream)
      : driver_(of), device_(device) {
    vpmm_resource* handle = nullptr;
    check(vpmm_resource_open(driver_.get(), device_, text.c_str(), upstream, &handle));
    handle_.reset(handle, vpmm_resource_release);
  }

  driver driver_;  // first, so that it is there when the resource ends
  std::uint32_t device_;
  std::shared_ptr<vpmm_resource> handle_;
};

/// A resource whose memory work on the device can use, for whoever wants to know when it is compiled.
class device_resource : public resource {
 public:
  explicit device_resource(resource of) : resource(std::move(of)) {
    if (facts().device_accessible == 0) {
      throw error(VPMM_UNSUPPORTED, "the resource's memory is not the device's to use");
    }
  }

#ifdef VPMM_WITH_CCCL
  friend void get_property(const device_resource&, cuda::mr::device_accessible) noexcept {}
#endif
};

/// A pool and a stream as a std::pmr::memory_resource. The addresses are a device's: for containers
/// that only keep them.
class pmr_resource : public std::pmr::memory_resource {
 public:
  pmr_resource(pool of, stream_ref stream) noexcept : pool_(std::move(of)), stream_(stream) {}

 private:
  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    // An address for nothing, too: a std::pmr::memory_resource never answers null.
    return device_memory_resource(pool_).allocate(stream_, bytes == 0 ? 1 : bytes, alignment);
  }
  void do_deallocate(void* pointer, std::size_t bytes, std::size_t alignment) override {
    device_memory_resource(pool_).deallocate(stream_, pointer, bytes, alignment);
  }
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
    const auto* same = dynamic_cast<const pmr_resource*>(&other);
    return same != nullptr && same->pool_ == pool_ && same->stream_.get() == stream_.get();
  }

  pool pool_;
  stream_ref stream_;
};

/// What all of the process's pools hold and did, as JSON: see vpmm_process_record_history.
inline std::string process_snapshot() {
  detail::written text;
  check(vpmm_process_snapshot(detail::written::append, &text));
  return text.take();
}

}  // namespace vpmm

#endif  // VPMM_HPP
