// Traces in the format of RMM's CSV log, made ready for replay. What counts as a mistake and what
// is merely left out is the same as in `vpmm replay`: see docs/cli.md.
#pragma once

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace peers {

struct Event {
    std::uint32_t slot;
    std::uint32_t stream;
    std::uint64_t bytes;
    bool allocates;
};

struct Trace {
    std::string name;
    std::vector<Event> events;
    std::size_t slots = 0;
    std::uint64_t peak_live_bytes = 0;
};

class TraceReader {
  public:
    static Trace read(const std::string &path) {
        std::ifstream file(path);
        if (!file) throw std::runtime_error("cannot open " + path);
        TraceReader reader;
        reader.trace_.name = path;
        std::string line;
        if (!std::getline(file, line)) throw std::runtime_error(path + " is empty");
        reader.header(line);
        for (std::size_t number = 2; std::getline(file, line); ++number) {
            try {
                reader.row(line);
            } catch (const std::exception &error) {
                throw std::runtime_error(path + ":" + std::to_string(number) + ": " + error.what());
            }
        }
        reader.trace_.slots = reader.next_slot_;
        return reader.trace_;
    }

  private:
    struct Live {
        std::uint32_t slot;
        std::uint64_t bytes;
    };

    static constexpr std::size_t kAbsent = SIZE_MAX;

    static std::vector<std::string> fields(const std::string &line) {
        std::vector<std::string> out(1);
        for (char c : line) {
            if (c == ',') {
                out.emplace_back();
            } else if (c != '\r') {
                out.back() += c;
            }
        }
        return out;
    }

    void header(const std::string &line) {
        auto names = fields(line);
        for (std::size_t i = 0; i < names.size(); ++i) {
            std::string name = names[i];
            std::transform(name.begin(), name.end(), name.begin(),
                           [](unsigned char c) { return std::tolower(c); });
            if (name == "action") action_ = i;
            if (name == "pointer") pointer_ = i;
            if (name == "size") size_ = i;
            if (name == "stream") stream_ = i;
        }
        if (action_ == kAbsent || pointer_ == kAbsent || size_ == kAbsent) {
            throw std::runtime_error("the header lacks Action, Pointer or Size");
        }
    }

    static std::uint64_t number(const std::string &text, int base) {
        if (text == "(nil)") return 0;
        char *end = nullptr;
        auto value = std::strtoull(text.c_str(), &end, base);
        if (end == text.c_str() || *end != '\0') throw std::runtime_error("no number: " + text);
        return value;
    }

    void row(const std::string &line) {
        if (line.empty()) return;
        auto field = fields(line);
        if (field.size() <= std::max({action_, pointer_, size_})) {
            throw std::runtime_error("too few columns");
        }
        const std::string &action = field[action_];
        if (action == "allocate failure") return;
        const auto pointer = number(field[pointer_], 16);
        const std::uint32_t stream =
            stream_ < field.size() ? stream_index(field[stream_]) : std::uint32_t{0};
        if (action == "allocate") {
            allocate(pointer, number(field[size_], 0), stream);
        } else if (action == "free") {
            free(pointer, stream);
        } else {
            throw std::runtime_error("unknown action: " + action);
        }
    }

    // The legacy default stream has three spellings.
    std::uint32_t stream_index(std::string name) {
        if (name == "(nil)" || name == "0x0" || name == "0x1") name = "0";
        auto [entry, is_new] = streams_.try_emplace(name, std::uint32_t(streams_.size()));
        return entry->second;
    }

    void allocate(std::uint64_t pointer, std::uint64_t bytes, std::uint32_t stream) {
        if (bytes == 0 || pointer == 0) return;
        free(pointer, stream); // the log lost the free of what was there
        std::uint32_t slot;
        if (unused_.empty()) {
            slot = next_slot_++;
        } else {
            slot = unused_.back();
            unused_.pop_back();
        }
        live_[pointer] = {slot, bytes};
        live_bytes_ += bytes;
        trace_.peak_live_bytes = std::max(trace_.peak_live_bytes, live_bytes_);
        trace_.events.push_back({slot, stream, bytes, true});
    }

    void free(std::uint64_t pointer, std::uint32_t stream) {
        auto entry = live_.find(pointer);
        if (entry == live_.end()) return;
        auto [slot, bytes] = entry->second;
        live_.erase(entry);
        live_bytes_ -= bytes;
        unused_.push_back(slot);
        trace_.events.push_back({slot, stream, bytes, false});
    }

    Trace trace_;
    std::unordered_map<std::uint64_t, Live> live_;
    std::unordered_map<std::string, std::uint32_t> streams_;
    std::vector<std::uint32_t> unused_;
    std::uint32_t next_slot_ = 0;
    std::uint64_t live_bytes_ = 0;
    std::size_t action_ = kAbsent, pointer_ = kAbsent, size_ = kAbsent, stream_ = kAbsent;
};

} // namespace peers
