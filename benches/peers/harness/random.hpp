// SplitMix64: the same sequence in every program and on every machine. `vpmm bench` draws the same.
#pragma once

#include <cstdint>

namespace peers {

class Random {
  public:
    explicit Random(std::uint64_t seed) : state_(seed) {}

    std::uint64_t below(std::uint64_t bound) { return next() % bound; }

    // From least to most, both included.
    std::uint64_t between(std::uint64_t least, std::uint64_t most) {
        return least + below(most - least + 1);
    }

  private:
    std::uint64_t next() {
        state_ += 0x9e3779b97f4a7c15;
        std::uint64_t z = state_;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }

    std::uint64_t state_;
};

} // namespace peers
