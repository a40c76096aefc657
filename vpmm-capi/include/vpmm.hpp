// C++ on the C ABI of vpmm: handles that are given back by themselves, errors as exceptions, resources in
// the shape of RMM's, and one for std::pmr.

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
#include <utility>

#include "vpmm.h"

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

}  // namespace detail

/// A driver: CUDA's, or the simulated one.
class driver {
 public:
  /// "cuda", "sim", "sim:1" for two simulated devices, or null for what VPMM_DEVICE says.
  explicit driver(const char* device = nullptr) {
    vpmm_driver* handle = nullptr;
    check(vpmm_driver_load(device, &handle));
    handle_.reset(handle, vpmm_driver_release);
  }

  std::uint32_t device_count() const {
    std::uint32_t count = 0;
    check(vpmm_driver_device_count(get(), &count));
    return count;
  }

  vpmm_driver* get() const noexcept { return handle_.get(); }

 private:
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

  /// A CUstream, which is a cudaStream_t.
  void* get() const noexcept { return raw_; }
  void synchronize() const { check(vpmm_stream_synchronize(driver_.get(), device_, raw_)); }

 private:
  driver driver_;
  std::uint32_t device_;
  void* raw_ = nullptr;
};

/// What a pool is made with.
struct pool_options : vpmm_pool_options {
  pool_options() noexcept { vpmm_pool_options_init(this, sizeof(vpmm_pool_options)); }
};

/// A pool. Copies share it; it ends with the last of them.
class pool {
 public:
  explicit pool(const driver& of, const pool_options& options = {}) : driver_(of) {
    vpmm_pool* handle = nullptr;
    check(vpmm_pool_create(driver_.get(), &options, &handle));
    handle_.reset(handle, vpmm_pool_release);
  }

  void* malloc(std::size_t bytes, void* stream) const {
    void* pointer = nullptr;
    check(vpmm_malloc(get(), bytes, stream, &pointer));
    return pointer;
  }
  void free(void* pointer, void* stream) const { check(vpmm_free(get(), pointer, stream)); }
  void record_stream(void* pointer, void* stream) const {
    check(vpmm_record_stream(get(), pointer, stream));
  }
  std::uint64_t trim_to(std::uint64_t keep_bytes) const {
    std::uint64_t returned = 0;
    check(vpmm_pool_trim_to(get(), keep_bytes, &returned));
    return returned;
  }
  /// The most bytes that it may hold; 0 for what it was made with.
  void limit_to(std::uint64_t bytes) const { check(vpmm_pool_limit_to(get(), bytes)); }
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

  vpmm_pool* get() const noexcept { return handle_.get(); }
  bool operator==(const pool& other) const noexcept { return handle_ == other.handle_; }
  bool operator!=(const pool& other) const noexcept { return !(*this == other); }

 private:
  driver driver_;  // first, so that it is there when the pool ends
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

  void* malloc(std::size_t bytes, void* stream) const {
    void* pointer = nullptr;
    check(vpmm_tagged_malloc(get(), bytes, stream, &pointer));
    return pointer;
  }
  void free(void* pointer, void* stream) const { pool_.free(pointer, stream); }
  /// Gives the memory to the device; returns how much. What the memory holds is kept on the host.
  std::uint64_t suspend(void* stream, vpmm_contents contents = VPMM_CONTENTS_KEEP) const {
    std::uint64_t bytes = 0;
    check(vpmm_suspend(pool_.get(), tag_.c_str(), stream, contents, nullptr, &bytes));
    return bytes;
  }
  /// The same, but that what the memory holds is written to a file.
  std::uint64_t suspend_to(const std::string& path, void* stream) const {
    std::uint64_t bytes = 0;
    check(vpmm_suspend(pool_.get(), tag_.c_str(), stream, VPMM_CONTENTS_SAVE, path.c_str(), &bytes));
    return bytes;
  }
  /// Brings the memory back; returns how much. Without contents what was kept is given up.
  std::uint64_t resume(void* stream, bool with_contents = true) const {
    std::uint64_t bytes = 0;
    check(vpmm_resume(pool_.get(), tag_.c_str(), stream, with_contents ? 0 : 1, &bytes));
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

  void begin(void* stream) const { check(vpmm_graph_pool_begin(get(), stream)); }
  void end(void* stream) const { check(vpmm_graph_pool_end(get(), stream)); }
  void finish(void* stream) const { check(vpmm_graph_pool_finish(get(), stream)); }

  vpmm_graph_pool* get() const noexcept { return handle_.get(); }

 private:
  std::shared_ptr<vpmm_graph_pool> handle_;
};

/// Memory of another process's pool.
class imported {
 public:
  imported(const driver& of, std::uint32_t device, int socket, vpmm_access access) {
    vpmm_import* handle = nullptr;
    check(vpmm_import_receive(of.get(), device, socket, access, &handle));
    handle_.reset(handle, vpmm_import_release);
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

/// In the shape of RMM's device resources: streams with each call, sizes given back, no exception out
/// of a free.
class device_memory_resource {
 public:
  explicit device_memory_resource(pool of) noexcept : pool_(std::move(of)) {}

  void* allocate(void* stream, std::size_t bytes, std::size_t alignment = 256) const {
    if (alignment > 256 || (alignment & (alignment - 1)) != 0) {
      throw error(VPMM_INVALID_ARGUMENT, "alignments are powers of two, of at most 256 bytes");
    }
    return pool_.malloc(bytes, stream);
  }
  void deallocate(void* stream, void* pointer, std::size_t /*bytes*/,
                  std::size_t /*alignment*/ = 256) const noexcept {
    // Nobody to tell; the text stays in vpmm_last_error.
    static_cast<void>(vpmm_free(pool_.get(), pointer, stream));
  }
  bool operator==(const device_memory_resource& other) const noexcept {
    return pool_ == other.pool_;
  }
  bool operator!=(const device_memory_resource& other) const noexcept { return !(*this == other); }

 private:
  pool pool_;
};

/// Any resource, by its text or on another one: "statistics(limiting(1GiB,arena))". Copies share it; it
/// ends with the last of them, and of what stands on it. The shape is device_memory_resource's.
class resource {
 public:
  resource(const driver& of, const std::string& text, std::uint32_t device = 0)
      : resource(of, device, text, nullptr) {}
  /// What a text says, standing on another resource: "limiting(1GiB)".
  resource(const std::string& text, const resource& upstream)
      : resource(upstream.driver_, upstream.device_, text, upstream.get()) {}
  resource(const driver& of, const pool& from, std::uint32_t device = 0) : driver_(of), device_(device) {
    vpmm_resource* handle = nullptr;
    check(vpmm_resource_of_pool(from.get(), &handle));
    handle_.reset(handle, vpmm_resource_release);
  }

  void* allocate(void* stream, std::size_t bytes, std::size_t alignment = 0) const {
    void* pointer = nullptr;
    check(vpmm_resource_allocate(get(), bytes, alignment, stream, &pointer));
    return pointer;
  }
  void deallocate(void* stream, void* pointer, std::size_t bytes,
                  std::size_t alignment = 0) const noexcept {
    // Nobody to tell; the text stays in vpmm_last_error.
    static_cast<void>(vpmm_resource_deallocate(get(), pointer, bytes, alignment, stream));
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
  void make_current() const { check(vpmm_resource_set_current(driver_.get(), device_, get())); }

  vpmm_resource* get() const noexcept { return handle_.get(); }
  /// Whether each may deallocate what the other has allocated.
  bool operator==(const resource& other) const noexcept {
    std::uint32_t equal = 0;
    return vpmm_resource_is_equal(get(), other.get(), &equal) == VPMM_OK && equal != 0;
  }
  bool operator!=(const resource& other) const noexcept { return !(*this == other); }

 private:
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

/// A pool and a stream as a std::pmr::memory_resource. The addresses are a device's: for containers
/// that only keep them.
class pmr_resource : public std::pmr::memory_resource {
 public:
  pmr_resource(pool of, void* stream) noexcept : pool_(std::move(of)), stream_(stream) {}

 private:
  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    return device_memory_resource(pool_).allocate(stream_, bytes, alignment);
  }
  void do_deallocate(void* pointer, std::size_t bytes, std::size_t alignment) override {
    device_memory_resource(pool_).deallocate(stream_, pointer, bytes, alignment);
  }
  bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
    const auto* same = dynamic_cast<const pmr_resource*>(&other);
    return same != nullptr && same->pool_ == pool_ && same->stream_ == stream_;
  }

  pool pool_;
  void* stream_;
};

}  // namespace vpmm

#endif  // VPMM_HPP
