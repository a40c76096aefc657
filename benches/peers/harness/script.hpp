// What each case asks of an allocator, written down before any clock runs: call for call what
// `vpmm bench` asks (vpmm-cli/src/bench/script.rs).
#pragma once

#include "random.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace peers {

constexpr std::uint64_t kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB;

// One call: an allocation into a slot, or, with no bytes, the free of what is there.
struct Step {
    std::uint64_t bytes;
    std::uint32_t slot;
    std::uint32_t stream;
};

using Steps = std::vector<Step>;

// What one thread does: `setup` once; the steps of `together` once, each when all threads have done
// the one before, so that all that will be live at one time has been so before the clock starts;
// then `body`, `times` over, as one round.
struct Lane {
    std::uint32_t slots = 0;
    Steps setup = {}, together = {}, body = {};
    std::uint64_t times = 1;
    bool settles = false; // streams take from each other at first, for longer than the body is
    bool by_time = false; // a round may be any number of bodies

    std::uint64_t calls() const { return body.size() * times; }

    // A short part of a body that may be done any number of times.
    Lane part() const {
        constexpr std::uint64_t kParts = 256;
        Lane lane = *this;
        lane.times = std::max<std::uint64_t>(times / kParts, 1);
        return lane;
    }

    std::uint64_t peak_live_bytes() const {
        std::vector<std::uint64_t> held(slots);
        std::uint64_t live = 0, peak = 0;
        for (const Steps *steps : {&setup, &body}) {
            for (const Step &step : *steps) {
                live += step.bytes - held[step.slot];
                held[step.slot] = step.bytes;
                peak = std::max(peak, live);
            }
        }
        return peak;
    }
};

enum class Kind { kPair, kRandom, kLive, kThreads, kCrossStream, kGrow };

struct Case {
    std::string name;
    Kind kind;
    std::uint64_t least_bytes, most_bytes;
    std::uint32_t count;        // live allocations, threads or requests
    bool shared_stream = false; // all threads on one
    std::uint32_t streams = 1;  // of live allocations
};

inline std::vector<Case> all_cases() {
    auto pair = [](const char *name, std::uint64_t bytes) {
        return Case{name, Kind::kPair, bytes, bytes, 1};
    };
    auto live = [](const char *name, std::uint32_t count) {
        return Case{name, Kind::kLive, 512, 4 * kKiB, count};
    };
    std::vector<Case> cases{
        pair("pair_512", 512),
        pair("pair_64KiB", 64 * kKiB),
        pair("pair_1MiB", kMiB),
        pair("pair_4MiB", 4 * kMiB),
        pair("pair_64MiB", 64 * kMiB),
        {"random_4MiB", Kind::kRandom, 1, 4 * kMiB, 2500},
        {"random_64MiB", Kind::kRandom, 2 * kMiB, 64 * kMiB, 100},
        live("live_100", 100),
        live("live_10k", 10'000),
        live("live_100k", 100'000),
        live("live_1M", 1'000'000),
        {"streams_1000", Kind::kLive, 512, 4 * kKiB, 10'000, false, 1000},
    };
    for (std::uint32_t threads : {1, 2, 4, 8, 16}) {
        cases.push_back({"threads_" + std::to_string(threads), Kind::kThreads, kMiB, kMiB, threads});
    }
    cases.push_back({"shared_stream_8", Kind::kThreads, kMiB, kMiB, 8, true});
    cases.push_back({"cross_stream", Kind::kCrossStream, 4 * kMiB, 4 * kMiB, 8});
    cases.push_back({"grow_1GiB", Kind::kGrow, kGiB, kGiB, 1});
    cases.push_back({"grow_512x2MiB", Kind::kGrow, 2 * kMiB, 2 * kMiB, 512});
    return cases;
}

// The case made small: enough to find out how fast an allocator roughly is.
inline Case made_small(Case one) {
    if (one.kind == Kind::kRandom || one.kind == Kind::kLive) {
        one.count = std::max<std::uint32_t>(one.count / 100, one.streams);
    }
    return one;
}

// Calls of a round: what steady figures need, and the least that is still the case.
struct Calls {
    std::uint64_t full, least;
};

inline Calls calls_of(const Case &one) {
    switch (one.kind) {
    case Kind::kPair:
    case Kind::kThreads:
        return {2'000'000, 400};
    case Kind::kRandom:
        return {200'000, 4 * std::uint64_t{one.count}};
    case Kind::kLive:
        return {400'000, std::max<std::uint64_t>(400, 2 * one.streams)};
    case Kind::kCrossStream:
        return {1'000'000, 256};
    case Kind::kGrow:
        break;
    }
    return {1, 1};
}

inline Lane pairs(std::uint64_t bytes, std::uint32_t stream, std::uint64_t calls) {
    const Steps pair{{bytes, 0, stream}, {0, 0, stream}};
    return {1, {}, pair, pair, std::max<std::uint64_t>(calls / 2, 1), false, true};
}

// From nothing to nothing: three allocations for each free until all that may be live are, then
// around that many, in the end frees only. What is freed is random.
inline Lane random_lane(const Case &one, std::uint64_t calls) {
    Random random(1);
    Lane lane{.slots = one.count};
    std::vector<std::uint32_t> held, vacant;
    for (std::uint32_t slot = one.count; slot > 0; --slot) vacant.push_back(slot - 1);
    auto free_one = [&] {
        std::size_t at = random.below(held.size());
        std::uint32_t slot = held[at];
        held[at] = held.back();
        held.pop_back();
        vacant.push_back(slot);
        lane.body.push_back({0, slot, 0});
    };
    while (lane.body.size() + held.size() < calls) {
        bool frees = !held.empty() && random.below(4) == 0;
        if (frees || vacant.empty()) {
            free_one();
        } else {
            std::uint32_t slot = vacant.back();
            vacant.pop_back();
            lane.body.push_back({random.between(one.least_bytes, one.most_bytes), slot, 0});
            held.push_back(slot);
        }
    }
    while (!held.empty()) free_one();
    return lane;
}

// Small live allocations, as many on each stream, of which random ones are freed and allocated anew:
// one stream's after the other's.
inline Lane live_lane(const Case &one, std::uint64_t calls) {
    Random random(2);
    Lane lane{.slots = one.count, .settles = one.streams > 1};
    for (std::uint32_t slot = 0; slot < one.count; ++slot) {
        lane.setup.push_back(
            {random.between(one.least_bytes, one.most_bytes), slot, slot % one.streams});
    }
    for (std::uint64_t i = 0; i < std::max<std::uint64_t>(calls / 2, one.streams); ++i) {
        auto stream = static_cast<std::uint32_t>(i % one.streams);
        auto slot = one.streams * static_cast<std::uint32_t>(random.below(one.count / one.streams)) +
                    stream;
        lane.body.push_back({0, slot, stream});
        lane.body.push_back({random.between(one.least_bytes, one.most_bytes), slot, stream});
    }
    return lane;
}

// A ring of live blocks. For 64 of them all are allocated on stream 0 and freed on stream 1, then
// the other way round: so nearly every allocation needs memory that the other stream has freed.
inline Lane cross_stream_lane(const Case &one, std::uint64_t calls) {
    constexpr std::uint32_t kPhase = 64;
    Lane lane{.slots = one.count};
    for (std::uint32_t slot = 0; slot < one.count; ++slot) {
        lane.setup.push_back({one.most_bytes, slot, 1});
    }
    std::vector<std::uint32_t> allocated_on(one.count, 1);
    for (std::uint32_t stream : {0, 1}) {
        for (std::uint32_t i = 0; i < kPhase; ++i) {
            std::uint32_t slot = i % one.count;
            lane.body.push_back({0, slot, 1 - allocated_on[slot]});
            lane.body.push_back({one.most_bytes, slot, stream});
            allocated_on[slot] = stream;
        }
    }
    lane.times = std::max<std::uint64_t>(calls / lane.body.size(), 1);
    return lane;
}

// One lane a thread.
inline std::vector<Lane> lanes_of(const Case &one, std::uint64_t calls) {
    std::vector<Lane> lanes;
    switch (one.kind) {
    case Kind::kPair:
        lanes.push_back(pairs(one.most_bytes, 0, calls));
        break;
    case Kind::kRandom:
        lanes.push_back(random_lane(one, calls));
        break;
    case Kind::kLive:
        lanes.push_back(live_lane(one, calls));
        break;
    case Kind::kThreads:
        for (std::uint32_t thread = 0; thread < one.count; ++thread) {
            lanes.push_back(pairs(one.most_bytes, one.shared_stream ? 0 : thread, calls));
        }
        break;
    case Kind::kCrossStream:
        lanes.push_back(cross_stream_lane(one, calls));
        break;
    case Kind::kGrow: {
        Lane lane{.slots = one.count};
        for (std::uint32_t slot = 0; slot < one.count; ++slot) {
            lane.body.push_back({one.most_bytes, slot, 0});
        }
        lanes.push_back(lane);
        break;
    }
    }
    return lanes;
}

} // namespace peers
