// One JSON object on one line of standard output.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace peers {

// Some libraries' errors go on with a stack trace.
inline std::string first_line(std::string_view text) {
    return std::string(text.substr(0, text.find('\n')));
}

class JsonLine {
  public:
    JsonLine &text(const char *key, std::string_view value) {
        begin(key) += quoted(value);
        return *this;
    }

    JsonLine &whole(const char *key, std::optional<std::uint64_t> value) {
        begin(key) += value ? std::to_string(*value) : "null";
        return *this;
    }

    JsonLine &number(const char *key, std::optional<double> value) {
        begin(key) += value ? digits(*value) : "null";
        return *this;
    }

    JsonLine &numbers(const char *key, const std::vector<double> &values) {
        std::string &line = begin(key);
        line += '[';
        for (std::size_t i = 0; i < values.size(); ++i) {
            if (i > 0) line += ',';
            line += digits(values[i]);
        }
        line += ']';
        return *this;
    }

    JsonLine &null(const char *key) {
        begin(key) += "null";
        return *this;
    }

    // Flushed at once: a crash in a later case must not take this result with it.
    void print() {
        std::printf("{%s}\n", line_.c_str());
        std::fflush(stdout);
    }

  private:
    std::string &begin(const char *key) {
        if (!line_.empty()) line_ += ',';
        line_ += quoted(key);
        line_ += ':';
        return line_;
    }

    static std::string digits(double value) {
        // JSON has neither infinities nor what is no number, as a figure of a trace of nothing is.
        if (!std::isfinite(value)) return "null";
        char buffer[64];
        std::snprintf(buffer, sizeof buffer, "%.4f", value);
        return buffer;
    }

    static std::string quoted(std::string_view text) {
        std::string out = "\"";
        for (char c : text) {
            if (c == '"' || c == '\\') {
                out += '\\';
                out += c;
            } else if (static_cast<unsigned char>(c) < 0x20) {
                out += ' ';
            } else {
                out += c;
            }
        }
        out += '"';
        return out;
    }

    std::string line_;
};

} // namespace peers
