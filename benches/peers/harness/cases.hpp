// The cases of `vpmm bench`, on any allocator. docs/benchmarks.md says what each one does.
//
// An allocator is a type with
//     void *allocate(std::size_t bytes, cudaStream_t stream);
//     void free(void *pointer, std::size_t bytes, cudaStream_t stream);
//     void free_elsewhere(void *pointer, std::size_t bytes, cudaStream_t freed_on);
//     std::optional<std::uint64_t> peak_mapped_bytes();
// where `free` gets the stream of the allocation and `free_elsewhere` another one. A new one holds
// no memory, or what it takes at the start. Its destructor may be called with memory live.
#pragma once

#include "cuda.hpp"
#include "json.hpp"
#include "measure.hpp"
#include "random.hpp"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace peers {

constexpr std::size_t kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB;

// ns_per_op is the fastest of these rounds: the others were disturbed.
constexpr int kRounds = 3;
constexpr std::chrono::milliseconds kRoundTime{150};
constexpr std::chrono::milliseconds kFillTime{5000};
// The clock of a round is looked at once in so many steps.
constexpr std::size_t kStepsPerLook = 64;
// Single operations are timed this often at most.
constexpr std::size_t kTimedSteps = 200'000;

// Runs `step` (two operations each) for some rounds untimed, then timed one by one.
template <class Step> Measured measure_steps(Step step) {
    Measured result;
    Untimed untimed;
    for (std::size_t i = 0; i < 1000; ++i) step(untimed);
    synchronize();
    result.ns_per_op = std::numeric_limits<double>::infinity();
    for (int round = 0; round < kRounds; ++round) {
        std::uint64_t steps = 0;
        Deadline deadline(kRoundTime);
        auto start = Clock::now();
        do {
            for (std::size_t i = 0; i < kStepsPerLook; ++i) step(untimed);
            steps += kStepsPerLook;
        } while (!deadline.passed());
        double ns = nanoseconds(Clock::now() - start);
        synchronize();
        result.operations += 2 * steps;
        result.ns_per_op = std::min(result.ns_per_op, ns / static_cast<double>(2 * steps));
    }
    result.mops_per_s = 1e3 / result.ns_per_op;
    result.latencies = Latencies(2 * kTimedSteps);
    Deadline deadline(4 * kRoundTime);
    while (result.latencies.count() < 2 * kTimedSteps && !deadline.passed()) {
        step(result.latencies);
    }
    synchronize();
    return result;
}

template <class Allocator>
Measured pair(Allocator &allocator, Streams &streams, std::size_t bytes) {
    cudaStream_t stream = streams[0];
    auto result = measure_steps([&](auto &timer) {
        void *pointer = timer.time([&] { return allocator.allocate(bytes, stream); });
        timer.time([&] { allocator.free(pointer, bytes, stream); });
    });
    result.peak_live_bytes = bytes;
    return result;
}

struct Block {
    void *pointer;
    std::size_t bytes;
};

// `count` live allocations of random sizes; a step frees a random one and allocates another.
template <class Allocator>
Measured churn(Allocator &allocator, Streams &streams, std::size_t count, std::size_t least,
               std::size_t most) {
    cudaStream_t stream = streams[0];
    Random random(7);
    std::uint64_t live_bytes = 0, peak = 0;
    std::vector<Block> live;
    live.reserve(count);
    Deadline deadline(kFillTime);
    for (std::size_t i = 0; i < count; ++i) {
        std::size_t bytes = random.between(least, most);
        live.push_back({allocator.allocate(bytes, stream), bytes});
        live_bytes += bytes;
        if (i % kStepsPerLook == 0 && deadline.passed()) {
            throw TooSlow("making " + std::to_string(count) + " allocations took too long: " +
                          std::to_string(i) + " in 5 s");
        }
    }
    peak = live_bytes;
    auto result = measure_steps([&](auto &timer) {
        Block &block = live[random.between(0, count - 1)];
        timer.time([&] { allocator.free(block.pointer, block.bytes, stream); });
        live_bytes -= block.bytes;
        block.bytes = random.between(least, most);
        block.pointer = timer.time([&] { return allocator.allocate(block.bytes, stream); });
        live_bytes += block.bytes;
        peak = std::max(peak, live_bytes);
    });
    result.peak_live_bytes = peak;
    for (Block &block : live) {
        allocator.free(block.pointer, block.bytes, stream);
    }
    return result;
}

// Some threads, each with pairs of 1 MiB, until they are told to stop.
template <class Allocator>
Measured threads(Allocator &allocator, Streams &streams, std::size_t count, bool one_stream) {
    constexpr std::size_t kBytes = kMiB;
    enum class Phase { kWait, kUntimed, kTimed };
    Measured result;
    result.threads = count;
    result.peak_live_bytes = count * kBytes;
    result.ns_per_op = std::numeric_limits<double>::infinity();
    for (std::size_t i = 0; i < count; ++i) (void)streams[i];
    for (int round = 0; round <= kRounds; ++round) {
        const bool timed = round == kRounds;
        std::atomic<std::size_t> ready{0};
        std::atomic<bool> go{false}, stop{false};
        std::vector<std::uint64_t> steps(count, 0);
        std::vector<Latencies> latencies(count);
        std::vector<std::exception_ptr> failures(count);
        std::vector<std::thread> workers;
        for (std::size_t t = 0; t < count; ++t) {
            workers.emplace_back([&, t] {
                std::uint64_t done = 0;
                Untimed untimed;
                Latencies mine(timed ? 2 * kTimedSteps / count : 0);
                bool is_ready = false;
                try {
                    check(cudaSetDevice(0), "cudaSetDevice");
                    cudaStream_t stream = streams[one_stream ? 0 : t];
                    auto step = [&](auto &timer) {
                        void *pointer =
                            timer.time([&] { return allocator.allocate(kBytes, stream); });
                        timer.time([&] { allocator.free(pointer, kBytes, stream); });
                    };
                    for (int i = 0; i < 100; ++i) step(untimed);
                    is_ready = true;
                    ready.fetch_add(1);
                    while (!go.load(std::memory_order_acquire)) std::this_thread::yield();
                    while (!stop.load(std::memory_order_relaxed)) {
                        if (timed) {
                            if (mine.count() >= 2 * kTimedSteps / count) break;
                            step(mine);
                        } else {
                            for (std::size_t i = 0; i < kStepsPerLook; ++i) step(untimed);
                            done += kStepsPerLook;
                        }
                    }
                } catch (...) {
                    failures[t] = std::current_exception();
                    if (!is_ready) ready.fetch_add(1);
                }
                steps[t] = done;
                latencies[t] = std::move(mine);
            });
        }
        while (ready.load() < count) std::this_thread::yield();
        auto start = Clock::now();
        go.store(true, std::memory_order_release);
        std::this_thread::sleep_for(timed ? 4 * kRoundTime : kRoundTime);
        stop.store(true);
        for (auto &worker : workers) worker.join();
        double ns = nanoseconds(Clock::now() - start);
        synchronize();
        for (auto &failure : failures) {
            if (failure) std::rethrow_exception(failure);
        }
        if (timed) {
            for (auto &part : latencies) result.latencies.append(part);
            continue;
        }
        std::uint64_t operations = 0;
        for (auto done : steps) operations += 2 * done;
        result.operations += operations;
        result.ns_per_op = std::min(result.ns_per_op, ns / static_cast<double>(operations));
    }
    result.mops_per_s = 1e3 / result.ns_per_op;
    return result;
}

// Eight live allocations of 4 MiB in a ring. Laps alternate between two streams: a lap frees each
// allocation on this lap's stream, not on its own, and makes a new one on this lap's stream.
template <class Allocator> Measured cross_stream(Allocator &allocator, Streams &streams) {
    constexpr std::size_t kBytes = 4 * kMiB, kRing = 8;
    cudaStream_t stream[2] = {streams[0], streams[1]};
    void *ring[kRing];
    for (auto &pointer : ring) pointer = allocator.allocate(kBytes, stream[0]);
    std::size_t at = 0, lap = 1;
    auto result = measure_steps([&](auto &timer) {
        cudaStream_t here = stream[lap % 2];
        timer.time([&] { allocator.free_elsewhere(ring[at], kBytes, here); });
        ring[at] = timer.time([&] { return allocator.allocate(kBytes, here); });
        if (++at == kRing) {
            at = 0;
            ++lap;
        }
    });
    for (std::size_t i = 0; i < kRing; ++i) {
        allocator.free(ring[i], kBytes, stream[(i < at ? lap : lap - 1) % 2]);
    }
    result.peak_live_bytes = kRing * kBytes;
    return result;
}

// Memory from an allocator that has none yet. `make` gives a new one each time.
template <class Make>
Measured grow(Make make, Streams &streams, std::size_t count, std::size_t bytes,
              std::optional<std::uint64_t> &mapped) {
    constexpr int kRepeats = 5;
    cudaStream_t stream = streams[0];
    Measured result;
    result.ns_per_op = std::numeric_limits<double>::infinity();
    result.peak_live_bytes = count * bytes;
    // The first half runs untimed, the second timed one by one.
    for (int repeat = 0; repeat < 2 * kRepeats; ++repeat) {
        auto allocator = make();
        std::vector<void *> live(count, nullptr);
        // Some allocators do more on a stream's first call than later: not what is measured here.
        allocator->free(allocator->allocate(512, stream), 512, stream);
        synchronize();
        if (repeat < kRepeats) {
            auto start = Clock::now();
            for (auto &pointer : live) pointer = allocator->allocate(bytes, stream);
            double ns = nanoseconds(Clock::now() - start) / static_cast<double>(count);
            result.operations += count;
            result.ns_per_op = std::min(result.ns_per_op, ns);
        } else {
            for (auto &pointer : live) {
                pointer =
                    result.latencies.time([&] { return allocator->allocate(bytes, stream); });
            }
        }
        for (auto &pointer : live) allocator->free(pointer, bytes, stream);
        synchronize();
        mapped = allocator->peak_mapped_bytes();
    }
    result.mops_per_s = 1e3 / result.ns_per_op;
    return result;
}

inline void report(const std::string &name, const std::string &allocator, Measured &result,
                   std::optional<std::uint64_t> mapped) {
    JsonLine()
        .text("case", name)
        .text("allocator", allocator)
        .text("device", device_name())
        .whole("threads", result.threads)
        .whole("ops", result.operations)
        .number("ns_per_op", result.ns_per_op)
        .number("p50_ns", result.latencies.percentile(0.5))
        .number("p99_ns", result.latencies.percentile(0.99))
        .number("p999_ns", result.latencies.percentile(0.999))
        .number("max_ns", result.latencies.percentile(1.0))
        .number("mops_per_s", result.mops_per_s)
        .whole("peak_live_bytes", result.peak_live_bytes)
        .whole("peak_mapped_bytes", mapped)
        .null("driver_calls")
        .print();
}

// A case that could not be measured is a line too, so that a table shows the gap and its reason.
inline void report_failure(const std::string &name, const std::string &allocator,
                           const char *reason) {
    JsonLine()
        .text("case", name)
        .text("allocator", allocator)
        .text("device", device_name())
        .null("ns_per_op")
        .text("error", first_line(reason))
        .print();
}

// Runs every case whose name `wanted` accepts. `make` gives an allocator as a careful user sets it
// up; `make_empty` one that holds nothing yet, or none at all where the allocator cannot grow.
template <class Make, class MakeEmpty>
void run_cases(const std::string &allocator_name, Make make, MakeEmpty make_empty,
               const std::function<bool(const std::string &)> &wanted) {
    Streams streams;
    auto guarded = [&](const std::string &name, auto body) {
        if (!wanted(name)) return;
        try {
            body();
        } catch (const std::exception &error) {
            report_failure(name, allocator_name, error.what());
        }
    };
    auto run = [&](const std::string &name, auto body) {
        guarded(name, [&] {
            auto allocator = make();
            Measured result = body(*allocator);
            report(name, allocator_name, result, allocator->peak_mapped_bytes());
        });
    };
    auto growing = [&](const std::string &name, std::size_t count, std::size_t bytes) {
        guarded(name, [&] {
            if (!make_empty()) throw std::runtime_error("does not grow");
            std::optional<std::uint64_t> mapped;
            Measured result = grow(make_empty, streams, count, bytes, mapped);
            report(name, allocator_name, result, mapped);
        });
    };

    run("pair_512", [&](auto &a) { return pair(a, streams, 512); });
    run("pair_64KiB", [&](auto &a) { return pair(a, streams, 64 * kKiB); });
    run("pair_1MiB", [&](auto &a) { return pair(a, streams, kMiB); });
    run("pair_4MiB", [&](auto &a) { return pair(a, streams, 4 * kMiB); });
    run("pair_64MiB", [&](auto &a) { return pair(a, streams, 64 * kMiB); });
    run("random_4MiB", [&](auto &a) { return churn(a, streams, 2500, 1, 4 * kMiB); });
    run("random_64MiB", [&](auto &a) { return churn(a, streams, 100, 2 * kMiB, 64 * kMiB); });
    run("live_10k", [&](auto &a) { return churn(a, streams, 10'000, 512, 4 * kKiB); });
    run("live_100k", [&](auto &a) { return churn(a, streams, 100'000, 512, 4 * kKiB); });
    run("live_1M", [&](auto &a) { return churn(a, streams, 1'000'000, 512, 4 * kKiB); });
    for (std::size_t count : {1, 2, 4, 8, 16}) {
        run("threads_" + std::to_string(count),
            [&](auto &a) { return threads(a, streams, count, false); });
    }
    run("shared_stream_8", [&](auto &a) { return threads(a, streams, 8, true); });
    run("cross_stream", [&](auto &a) { return cross_stream(a, streams); });
    growing("grow_1GiB", 1, kGiB);
    growing("grow_512x2MiB", 512, 2 * kMiB);
}

} // namespace peers
