// A library in the place of PyTorch's libc10.so.

#include "c10.hpp"

namespace c10 {

static std::shared_ptr<int> counted = std::make_shared<int>(0);

Error::Error(SourceLocation location, std::string text)
    : text_(std::move(text)), counted_(counted), location_(location) {}

int alive() { return static_cast<int>(counted.use_count()) - 1; }

// So that the type's description is here, as it is in PyTorch's libraries.
SHOWN void refuse() { throw OutOfMemoryError({"refuse", __FILE__, __LINE__}, "refused"); }

}  // namespace c10
