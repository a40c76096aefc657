// Replays a trace on one thread, as `vpmm replay --repeat 3` does: every stream of the trace is a
// stream of its own, the clock runs over whole passes, and what the loop itself costs, measured on an
// allocator that does nothing, is taken off.
#pragma once

#include "cases.hpp"
#include "trace.hpp"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace peers {

class Replay {
  public:
    explicit Replay(const Trace &trace) : trace_(trace), slots_(trace.slots) {
        for (const Event &event : trace.events) (void)streams_[event.stream];
        // As often as `vpmm replay` does it: of a few times on a busy machine all may be slow.
        const auto rounds =
            std::clamp<std::size_t>(5'000'000 / std::max<std::size_t>(trace.events.size(), 1), 3, 1000);
        Nothing nothing;
        double least = std::numeric_limits<double>::infinity();
        for (std::size_t i = 0; i < rounds; ++i) least = std::min(least, whole_pass(nothing));
        loop_ns_ = least;
    }

    // One pass; host nanoseconds, the loop's taken off. What is still live at the end, or when the
    // allocator throws, is freed untimed.
    template <class Allocator> double pass(Allocator &allocator) {
        return std::max(0.0, whole_pass(allocator) - loop_ns_);
    }

  private:
    // Not inlined, so that the loop is the same around every allocator.
    template <class Allocator> __attribute__((noinline)) double whole_pass(Allocator &allocator) {
        auto start = Clock::now();
        try {
            for (const Event &event : trace_.events) {
                Slot &slot = slots_[event.slot];
                cudaStream_t stream = streams_[event.stream];
                if (event.allocates) {
                    slot = {allocator.allocate(event.bytes, stream), event.bytes, event.stream};
                } else {
                    void *pointer = slot.pointer;
                    slot.pointer = nullptr;
                    if (slot.stream == event.stream) {
                        allocator.free(pointer, event.bytes, stream);
                    } else {
                        allocator.free_elsewhere(pointer, event.bytes, stream);
                    }
                }
            }
        } catch (...) {
            free_all(allocator);
            throw;
        }
        double ns = nanoseconds(Clock::now() - start);
        free_all(allocator);
        return ns;
    }

    struct Slot {
        void *pointer = nullptr;
        std::uint64_t bytes = 0;
        std::uint32_t stream = 0;
    };

    template <class Allocator> void free_all(Allocator &allocator) {
        for (Slot &slot : slots_) {
            if (slot.pointer) allocator.free(slot.pointer, slot.bytes, streams_[slot.stream]);
            slot.pointer = nullptr;
        }
        synchronize();
    }

    const Trace &trace_;
    Streams streams_;
    std::vector<Slot> slots_;
    double loop_ns_ = 0;
};

template <class Make>
void replay(const std::string &allocator_name, Make make, const Trace &trace) {
    constexpr int kPasses = 3;
    std::vector<double> passes;
    std::optional<double> warm;
    std::optional<std::uint64_t> mapped;
    std::string error;
    try {
        auto allocator = make();
        Replay program(trace);
        settle();
        for (int pass = 0; pass < kPasses; ++pass) {
            double ns = program.pass(*allocator) / static_cast<double>(trace.events.size());
            passes.push_back(ns);
            if (pass > 0) warm = std::min(warm.value_or(ns), ns);
        }
        mapped = allocator->peak_mapped_bytes();
    } catch (const std::exception &failure) {
        error = first_line(failure.what());
    }
    JsonLine line;
    line.text("trace", trace.name)
        .text("allocator", allocator_name)
        .text("device", device_name())
        .whole("ops", trace.events.size())
        .number("ns_per_op", warm)
        .whole("peak_live_bytes", trace.peak_live_bytes)
        .whole("peak_mapped_bytes", mapped)
        .numbers("pass_ns_per_op", passes);
    if (!error.empty()) line.text("error", error);
    line.print();
}

} // namespace peers
