// What the order of physical memory costs a kernel: c = a + b over arrays in 6 GiB that consist of handles of
// 2 MiB, mapped in the order in which they were made and in others. Prints how much longer the kernel takes than
// in that order, on average over forty places.
//
//     nvcc -O3 -arch=native -o order benches/order/order.cu -lcuda && ./order

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

static void check(int result, const char* what) {
    if (result == 0) return;
    std::fprintf(stderr, "%s says %d\n", what, result);
    std::exit(1);
}
#define CHECK(call) check(static_cast<int>(call), #call)

static const size_t MiB = 1 << 20, HANDLE = 2 * MiB, BYTES = size_t(6) << 30;
static const int HANDLES = BYTES / HANDLE;

__global__ void add(const float4* a, const float4* b, float4* c, size_t length) {
    size_t at = blockIdx.x * size_t(blockDim.x) + threadIdx.x;
    if (at >= length) return;
    float4 x = a[at], y = b[at];
    c[at] = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

/// Which handle is mapped where, and at which addresses.
struct Order {
    std::string name;
    std::vector<int> handles;
    CUdeviceptr at = 0;
};

static std::mt19937 chance(1);

static std::vector<int> ascending(int length) {
    std::vector<int> handles(length);
    std::iota(handles.begin(), handles.end(), 0);
    return handles;
}

/// Runs of so many handles, as they were made, anywhere.
static std::vector<int> runs(int length) {
    std::vector<int> first = ascending(HANDLES / length), handles;
    std::shuffle(first.begin(), first.end(), chance);
    for (int run : first)
        for (int next = 0; next < length; ++next) handles.push_back(run * length + next);
    return handles;
}

/// Handles anywhere among so many, which follow each other as they were made.
static std::vector<int> within(int length) {
    std::vector<int> handles = ascending(HANDLES);
    for (int at = 0; at + length <= HANDLES; at += length)
        std::shuffle(handles.begin() + at, handles.begin() + at + length, chance);
    return handles;
}

static std::vector<Order> orders() {
    std::vector<Order> all = {{"as made", ascending(HANDLES)}};
    for (int length : {1, 2, 4, 8, 16, 32})
        all.push_back({"runs of " + std::to_string(2 * length) + " MiB", runs(length)});
    for (int length : {2, 4, 8, 16, 32, 64, 256})
        all.push_back({"any within " + std::to_string(2 * length) + " MiB", within(length)});

    std::vector<int> handles = ascending(HANDLES);
    std::reverse(handles.begin(), handles.end());
    all.push_back({"reversed", handles});
    for (int& handle : handles = ascending(HANDLES)) handle *= 2;
    all.push_back({"every second", handles});
    handles = ascending(2 * HANDLES);
    std::shuffle(handles.begin(), handles.end(), chance);
    handles.resize(HANDLES);
    std::sort(handles.begin(), handles.end());
    all.push_back({"any half, sorted", handles});
    return all;
}

int main() {
    cudaFree(nullptr);
    CUmemAllocationProp kind = {};
    kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    std::vector<CUmemGenericAllocationHandle> made(2 * HANDLES);
    for (auto& handle : made) CHECK(cuMemCreate(&handle, HANDLE, &kind, 0));

    CUmemAccessDesc access = {};
    access.location = kind.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    std::vector<Order> all = orders();
    for (Order& order : all) {
        CHECK(cuMemAddressReserve(&order.at, BYTES, size_t(1) << 30, 0, 0));
        for (int at = 0; at < HANDLES; ++at)
            CHECK(cuMemMap(order.at + at * HANDLE, HANDLE, 0, made[order.handles[at]], 0));
        CHECK(cuMemSetAccess(order.at, BYTES, &access, 1));
    }

    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (size_t bytes : {64 * MiB, 300 * MiB}) {
        const size_t length = bytes / sizeof(float4), part = BYTES / 3 / HANDLE * HANDLE;
        const int places = 40, repeats = std::max<int>(3, 600 * MiB / bytes);
        std::vector<double> taken(all.size());
        for (int place = 0; place < places; ++place) {
            // All orders in turns at each place.
            const size_t at = place * 37 % places * ((part - bytes - HANDLE) / places) / HANDLE * HANDLE;
            for (size_t number = 0; number < all.size(); ++number) {
                auto array = [&](int which) {
                    return reinterpret_cast<float4*>(all[number].at + which * part + at);
                };
                auto run = [&] { add<<<(length + 255) / 256, 256>>>(array(0), array(1), array(2), length); };
                run();
                CHECK(cudaEventRecord(begin));
                for (int repeat = 0; repeat < repeats; ++repeat) run();
                CHECK(cudaEventRecord(end));
                CHECK(cudaEventSynchronize(end));
                float ms;
                CHECK(cudaEventElapsedTime(&ms, begin, end));
                taken[number] += ms / repeats / places;
            }
        }
        std::printf("arrays of %zu MiB: %.2f us as made\n", bytes / MiB, taken[0] * 1e3);
        for (size_t number = 1; number < all.size(); ++number)
            std::printf("  %-20s %+6.2f %%\n", all[number].name.c_str(), (taken[number] / taken[0] - 1) * 100);
    }
}
