#!/usr/bin/env python3
"""Prints the results of side-by-side.sh as tables: one row a case, one column an allocator; of several turns the
fastest.

    table.py [--markdown] RESULTS.jsonl...
"""

import argparse
import json
import math
import signal
import sys

# The allocators that are ours, the one to compare first; all others are peers, the driver's own
# pool too.
OURS = ("default", "paged")


def read(paths):
    """The headers, and the lines by kind: cases, replays, fits."""
    headers, cases, replays, fits = [], [], [], []
    for path in paths:
        with open(path) as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    result = json.loads(line)
                except ValueError as error:
                    print(f"{path}:{number}: no JSON, left out: {error}", file=sys.stderr)
                    continue
                if "header" in result:
                    headers.append(result)
                elif "case" in result:
                    cases.append(finished(result))
                elif "ratio" in result:
                    fits.append(finished(result))
                elif "trace" in result:
                    replays.append(finished(result))
    return headers, cases, replays, fits


def finished(result):
    """The result, or only what it is about and its error where there is one: a replay that ended half-way has the
    figures of that half, which are no trace's."""
    if not result.get("error"):
        return result
    about = ("case", "trace", "allocator", "device", "error")
    return {key: result[key] for key in about if key in result}


def short(trace):
    """`gpt_train` for `traces/gpt_train.csv.gz`."""
    return trace.rsplit("/", 1)[-1].removesuffix(".gz").removesuffix(".csv")


def in_order(names):
    """Each name once, in the order of first appearance."""
    return list(dict.fromkeys(names))


def number(value):
    """Three digits that matter, with thousands apart."""
    if value is None:
        return "–"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ratio(value):
    """Four places: what is held beyond the live bytes is often less than a hundredth."""
    return "–" if value is None else f"{value:.4f}"


class Table:
    """Rows by name, columns by allocator; the last one compares ours with the best peer, where the
    figures of all of them are of one kind."""

    def __init__(self, title, unit, figure=number, higher_is_better=False, compare=True):
        self.title = f"{title} ({unit})"
        self.figure = figure
        self.better = max if higher_is_better else min
        self.compare = compare
        self.cells = {}

    def put(self, row, allocator, value):
        self.cells.setdefault(row, {})[allocator] = value

    def rows(self):
        allocators = in_order(name for row in self.cells.values() for name in row)
        ours = next((name for name in OURS if name in allocators), None)
        yield ["", *allocators, *([f"{ours} is better by"] if self.compare else [])]
        for name, row in self.cells.items():
            figures = [self.figure(row.get(allocator)) for allocator in allocators]
            yield [name, *figures, *([self.gain(row, ours)] if self.compare else [])]

    def gain(self, row, ours):
        """How many times better than the best peer; below 1 the peer is."""
        peers = [value for name, value in row.items() if value and name not in OURS]
        if not peers or not row.get(ours):
            return "–"
        best = self.better(peers)
        return f"{row[ours] / best if self.better is max else best / row[ours]:.2f}"

    def print(self, markdown):
        rows = list(self.rows())
        if len(rows) == 1:
            return
        print(f"\n{'### ' if markdown else ''}{self.title}\n")
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        for at, row in enumerate(rows):
            cells = [
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths))
            ]
            if markdown:
                print("| " + " | ".join(cells) + " |")
                if at == 0:
                    print("|" + "|".join("---" if i == 0 else "--:" for i in range(len(row))) + "|")
            else:
                print("  ".join(cells).rstrip())


def fastest(results, *figures):
    """Of lines about the same, of several turns: the one with the least of the first of these figures that it has."""
    best = {}

    def figure(result):
        return next((result[name] for name in figures if result.get(name)), math.inf)

    for result in results:
        about = result.get("case") or result["trace"], result["allocator"]
        if about not in best or figure(result) < figure(best[about]):
            best[about] = result
    return list(best.values())


def tables(cases, replays, fits):
    """Every table that the results have figures for."""
    time = Table("Host time per operation", "ns")
    rate = Table("All threads together", "million operations per second", higher_is_better=True)
    tails = [
        Table(f"One operation, {name}", "ns")
        for name in ("median", "99th percentile", "99.9th percentile", "longest")
    ]
    memory = Table("Memory held in the cases", "peak mapped / peak live", ratio)
    for result in cases:
        name, allocator = result["case"], result["allocator"]
        time.put(name, allocator, result.get("ns_per_op"))
        if name.startswith(("threads_", "shared_stream")):
            rate.put(name, allocator, result.get("mops_per_s"))
        for table, key in zip(tails, ("p50_ns", "p99_ns", "p999_ns", "max_ns")):
            table.put(name, allocator, result.get(key))
        memory.put(name, allocator, held(result))

    replay_time = Table("Traces replayed, warm, host time per operation", "ns")
    told = "where the allocator tells"
    apart = Table(f"The same without the driver calls, {told}", "ns", compare=False)
    replay_memory = Table("Traces replayed, memory held", "peak mapped / peak live", ratio)
    for result in replays:
        name, allocator = short(result["trace"]), result["allocator"]
        replay_time.put(name, allocator, result.get("ns_per_op"))
        if result.get("host_ns_per_op") is not None:
            apart.put(name, allocator, result["host_ns_per_op"])
        replay_memory.put(name, allocator, held(result))

    fit = Table("Smallest limit at which a trace completes", "limit / peak live", ratio)
    fit_time = Table("Host time per operation at that limit", "ns")
    fit_driver = Table(f"Driver time at that limit, {told}", "ms", compare=False)
    for result in fits:
        name, allocator = short(result["trace"]), result["allocator"]
        fit.put(name, allocator, result.get("ratio"))
        fit_time.put(name, allocator, result.get("ns_per_op"))
        if result.get("driver_time_us") is not None:
            fit_driver.put(name, allocator, result["driver_time_us"] / 1000)
    return [
        *(time, rate, *tails, memory),
        *(replay_time, apart, replay_memory),
        *(fit, fit_time, fit_driver),
    ]


def held(result):
    """Memory held for memory live, where the allocator tells."""
    mapped, live = result.get("peak_mapped_bytes"), result.get("peak_live_bytes")
    return mapped / live if mapped and live else None


def main():
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `table.py results | head` is no failure
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("results", nargs="+")
    options = parser.parse_args()
    headers, cases, replays, fits = read(options.results)
    cases, replays = fastest(cases, "ns_per_op"), fastest(replays, "ns_per_op")
    fits = fastest(fits, "driver_time_us", "ns_per_op")
    for header in headers:
        for key in ("machine", "driver", "processor", "commit", "date", "command"):
            print(f"{key}: {header.get(key, 'unknown')}" + ("  " if options.markdown else ""))
    if any(result.get("device", "").startswith("sim") for result in cases + replays + fits):
        print("\nSome of these are the simulator's, whose calls take other times than a GPU's.")
    for table in tables(cases, replays, fits):
        table.print(options.markdown)
    reasons = in_order(
        f"{result.get('case') or short(result['trace'])}, {result['allocator']}: {result['error']}"
        for result in cases + replays + fits
        if result.get("error")
    )
    if reasons:
        print("\nNot measured:\n")
        for reason in reasons:
            print(f"- {reason}")
    return 0 if cases or replays or fits else 1


if __name__ == "__main__":
    sys.exit(main())
