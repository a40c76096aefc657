// What the peers' programs would replay of each file, a line a file: see main.rs.
#include "../../benches/peers/harness/trace.hpp"

#include <cstdio>
#include <exception>

int main(int count, char **paths) {
    for (int i = 1; i < count; ++i) {
        try {
            const auto trace = peers::TraceReader::read(paths[i]);
            std::printf("peak %llu", static_cast<unsigned long long>(trace.peak_live_bytes));
            // Slots serve again here: allocations by their own number.
            std::vector<std::size_t> in_slot(trace.slots);
            std::size_t allocations = 0;
            for (const auto &event : trace.events) {
                if (event.allocates) in_slot[event.slot] = allocations++;
                std::printf(" %c%zu:%llu@%u", event.allocates ? '+' : '-', in_slot[event.slot],
                            static_cast<unsigned long long>(event.bytes), event.stream);
            }
            std::printf("\n");
        } catch (const std::exception &) {
            std::printf("refused\n");
        }
    }
}
