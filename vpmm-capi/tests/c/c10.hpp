// The two classes of PyTorch's c10 that a plug-in's exceptions are, as far as they matter to who throws
// and who catches: names, bases, and the constructor's arguments.

#ifndef C10_HPP
#define C10_HPP

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#define SHOWN __attribute__((visibility("default")))

namespace c10 {

struct SourceLocation {
  const char* function;
  const char* file;
  std::uint32_t line;
};

class SHOWN Error : public std::exception {
 public:
  Error(SourceLocation location, std::string text);
  const char* what() const noexcept override { return text_.c_str(); }
  const SourceLocation& location() const { return location_; }

 private:
  std::string text_;
  std::vector<std::string> context_;
  std::shared_ptr<int> counted_;
  SourceLocation location_;
};

class SHOWN OutOfMemoryError : public Error {
  using Error::Error;
};

/// Errors that live.
SHOWN int alive();

}  // namespace c10

#endif  // C10_HPP
