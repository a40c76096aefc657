// Xorshift with 64 bits: the same sequence in every program and on every machine.
#pragma once

#include <cstdint>

namespace peers {

class Random {
  public:
    explicit Random(std::uint64_t seed) : state_(seed) {}

    std::uint64_t next() {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return state_;
    }

    // Uniform in [low, high].
    std::uint64_t between(std::uint64_t low, std::uint64_t high) {
        return low + next() % (high - low + 1);
    }

  private:
    std::uint64_t state_;
};

} // namespace peers
