// Runs the cases of `vpmm bench` on any allocator and prints what `vpmm bench --json` prints: the
// same calls and the same way to figures.
//
// An allocator is a type with
//     void *allocate(std::size_t bytes, cudaStream_t stream);
//     void free(void *pointer, std::size_t bytes, cudaStream_t stream);
//     void free_elsewhere(void *pointer, std::size_t bytes, cudaStream_t freed_on);
//     std::optional<std::uint64_t> peak_mapped_bytes();
// where `free` gets the stream of the allocation and `free_elsewhere` another one.
#pragma once

#include "cuda.hpp"
#include "json.hpp"
#include "loops.hpp"
#include "script.hpp"

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace peers {

struct Figures {
    std::size_t threads = 1;
    std::uint64_t calls = 0;
    double ns_per_op = 0, mops_per_s = 0;
    std::vector<double> samples; // sorted
    double sample_overhead_ns = 0;
    std::uint64_t peak_live_bytes = 0;
    std::optional<std::uint64_t> peak_mapped_bytes;

    // Nearest rank: the smallest sample that so many of 1000 do not exceed.
    std::optional<double> at(std::size_t per_mille) const {
        if (samples.empty()) return std::nullopt;
        std::size_t rank = std::max<std::size_t>((samples.size() * per_mille + 999) / 1000, 1);
        return std::max(0.0, samples[rank - 1] - sample_overhead_ns);
    }
};

// A round should not take longer than this, and all rounds together not longer than that.
constexpr double kRoundNs = 150e6, kRoundsNs = 600e6;
constexpr double kMostRounds = 50;
constexpr std::size_t kMostSamples = 1'000'000;
constexpr std::size_t kPools = 9;
// Peers may be much slower in a case than in pairs of its size: then the case is left out.
constexpr std::chrono::seconds kPatience{10};
// How often, and for how long, a body that settles late is done untimed. `vpmm bench` stops at the
// first that makes no driver call; the peers do not tell theirs, so they have all of it.
constexpr std::size_t kMostUntimed = 32;
constexpr std::chrono::seconds kLongestUntimed{2};

// Nanoseconds that a call roughly takes: the first thread's part of the case, made small and run
// twice on an allocator of its own.
template <class Make>
double trial(Make make, const Case &one, const std::vector<cudaStream_t> &streams) {
    const Lane lane = lanes_of(made_small(one), 512)[0];
    auto allocator = make();
    Hands hands(*allocator, streams, lane.slots);
    Blind blind;
    hands.patient_steps(lane.setup, kPatience);
    hands.run(lane, blind);
    auto start = Clock::now();
    hands.run(lane, blind);
    double ns = nanoseconds(Clock::now() - start);
    hands.let_go();
    return std::max(ns / static_cast<double>(lane.calls()), 1e-3);
}

// Has threads begin together: a barrier alone wakes them one after the other.
class Meeting {
  public:
    explicit Meeting(std::size_t threads)
        : threads_(threads), barrier_(static_cast<std::ptrdiff_t>(threads)) {}

    // Returns when every thread is here. `phase` counts the meetings from 1.
    void start(std::size_t phase) {
        barrier_.arrive_and_wait();
        arrivals_.fetch_add(1);
        for (unsigned turn = 1; arrivals_.load() < threads_ * phase; ++turn) {
            if (turn % 1024 == 0) std::this_thread::yield();
        }
    }

    void end() { barrier_.arrive_and_wait(); }

  private:
    std::size_t threads_;
    std::barrier<> barrier_;
    std::atomic<std::size_t> arrivals_{0};
};

// All lanes at once, each on a thread of its own: one pass to warm up, or more where the case settles
// late, rounds timed as a whole, and
// one with a clock at every call. The best round counts: what disturbs one makes it longer.
template <class Allocator>
Figures run_warm(Allocator &allocator, const std::vector<Lane> &lanes, double call_ns,
                 const std::vector<cudaStream_t> &streams) {
    const std::size_t count = lanes.size();
    const LoopCosts costs = LoopCosts::of(lanes[0], streams);
    std::uint64_t calls = 0;
    for (const Lane &lane : lanes) calls += lane.calls();
    const double round_ns =
        lanes[0].by_time ? kRoundNs : std::max(call_ns * static_cast<double>(calls), 1.0);
    const auto rounds =
        static_cast<std::size_t>(std::clamp(kRoundsNs / round_ns, 1.0, kMostRounds));

    struct Span {
        Clock::time_point begin, end;
        std::uint64_t calls = 0;
    };
    std::vector<std::vector<Span>> spans(count, std::vector<Span>(rounds));
    std::vector<std::vector<double>> samples(count);
    std::vector<std::exception_ptr> failures(count);
    std::atomic<bool> failed{false};
    std::atomic<std::size_t> over{0}; // rounds whose time is over
    Meeting meeting(count);

    // One thread's part of a round. Where any number of calls will do, all threads go on until the
    // round's time is over for the first of them: one that came late or was interrupted then has made
    // fewer calls, and keeps nobody waiting. Else the body is done once.
    auto run_round = [&](Hands<Allocator> &hands, const Lane &lane, const Lane &part,
                         std::size_t number) {
        Blind blind;
        Span span{Clock::now(), {}};
        if (lane.by_time) {
            // One that has failed comes to no more rounds.
            while (over.load(std::memory_order_relaxed) <= number && !failed) {
                hands.run(part, blind);
                span.calls += part.calls();
                if (nanoseconds(Clock::now() - span.begin) >= kRoundNs) over = number + 1;
            }
        } else {
            hands.run(lane, blind);
            span.calls = lane.calls();
        }
        span.end = Clock::now();
        return span;
    };

    auto work = [&](std::size_t index) {
        const Lane &lane = lanes[index];
        const Lane part = lane.part();
        Hands hands(allocator, streams, lane.slots);
        Blind blind;
        Samples mine(std::min<std::size_t>(kMostSamples / count, lane.calls()));
        // Every thread comes to every meeting, failed or not: the others would wait for ever.
        std::size_t phase = 0;
        auto together = [&](auto body) {
            meeting.start(++phase);
            if (!failed) {
                try {
                    body();
                } catch (...) {
                    failures[index] = std::current_exception();
                    failed = true;
                }
            }
            meeting.end();
        };
        together([&] {
            check(cudaSetDevice(0), "cudaSetDevice");
            hands.patient_steps(lane.setup, kPatience);
        });
        for (const Step &step : lane.together) {
            together([&] { hands.patient_steps({step}, kPatience); });
        }
        together([&] {
            auto start = Clock::now();
            if (lane.times == 1) {
                hands.patient_steps(lane.body, kPatience);
            } else {
                hands.run(lane, blind);
            }
            for (std::size_t done = 1; lane.settles && done < kMostUntimed &&
                                       Clock::now() - start <= kLongestUntimed;
                 ++done) {
                hands.run(lane, blind);
            }
        });
        for (std::size_t round = 0; round < rounds; ++round) {
            together([&] { spans[index][round] = run_round(hands, lane, part, round); });
        }
        together([&] {
            mine.start();
            hands.run(lane, mine);
        });
        samples[index] = mine.take();
        hands.let_go();
    };
    if (count == 1) {
        work(0);
    } else {
        std::vector<std::thread> threads;
        for (std::size_t i = 0; i < count; ++i) threads.emplace_back(work, i);
        for (auto &thread : threads) thread.join();
    }
    for (auto &failure : failures) {
        if (failure) std::rethrow_exception(failure);
    }
    synchronize();

    double wall = std::numeric_limits<double>::infinity(), busy = 0;
    calls = 0;
    for (std::size_t round = 0; round < rounds; ++round) {
        auto begin = spans[0][round].begin, end = spans[0][round].end;
        double sum = 0;
        std::uint64_t made = 0;
        for (auto &lane : spans) {
            begin = std::min(begin, lane[round].begin);
            end = std::max(end, lane[round].end);
            sum += nanoseconds(lane[round].end - lane[round].begin);
            made += lane[round].calls;
        }
        // The most calls in a time.
        const double took = std::max(nanoseconds(end - begin), 1.0);
        if (calls == 0 || static_cast<double>(made) * wall > static_cast<double>(calls) * took) {
            wall = took;
            busy = sum;
            calls = made;
        }
    }
    const auto threads = static_cast<double>(count);
    const double calls_of_lane = static_cast<double>(calls) / threads;
    const double loops = costs.call_ns * calls_of_lane;
    Figures figures;
    figures.threads = count;
    figures.calls = calls;
    figures.ns_per_op = std::max(busy / threads - loops, 0.0) / calls_of_lane;
    figures.mops_per_s = static_cast<double>(calls) / std::max(wall - loops, 1.0) * 1e3;
    for (auto &part : samples) {
        figures.samples.insert(figures.samples.end(), part.begin(), part.end());
    }
    std::sort(figures.samples.begin(), figures.samples.end());
    figures.sample_overhead_ns = costs.sample_ns;
    for (const Lane &lane : lanes) figures.peak_live_bytes += lane.peak_live_bytes();
    figures.peak_mapped_bytes = allocator.peak_mapped_bytes();
    return figures;
}

// What another allocator is asked for before the clock runs, as `vpmm bench` does it.
constexpr std::size_t kWakingBytes = std::size_t{2} << 20;

// Has the code of such an allocator and the driver's run, so that what is cold is the allocator alone.
template <class Make> void wake(Make make, cudaStream_t stream) {
    auto other = make();
    other->free(other->allocate(kWakingBytes, stream), kWakingBytes, stream);
    synchronize();
}

// Growth: each measurement on an allocator that holds nothing. The median counts.
template <class Make>
Figures run_cold(Make make, const Lane &lane, const std::vector<cudaStream_t> &streams) {
    Figures figures;
    figures.calls = lane.calls();
    figures.peak_live_bytes = lane.peak_live_bytes();
    std::vector<double> times;
    for (std::size_t pool = 0; pool < 2 * kPools; ++pool) {
        make(); // an allocator of which there is one in a process gives back here what it had
        settle();
        wake(make, streams.at(0));
        auto allocator = make();
        Hands hands(*allocator, streams, lane.slots);
        synchronize();
        if (pool < kPools) {
            Blind blind;
            auto start = Clock::now();
            hands.run(lane, blind);
            times.push_back(nanoseconds(Clock::now() - start) / static_cast<double>(lane.calls()));
        } else {
            Samples samples(lane.calls());
            samples.start();
            hands.run(lane, samples);
            auto one = samples.take();
            figures.samples.insert(figures.samples.end(), one.begin(), one.end());
        }
        hands.let_go();
        synchronize();
        figures.peak_mapped_bytes = allocator->peak_mapped_bytes();
    }
    std::sort(times.begin(), times.end());
    std::sort(figures.samples.begin(), figures.samples.end());
    figures.sample_overhead_ns = LoopCosts::of(lane, streams).sample_ns;
    figures.ns_per_op = times[(times.size() - 1) / 2];
    figures.mops_per_s = 1e3 / figures.ns_per_op;
    return figures;
}

inline void report(const std::string &name, const std::string &allocator, const Figures &figures) {
    JsonLine()
        .text("case", name)
        .text("allocator", allocator)
        .text("device", device_name())
        .whole("threads", figures.threads)
        .whole("ops", figures.calls)
        .number("ns_per_op", figures.ns_per_op)
        .number("p50_ns", figures.at(500))
        .number("p99_ns", figures.at(990))
        .number("p999_ns", figures.at(999))
        .number("max_ns", figures.at(1000))
        .number("mops_per_s", figures.mops_per_s)
        .whole("peak_live_bytes", figures.peak_live_bytes)
        .whole("peak_mapped_bytes", figures.peak_mapped_bytes)
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
// up; `make_empty` one that holds nothing yet, or a null pointer where the allocator cannot grow.
template <class Make, class MakeEmpty>
void run_cases(const std::string &allocator, Make make, MakeEmpty make_empty,
               const std::function<bool(const std::string &)> &wanted) {
    Streams streams;
    for (const Case &one : all_cases()) {
        if (!wanted(one.name)) continue;
        try {
            auto handles = streams.first(std::max<std::uint32_t>(16, one.streams));
            if (one.kind == Kind::kGrow) {
                if (!make_empty()) throw std::runtime_error("does not grow");
                report(one.name, allocator, run_cold(make_empty, lanes_of(one, 1)[0], handles));
                continue;
            }
            double call_ns = trial(make, one, handles);
            const std::uint32_t threads = one.kind == Kind::kThreads ? one.count : 1;
            const Calls calls = calls_of(one);
            auto affordable = static_cast<std::uint64_t>(kRoundNs / (call_ns * threads));
            auto lanes = lanes_of(one, std::clamp(affordable, calls.least, calls.full));
            auto subject = make();
            report(one.name, allocator, run_warm(*subject, lanes, call_ns, handles));
        } catch (const std::exception &error) {
            report_failure(one.name, allocator, error.what());
        }
    }
}

} // namespace peers
