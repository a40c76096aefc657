// The command line that both peer programs have:
//     PROGRAM [--allocator A,B] [--case NAME,NAME]
//     PROGRAM replay|fit [--allocator A,B] TRACE.csv...
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

namespace peers {

struct Options {
    std::string command = "bench";
    std::vector<std::string> allocators, cases, traces;

    bool wants_case(const std::string &name) const { return listed(cases, name); }
    bool wants_allocator(const std::string &name) const { return listed(allocators, name); }

    static Options parse(int count, char **arguments) {
        Options options;
        for (int i = 1; i < count; ++i) {
            std::string argument = arguments[i];
            if ((argument == "--allocator" || argument == "--case") && i + 1 < count) {
                (argument == "--case" ? options.cases : options.allocators) =
                    split(arguments[++i]);
            } else if (i == 1 && (argument == "replay" || argument == "fit")) {
                options.command = argument;
            } else if (!argument.empty() && argument[0] != '-' && options.command != "bench") {
                options.traces.push_back(argument);
            } else {
                std::fprintf(stderr,
                             "usage: %s [replay|fit] [--allocator A,B] [--case A,B] [TRACE.csv...]\n",
                             arguments[0]);
                std::exit(2);
            }
        }
        return options;
    }

  private:
    // An empty list is everything.
    static bool listed(const std::vector<std::string> &names, const std::string &name) {
        return names.empty() || std::find(names.begin(), names.end(), name) != names.end();
    }

    static std::vector<std::string> split(const std::string &text) {
        std::vector<std::string> parts;
        std::stringstream stream(text);
        for (std::string part; std::getline(stream, part, ',');) {
            if (!part.empty()) parts.push_back(part);
        }
        return parts;
    }
};

} // namespace peers
