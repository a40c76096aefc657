// What it costs to fill a window of addresses with memory that lies scattered in handles of 2 MiB: by moving them
// there, and by making memory anew and returning as much; alone and beside kernels that never stop. Then how much
// longer a kernel takes in what was filled so than in memory in the order in which it was made.
//
//     nvcc -O3 -std=c++17 -arch=native -o exchange benches/order/exchange.cu -lcuda && ./exchange

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

static void check(int result, const char* what) {
    if (result == 0) return;
    std::fprintf(stderr, "%s says %d\n", what, result);
    std::exit(1);
}
#define CHECK(call) check(static_cast<int>(call), #call)

static const size_t MiB = 1 << 20, HANDLE = 2 * MiB;
static const int HANDLES = 3072, WINDOWS = 60;

static CUmemAllocationProp kind;
static CUmemAccessDesc access_of_all;
static std::mt19937 chance(1);

__global__ void add(const float4* a, const float4* b, float4* c, size_t length) {
    size_t at = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (at >= length) return;
    float4 x = a[at], y = b[at];
    c[at] = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

/// Microseconds that one kind of step took, once per window.
struct Times {
    std::vector<double> all;
    template <class Step>
    void take(Step step) {
        auto begin = std::chrono::steady_clock::now();
        step();
        all.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
    }
    std::string text() {
        if (all.empty()) return "-";
        std::sort(all.begin(), all.end());
        char line[64];
        std::snprintf(line, sizeof line, "%.0f (%.0f)", all[all.size() / 2], all.back());
        return line;
    }
};

/// Memory mapped one handle after another from an address.
struct Mapped {
    CUdeviceptr at;
    std::vector<CUmemGenericAllocationHandle> handles;
    size_t each;

    void map() {
        for (size_t next = 0; next < handles.size(); ++next)
            CHECK(cuMemMap(at + next * each, each, 0, handles[next], 0));
        CHECK(cuMemSetAccess(at, handles.size() * each, &access_of_all, 1));
    }
    void make(int count, size_t bytes) {
        handles.resize(count);
        each = bytes;
        for (auto& handle : handles) CHECK(cuMemCreate(&handle, bytes, &kind, 0));
    }
};

static CUdeviceptr reserve(size_t bytes) {
    CUdeviceptr at;
    CHECK(cuMemAddressReserve(&at, bytes, bytes >= 1024 * MiB ? 1024 * MiB : HANDLE, 0, 0));
    return at;
}

/// Microseconds of the kernel over three arrays of 300 MiB in what is mapped there, the best of three.
static double speed(CUdeviceptr at) {
    const size_t length = 300 * MiB / sizeof(float4);
    float4* first = reinterpret_cast<float4*>(at);
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    float best = 1e9;
    for (int round = 0; round < 3; ++round) {
        CHECK(cudaEventRecord(begin));
        for (int repeat = 0; repeat < 100; ++repeat)
            add<<<(length + 255) / 256, 256>>>(first, first + length, first + 2 * length, length);
        CHECK(cudaEventRecord(end));
        CHECK(cudaEventSynchronize(end));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        best = std::min(best, ms);
    }
    return best / 100 * 1e3;
}

/// How a window is filled: with what, and whether what lay elsewhere goes before or after.
struct Way {
    const char* name;
    bool moves, one_handle, returns_first;
};
static const Way WAYS[] = {
    {"moved", true, false, false},
    {"one new handle, then returned", false, true, false},
    {"new handles of 2 MiB, then returned", false, false, false},
    {"returned, then one new handle", false, true, true},
    {"returned, then new handles of 2 MiB", false, false, true},
};

/// Fills WINDOWS windows of so many handles each and prints what that took. Alone, returns the kernel's time there.
static void windows_of(int count, const Way& way, bool measure) {
    Mapped area{reserve(HANDLES * HANDLE)};
    area.make(HANDLES, HANDLE);
    area.map();
    const double as_made = measure ? speed(area.at) : 0;
    std::vector<int> any(HANDLES);
    std::iota(any.begin(), any.end(), 0);
    std::shuffle(any.begin(), any.end(), chance);

    Times made, mapped, unmapped, released;
    const int windows = std::min(WINDOWS, HANDLES / count);
    std::vector<Mapped> filled(windows);
    for (int number = 0; number < windows; ++number) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        Mapped& window = filled[number];
        window.at = reserve(count * HANDLE);
        const int* from = any.data() + number * count;
        auto unmap = [&] {
            unmapped.take([&] {
                for (int next = 0; next < count; ++next) CHECK(cuMemUnmap(area.at + from[next] * HANDLE, HANDLE));
            });
        };
        auto release = [&] {
            released.take([&] {
                for (int next = 0; next < count; ++next) CHECK(cuMemRelease(area.handles[from[next]]));
            });
        };
        if (way.returns_first) unmap(), release();
        if (way.moves) {
            window.each = HANDLE;
            for (int next = 0; next < count; ++next) window.handles.push_back(area.handles[from[next]]);
        } else {
            made.take([&] { window.make(way.one_handle ? 1 : count, way.one_handle ? count * HANDLE : HANDLE); });
        }
        mapped.take([&] { window.map(); });
        if (!way.returns_first) unmap();
        if (!way.returns_first && !way.moves) release();
    }
    std::printf("  %-36s %14s %14s %14s %14s", way.name, made.text().c_str(), mapped.text().c_str(),
                unmapped.text().c_str(), released.text().c_str());

    Mapped all{reserve(windows * count * HANDLE), {}, filled[0].each};
    for (Mapped& window : filled) {
        CHECK(cuMemUnmap(window.at, count * HANDLE));
        CHECK(cuMemAddressFree(window.at, count * HANDLE));
        all.handles.insert(all.handles.end(), window.handles.begin(), window.handles.end());
    }
    if (measure && windows * count * HANDLE >= 900 * MiB) {
        all.map();
        std::printf(" %+13.2f %%", (speed(all.at) / as_made - 1) * 100);
        CHECK(cuMemUnmap(all.at, windows * count * HANDLE));
    }
    std::printf("\n");
    CHECK(cuMemAddressFree(all.at, windows * count * HANDLE));
    for (auto handle : all.handles) CHECK(cuMemRelease(handle));
    for (int next = windows * count; next < HANDLES; ++next) {
        CHECK(cuMemUnmap(area.at + any[next] * HANDLE, HANDLE));
        CHECK(cuMemRelease(area.handles[any[next]]));
    }
    CHECK(cuMemAddressFree(area.at, HANDLES * HANDLE));
}

/// Launches kernels without a pause until told to stop.
static void busy(CUcontext context, float4* memory, std::atomic<bool>& stop) {
    CHECK(cuCtxSetCurrent(context));
    cudaStream_t stream;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    const size_t length = 64 * MiB / sizeof(float4);
    while (!stop) {
        for (int repeat = 0; repeat < 100; ++repeat)
            add<<<(length + 255) / 256, 256, 0, stream>>>(memory, memory + length, memory + 2 * length, length);
        CHECK(cudaStreamSynchronize(stream));
    }
}

int main() {
    CHECK(cudaFree(nullptr));
    kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access_of_all.location = kind.location;
    access_of_all.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CUcontext context;
    CHECK(cuCtxGetCurrent(&context));
    float4* memory;
    CHECK(cudaMalloc(&memory, 192 * MiB));

    std::printf("microseconds a window: median (most)\n");
    for (bool beside : {false, true}) {
        std::atomic<bool> stop{false};
        std::thread worker;
        if (beside) worker = std::thread(busy, context, memory, std::ref(stop));
        for (int count : {5, 20, 64}) {
            std::printf("%d times 2 MiB, %-22s %14s %14s %14s %14s %15s\n", count,
                        beside ? "beside kernels" : "alone", "create", "map, access", "unmap", "release",
                        beside || count * WINDOWS * HANDLE < 900 * MiB ? "" : "kernel");
            for (const Way& way : WAYS) windows_of(count, way, !beside);
        }
        stop = true;
        if (beside) worker.join();
    }
}
