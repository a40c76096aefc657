// The search for the smallest limit that is enough, as `vpmm fit` does it
// (vpmm-cli/src/fit/search.rs): outwards from the least that can be, then by halves. Completion is not
// quite monotonic in the limit, so a search from elsewhere may end at another one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

namespace peers {

template <class Result> struct Enough {
    std::uint64_t granules;
    Result result;
};

// `attempt(granules)` is what came of a limit, nothing where it was not enough. Nothing if none of
// `least` to `most` is.
template <class Attempt>
auto search(std::uint64_t least, std::uint64_t most, Attempt attempt)
    -> std::optional<Enough<typename decltype(attempt(least))::value_type>> {
    if (least > most) return std::nullopt;
    std::uint64_t fails = least - 1, tried = least;
    std::uint64_t step = std::max<std::uint64_t>(least / 1024, 1);
    auto result = attempt(tried);
    while (!result) {
        if (tried == most) return std::nullopt;
        fails = tried;
        tried = step < most - tried ? tried + step : most;
        step *= 2;
        result = attempt(tried);
    }
    while (tried - fails > 1) {
        std::uint64_t middle = fails + (tried - fails) / 2;
        if (auto better = attempt(middle)) {
            tried = middle;
            result = std::move(better);
        } else {
            fails = middle;
        }
    }
    return {{tried, std::move(*result)}};
}

} // namespace peers
