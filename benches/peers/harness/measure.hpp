// How a case is timed. Two runs: one whose loop reads the clock only every few hundred operations
// and gives ns_per_op, and one that reads it around every operation and gives the percentiles.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

namespace peers {

using Clock = std::chrono::steady_clock;

inline double nanoseconds(Clock::duration time) {
    return std::chrono::duration<double, std::nano>(time).count();
}

// What one reading of the clock takes; taken off every single time.
inline double clock_cost_ns() {
    static const double cost = [] {
        double least = 1e9;
        for (int i = 0; i < 1000; ++i) {
            auto before = Clock::now();
            least = std::min(least, nanoseconds(Clock::now() - before));
        }
        return least;
    }();
    return cost;
}

// Single operations' times.
class Latencies {
  public:
    explicit Latencies(std::size_t expected = 0) { ns_.reserve(expected); }

    template <class Operation> auto time(Operation operation) {
        auto before = Clock::now();
        if constexpr (std::is_void_v<decltype(operation())>) {
            operation();
            add(Clock::now() - before);
        } else {
            auto result = operation();
            add(Clock::now() - before);
            return result;
        }
    }

    void append(const Latencies &other) {
        ns_.insert(ns_.end(), other.ns_.begin(), other.ns_.end());
    }

    std::size_t count() const { return ns_.size(); }

    // The smallest time that at least this share of the operations did not exceed.
    std::optional<double> percentile(double share) {
        if (ns_.empty()) return std::nullopt;
        std::sort(ns_.begin(), ns_.end());
        auto rank = static_cast<std::size_t>(share * static_cast<double>(ns_.size()));
        return ns_[std::min(rank, ns_.size() - 1)];
    }

  private:
    void add(Clock::duration time) {
        ns_.push_back(std::max(0.0, nanoseconds(time) - clock_cost_ns()));
    }

    std::vector<double> ns_;
};

// An operation runs either as it is or timed; a case's body is written once for both.
struct Untimed {
    template <class Operation> auto time(Operation operation) { return operation(); }
};

struct Measured {
    std::size_t threads = 1;
    std::uint64_t operations = 0;
    double ns_per_op = 0;
    double mops_per_s = 0;
    std::uint64_t peak_live_bytes = 0;
    Latencies latencies;
};

// What was asked for could not be measured in a sensible time.
struct TooSlow : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Deadline {
  public:
    explicit Deadline(std::chrono::milliseconds time) : end_(Clock::now() + time) {}
    bool passed() const { return Clock::now() >= end_; }

  private:
    Clock::time_point end_;
};

} // namespace peers
