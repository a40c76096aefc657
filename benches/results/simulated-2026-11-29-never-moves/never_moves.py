"""How much memory a trace needs where nothing ever moves: one row of addresses, whose end rises where no free block is
long enough. Streams are left out, which only helps.

    python3 never_moves.py TRACE...
"""

import bisect
import csv
import gzip
import sys

UNIT = 512


class Row:
    """Free blocks by address and by length."""

    def __init__(self, fit):
        self.fit = fit
        self.starts, self.ends = {}, {}
        self.by_length, self.by_start = [], []
        self.top = 0

    def insert(self, start, end):
        self.starts[start], self.ends[end] = end, start
        bisect.insort(self.by_length, (end - start, start))
        bisect.insort(self.by_start, start)

    def remove(self, start):
        end = self.starts.pop(start)
        del self.ends[end]
        self.by_length.pop(bisect.bisect_left(self.by_length, (end - start, start)))
        self.by_start.pop(bisect.bisect_left(self.by_start, start))
        return end

    def find(self, units):
        if self.fit == "best":
            at = bisect.bisect_left(self.by_length, (units, 0))
            return self.by_length[at][1] if at < len(self.by_length) else None
        return next((start for start in self.by_start if self.starts[start] - start >= units), None)

    def allocate(self, units):
        start = self.find(units)
        if start is None:
            # From the free block at the end, if there is one, on.
            start = self.ends.get(self.top, self.top)
            end = self.remove(start) if start < self.top else start
            self.top = start + units
        else:
            end = self.remove(start)
        if start + units < end:
            self.insert(start + units, end)
        return start

    def free(self, start, units):
        end = start + units
        if start in self.ends:
            former = self.ends[start]
            self.remove(former)
            start = former
        if end in self.starts:
            end = self.remove(end)
        self.insert(start, end)


def operations(path):
    live = {}
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            action, pointer = row["Action"].strip(), row["Pointer"]
            if action == "allocate" and int(row["Size"]) > 0:
                live[pointer] = int(row["Size"])
                yield True, pointer, live[pointer]
            elif action == "free" and pointer in live:
                yield False, pointer, live.pop(pointer)


for path in sys.argv[1:]:
    calls = list(operations(path))
    found = []
    for fit in ["best", "first"]:
        row, places, now, peak = Row(fit), {}, 0, 0
        for is_new, pointer, size in calls:
            units = -(-size // UNIT)
            if is_new:
                places[pointer] = row.allocate(units)
                now += size
                peak = max(peak, now)
            else:
                row.free(places.pop(pointer), units)
                now -= size
        found.append(f"{fit} fit {row.top * UNIT / peak:.4f}")
    print(path.rsplit("/", 1)[-1], "of the peak:", ", ".join(found), flush=True)
