// Traces in the format of RMM's CSV log, made ready for replay. What counts as a mistake and what
// is merely left out is the same as in `vpmm replay`: see docs/cli.md.
#pragma once

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <system_error>
#include <unordered_map>
#include <utility>
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
        std::ifstream file(path, std::ios::binary);
        if (!file) throw std::runtime_error("cannot open " + path);
        TraceReader reader;
        reader.trace_.name = path;
        std::string line;
        for (std::size_t number = 1; std::getline(file, line); ++number) {
            try {
                if (number == 1 && line.starts_with("\xef\xbb\xbf")) line.erase(0, 3);
                if (!reader.line(line, file)) break;
            } catch (const std::exception &error) {
                throw std::runtime_error(path + ":" + std::to_string(number) + ": " + error.what());
            }
        }
        if (reader.action_ == kAbsent) throw std::runtime_error(path + ": no rows");
        reader.trace_.slots = reader.next_slot_;
        constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
        reader.trace_.peak_live_bytes =
            reader.peak_live_bytes_ > most ? most
                                           : static_cast<std::uint64_t>(reader.peak_live_bytes_);
        return reader.trace_;
    }

  private:
    struct Live {
        std::uint32_t slot;
        std::uint32_t stream; // of the allocation
        std::uint64_t bytes;
    };

    // A stream by what kind of name it has, and the name; the per-thread one by its thread.
    enum class Named { kLegacy, kPerThread, kByNumber, kByHandle };
    using StreamKey = std::pair<Named, std::uint64_t>;

    // Sums of sizes that need not fit 64 bits.
    using Sum = unsigned __int128;

    static constexpr std::size_t kAbsent = SIZE_MAX;

    static std::string trimmed(const std::string &text) {
        constexpr const char *blanks = " \t\n\f\r";
        const auto first = text.find_first_not_of(blanks);
        return first == std::string::npos
                   ? std::string()
                   : text.substr(first, text.find_last_not_of(blanks) - first + 1);
    }

    // By the rules of CSV, without the blanks around each.
    static std::vector<std::string> fields(const std::string &line) {
        std::vector<std::string> out(1);
        bool begins = true, quoted = false;
        for (std::size_t i = 0; i < line.size(); ++i) {
            const char c = line[i];
            if (quoted) {
                const bool twice = c == '"' && i + 1 < line.size() && line[i + 1] == '"';
                if (c != '"' || twice) out.back() += c;
                i += twice;
                quoted = c != '"' || twice;
            } else if (c == ',') {
                out.emplace_back();
                begins = true;
                continue;
            } else if (c == '"' && begins) {
                quoted = true;
            } else {
                out.back() += c;
            }
            begins = false;
        }
        for (std::string &field : out) field = trimmed(field);
        return out;
    }

    // Whether more lines may come: a log that was not ended has zero bytes at its end.
    bool line(std::string &text, std::ifstream &file) {
        const auto zero = text.find('\0');
        if (zero != std::string::npos) {
            auto is_not_zero = [](char c) { return c != '\0'; };
            if (std::any_of(text.begin() + static_cast<std::ptrdiff_t>(zero), text.end(),
                            is_not_zero) ||
                std::any_of(std::istreambuf_iterator<char>(file), {}, is_not_zero)) {
                throw std::runtime_error("zero bytes, and others behind them");
            }
            text.erase(zero);
        }
        while (text.ends_with('\r')) text.pop_back();
        if (text.find('\r') != std::string::npos) {
            throw std::runtime_error("a carriage return within the line");
        }
        const auto field = fields(text);
        const bool is_blank = field.size() == 1 && field[0].empty();
        if (!is_blank && (action_ != kAbsent || !header(field))) row(field);
        return zero == std::string::npos;
    }

    // Whether the first row is a header; else it is a row in RMM's order.
    bool header(const std::vector<std::string> &names) {
        const std::array<std::pair<const char *, std::size_t *>, 5> known{
            {{"thread", &thread_}, {"action", &action_}, {"pointer", &pointer_},
             {"size", &size_}, {"stream", &stream_}}};
        bool is_header = false;
        for (std::size_t i = names.size(); i-- > 0;) { // the first of two of one name
            std::string name = names[i];
            std::transform(name.begin(), name.end(), name.begin(),
                           [](unsigned char c) { return std::tolower(c); });
            is_header = is_header || name == "time";
            for (const auto &[text, place] : known) {
                if (name != text) continue;
                *place = i;
                is_header = true;
            }
        }
        if (!is_header) {
            thread_ = 0, action_ = 2, pointer_ = 3, size_ = 4, stream_ = 5;
            return false;
        }
        if (action_ == kAbsent || pointer_ == kAbsent || size_ == kAbsent) {
            throw std::runtime_error("the header lacks Action, Pointer or Size");
        }
        return true;
    }

    static bool is_hexadecimal(const std::string &text) {
        return text.starts_with("0x") || text.starts_with("0X");
    }

    // Decimal, or hexadecimal after 0x; no sign, at most 64 bits.
    static std::uint64_t number(const std::string &text) {
        const bool hexadecimal = is_hexadecimal(text);
        const char *begin = text.data() + (hexadecimal ? 2 : 0), *end = text.data() + text.size();
        std::uint64_t value = 0;
        const auto read = std::from_chars(begin, end, value, hexadecimal ? 16 : 10);
        if (read.ec != std::errc() || read.ptr != end) {
            throw std::runtime_error("no number: " + text);
        }
        return value;
    }

    static std::uint64_t pointer(const std::string &text) {
        if (text == "(nil)" || text == "0") return 0;
        if (!is_hexadecimal(text)) throw std::runtime_error("no pointer: " + text);
        return number(text);
    }

    void row(const std::vector<std::string> &field) {
        auto at = [&](std::size_t column) -> const std::string & {
            if (column >= field.size()) throw std::runtime_error("too few columns");
            return field[column];
        };
        const std::string &action = at(action_);
        if (action != "allocate" && action != "free" && action != "allocate failure") {
            throw std::runtime_error("unknown action: " + action);
        }
        const auto address = pointer(at(pointer_));
        const std::string &size = at(size_);
        const auto bytes = action == "free" && size.empty() ? 0 : number(size);
        const auto thread = thread_ == kAbsent ? 0 : number(at(thread_));
        const StreamKey stream =
            stream_ == kAbsent ? StreamKey{Named::kLegacy, 0} : stream_key(at(stream_), thread);
        if (action == "allocate") {
            allocate(address, bytes, stream);
        } else if (action == "free" && live_.contains(address)) {
            free(address, stream_index(stream));
        }
    }

    // The legacy default stream has four spellings.
    static StreamKey stream_key(const std::string &text, std::uint64_t thread) {
        const auto value = text == "(nil)" ? 0 : number(text);
        const bool is_handle = is_hexadecimal(text);
        if (value == 0 || (value == 1 && is_handle)) return {Named::kLegacy, 0};
        if (value == 2 && is_handle) return {Named::kPerThread, thread};
        return {is_handle ? Named::kByHandle : Named::kByNumber, value};
    }

    std::uint32_t stream_index(const StreamKey &key) {
        return streams_.try_emplace(key, std::uint32_t(streams_.size())).first->second;
    }

    void allocate(std::uint64_t address, std::uint64_t bytes, const StreamKey &key) {
        if (address == 0 && bytes > 0) throw std::runtime_error("an allocation at null");
        // The log lost the free of what was there: it was on whichever stream.
        const auto older = live_.find(address);
        if (older != live_.end()) free(address, older->second.stream);
        if (bytes == 0) return;
        std::uint32_t slot;
        if (unused_.empty()) {
            slot = next_slot_++;
        } else {
            slot = unused_.back();
            unused_.pop_back();
        }
        const std::uint32_t stream = stream_index(key);
        live_[address] = {slot, stream, bytes};
        live_bytes_ += bytes;
        peak_live_bytes_ = std::max(peak_live_bytes_, live_bytes_);
        trace_.events.push_back({slot, stream, bytes, true});
    }

    // Of what is live there.
    void free(std::uint64_t address, std::uint32_t stream) {
        const Live live = live_.at(address);
        live_.erase(address);
        live_bytes_ -= live.bytes;
        unused_.push_back(live.slot);
        trace_.events.push_back({live.slot, stream, live.bytes, false});
    }

    Trace trace_;
    std::unordered_map<std::uint64_t, Live> live_;
    std::map<StreamKey, std::uint32_t> streams_;
    std::vector<std::uint32_t> unused_;
    std::uint32_t next_slot_ = 0;
    Sum live_bytes_ = 0, peak_live_bytes_ = 0;
    std::size_t thread_ = kAbsent, action_ = kAbsent, pointer_ = kAbsent, size_ = kAbsent,
                stream_ = kAbsent;
};

} // namespace peers
