// Measures PyTorch's CUDA allocator through c10, without Python: the cases of `vpmm bench`, replays
// of traces, and the smallest limit at which a trace completes; one JSON object per line. Built and
// run by run-torch.py. The configuration is PYTORCH_CUDA_ALLOC_CONF, which c10 reads when it is
// loaded; the name that is printed is the environment variable PEER_NAME.
#include "harness/cases.hpp"
#include "harness/options.hpp"
#include "harness/replay.hpp"
#include "harness/search.hpp"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>

// The allocator asks whether a device has a context before it looks at it. libtorch_cuda answers;
// this program links libc10_cuda alone, which loads faster, and answers itself: main makes one.
namespace c10::cuda::_internal {
C10_CUDA_API void setHasPrimaryContext(bool (*answer)(DeviceIndex));
}

namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

class Allocator {
  public:
    // There is one allocator in a process. Emptied, it is as good as new.
    Allocator() {
        peers::synchronize();
        caching::emptyCache();
        caching::resetPeakStats(0);
    }

    void *allocate(std::size_t bytes, cudaStream_t stream) {
        return caching::raw_alloc_with_stream(bytes, stream);
    }

    void free(void *pointer, std::size_t, cudaStream_t) { caching::raw_delete(pointer); }

    // PyTorch frees on the stream of the allocation, and is told of uses on others before.
    void free_elsewhere(void *pointer, std::size_t, cudaStream_t stream) {
        c10::DataPtr owner(pointer, pointer, caching::get()->raw_deleter(),
                           c10::Device(c10::DeviceType::CUDA, 0));
        caching::recordStream(owner, c10::cuda::getStreamFromExternal(stream, 0));
    }

    std::optional<std::uint64_t> peak_mapped_bytes() const {
        return caching::getDeviceStats(0).reserved_bytes[0].peak;
    }
};

auto make() { return std::make_unique<Allocator>(); }

// One pass at a limit; host nanoseconds, or nothing where memory ran out. Out of memory, PyTorch
// waits for the device, gives its caches back and tries again by itself.
std::optional<double> pass_within(std::uint64_t limit, std::size_t total, peers::Replay &program) {
    Allocator allocator;
    // As `vpmm fit` begins each attempt: what the one before gave back is not charged to this one.
    peers::settle();
    // The next fraction up: by the nearest one some limits come to a byte less than they are.
    const double fraction = static_cast<double>(limit) / static_cast<double>(total);
    caching::get()->setMemoryFraction(std::min(1.0, std::nextafter(fraction, 1.0)), 0);
    try {
        return program.pass(allocator);
    } catch (const c10::OutOfMemoryError &) {
        return std::nullopt;
    }
}

// The smallest limit at which the trace completes, to one granule of 2 MiB.
void fit(const std::string &name, const peers::Trace &trace) {
    constexpr std::uint64_t kGranule = 2 * peers::kMiB;
    peers::JsonLine line;
    line.text("trace", trace.name)
        .text("allocator", name)
        .text("device", peers::device_name())
        .whole("peak_live_bytes", trace.peak_live_bytes);
    try {
        caching::emptyCache(); // of the trace before: it is free, too
        std::size_t free = 0, unused = 0;
        peers::check(cudaMemGetInfo(&free, &unused), "cudaMemGetInfo");
        // The fraction is one of this figure, which is not always cudaMemGetInfo's total.
        cudaDeviceProp properties{};
        peers::check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
        const std::size_t total = properties.totalGlobalMem;
        peers::Replay program(trace);
        const std::uint64_t least = (trace.peak_live_bytes + kGranule - 1) / kGranule;
        auto found = peers::search(std::max<std::uint64_t>(least, 1), free / kGranule,
                                   [&](std::uint64_t granules) {
                                       return pass_within(granules * kGranule, total, program);
                                   });
        caching::get()->setMemoryFraction(1.0, 0);
        if (!found) throw std::runtime_error("does not complete with all of the free memory");
        const auto limit = found->granules * kGranule;
        line.whole("limit_bytes", limit)
            .number("ratio",
                    static_cast<double>(limit) / static_cast<double>(trace.peak_live_bytes))
            .number("ns_per_op", found->result / static_cast<double>(trace.events.size()))
            .null("driver_time_us");
    } catch (const std::exception &failure) {
        line.null("limit_bytes").null("ratio").null("ns_per_op").text(
            "error", peers::first_line(failure.what()));
    }
    line.print();
}

void run(const peers::Options &options, const std::string &name) {
    if (options.command == "bench") {
        peers::run_cases(name, make, make,
                         [&](const std::string &wanted) { return options.wants_case(wanted); });
        return;
    }
    for (const auto &path : options.traces) {
        auto trace = peers::TraceReader::read(path);
        if (options.command == "replay") {
            peers::replay(name, make, trace);
        } else if (caching::name() == "cudaMallocAsync") {
            // Its limit counts what was requested, not what is held: every trace "fits" in its peak.
            std::fprintf(stderr, "fit: this backend does not limit what it holds\n");
        } else {
            fit(name, trace);
        }
    }
}

} // namespace

int main(int argc, char **argv) {
    auto options = peers::Options::parse(argc, argv);
    const char *name = std::getenv("PEER_NAME");
    int status = 0;
    try {
        c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
        c10::cuda::set_device(0);
        peers::check(cudaFree(nullptr), "cudaFree");
        caching::init(c10::cuda::device_count());
        run(options, name ? name : "torch-" + caching::name());
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", peers::first_line(error.what()).c_str());
        status = 1;
    }
    // Static destructors of c10 run after the driver's: the process ends without them.
    std::fflush(nullptr);
    std::_Exit(status);
}
