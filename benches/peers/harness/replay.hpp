// Replays a trace on one thread, as `vpmm replay --repeat 3` does: every stream of the trace is a
// stream of its own, and the clock runs over whole passes.
#pragma once

#include "cases.hpp"
#include "trace.hpp"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

namespace peers {

class Replay {
  public:
    explicit Replay(const Trace &trace) : trace_(trace), slots_(trace.slots) {
        for (const Event &event : trace.events) (void)streams_[event.stream];
    }

    // One pass; host nanoseconds. What is still live at the end, or when the allocator throws, is
    // freed untimed.
    template <class Allocator> double pass(Allocator &allocator) {
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

  private:
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
