// The loops that are timed, and what they cost themselves: as in vpmm-cli/src/bench/loops.rs.
#pragma once

#include "cuda.hpp"
#include "script.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace peers {

using Clock = std::chrono::steady_clock;

inline double nanoseconds(Clock::duration time) {
    return std::chrono::duration<double, std::nano>(time).count();
}

// What was asked for would take longer than anybody waits.
struct TooSlow : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Does nothing: to find out what a loop costs. By calls that stay calls, as those of `vpmm bench` do:
// what is taken off holds an empty call's cost, for the peers as for ours.
struct Nothing {
    __attribute__((noinline)) void *allocate(std::size_t, cudaStream_t) {
        asm volatile("");
        return this;
    }
    __attribute__((noinline)) void free(void *, std::size_t, cudaStream_t) { asm volatile(""); }
    __attribute__((noinline)) void free_elsewhere(void *, std::size_t, cudaStream_t) {
        asm volatile("");
    }
};

// What happens after every call of the allocator.
struct Blind {
    void called() {}
};

// The time of every call, from the end of the one before it.
class Samples {
  public:
    // Written, since the first touch of a page would be part of some call's time.
    explicit Samples(std::size_t most) : nanoseconds_(most, -1.0) {}

    void start() { last_ = Clock::now(); }

    void called() {
        auto now = Clock::now();
        if (noted_ < nanoseconds_.size()) nanoseconds_[noted_++] = nanoseconds(now - last_);
        last_ = now;
    }

    std::vector<double> take() {
        nanoseconds_.resize(noted_);
        return std::move(nanoseconds_);
    }

  private:
    std::vector<double> nanoseconds_;
    std::size_t noted_ = 0;
    Clock::time_point last_{};
};

// The memory of one lane.
template <class Allocator> class Hands {
  public:
    Hands(Allocator &allocator, const std::vector<cudaStream_t> &streams, std::uint32_t slots)
        : allocator_(allocator), streams_(streams), held_(slots) {}

    Hands(const Hands &) = delete;

    template <class Observer> void run(const Lane &lane, Observer &observer) {
        for (std::uint64_t i = 0; i < lane.times; ++i) steps(lane.body, observer);
    }

    template <class Observer>
    __attribute__((noinline)) void steps(const Steps &steps, Observer &observer) {
        const Step *step = steps.data();
        for (std::size_t i = 0, count = steps.size(); i < count; ++i, ++step) {
            // A program has the pointers that it frees at hand.
            if (i + kAhead < count) __builtin_prefetch(&held_[step[kAhead].slot]);
            call(*step);
            observer.called();
        }
    }

    // Steps that may take too long to wait for.
    void patient_steps(const Steps &steps, std::chrono::seconds patience) {
        auto end = Clock::now() + patience;
        for (std::size_t i = 0; i < steps.size(); ++i) {
            call(steps[i]);
            if (i % 256 == 0 && Clock::now() > end) {
                throw TooSlow("left out: " + std::to_string(i) + " of " +
                              std::to_string(steps.size()) + " calls before it took " +
                              std::to_string(patience.count()) + " s");
            }
        }
    }

    void let_go() {
        for (Held &held : held_) {
            if (held.pointer) allocator_.free(held.pointer, held.bytes, streams_[held.stream]);
            held.pointer = nullptr;
        }
    }

  private:
    struct Held {
        void *pointer = nullptr;
        std::uint64_t bytes = 0;
        std::uint32_t stream = 0;
    };

    static constexpr std::size_t kAhead = 16;

    void call(const Step &step) {
        Held &held = held_[step.slot];
        cudaStream_t stream = streams_[step.stream];
        if (step.bytes > 0) {
            held = {allocator_.allocate(step.bytes, stream), step.bytes, step.stream};
        } else {
            void *pointer = held.pointer;
            held.pointer = nullptr;
            if (held.stream == step.stream) {
                allocator_.free(pointer, held.bytes, stream);
            } else {
                allocator_.free_elsewhere(pointer, held.bytes, stream);
            }
        }
    }

    Allocator &allocator_;
    const std::vector<cudaStream_t> &streams_;
    std::vector<Held> held_;
};

// What the loop around a lane's calls costs, in nanoseconds per call.
struct LoopCosts {
    double call_ns = 0;   // without a clock
    double sample_ns = 0; // with one

    static LoopCosts of(const Lane &lane, const std::vector<cudaStream_t> &streams) {
        constexpr int kRounds = 3;
        constexpr std::uint64_t kMostSamples = 100'000;
        Nothing nothing;
        Hands<Nothing> hands(nothing, streams, lane.slots);
        Blind blind;
        LoopCosts costs{std::numeric_limits<double>::infinity(), 0};
        for (int i = 0; i < kRounds; ++i) {
            auto start = Clock::now();
            hands.run(lane, blind);
            double ns = nanoseconds(Clock::now() - start);
            costs.call_ns = std::min(costs.call_ns, ns / static_cast<double>(lane.calls()));
        }
        Samples samples(std::min(kMostSamples, lane.calls()));
        samples.start();
        hands.run(lane, samples);
        auto times = samples.take();
        std::sort(times.begin(), times.end());
        costs.sample_ns = times[times.size() / 2];
        return costs;
    }
};

} // namespace peers
