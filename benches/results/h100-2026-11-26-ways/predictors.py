"""How much of a trace's large requests is foretold by the ways that they come by.

    python predictors.py TRACE...

A way is some events before a request, large requests and frees, and each one's size over the one
before: `exact N`, by elevenths of an octave, or `broad N`, by whole octaves. Where nothing is known of
the first way the next one counts. A request's fate is what `lifetimes.rs` calls it: whether it is freed
before the most that its round has, or not. Printed are the parts of requests that were foretold right,
wrong and not at all, and the same of their bytes.
"""

import csv
import gzip
import math
import sys

LARGE = 64 << 10


def octaves(ratio, parts):
    return round(math.log2(ratio) * parts)


def way(events, parts):
    """The key of a request of such a ratio behind such a history."""

    def key(history, ratio):
        before = tuple((octaves(of, parts), freed) for of, freed in history[-(events - 1) :])
        return octaves(ratio, parts), before

    return key


WAYS = {
    "exact 4": [way(4, 11)],
    "broad 6": [way(6, 1)],
    "broad 8": [way(8, 1)],
    "exact 3, broad 8": [way(3, 11), way(8, 1)],
    "exact 4, broad 6": [way(4, 11), way(6, 1)],
    "exact 4, broad 8": [way(4, 11), way(8, 1)],
    "exact 8, broad 6": [way(8, 11), way(6, 1)],
    "broad 12, exact 4": [way(12, 1), way(4, 11)],
    "broad 16, broad 6": [way(16, 1), way(6, 1)],
}


class Rounds:
    """When a round ends, and what became of its requests."""

    def __init__(self, keys):
        self.keys, self.tables = keys, [{} for _ in keys]
        self.history, self.last = [], 1.0
        self.mark, self.is_low = 0, False
        self.is_on, self.now, self.most, self.crest, self.last_crest = False, 0, 0, 0, 0
        self.undecided, self.born = [], {}
        self.requests, self.bytes = [0, 0, 0], [0, 0, 0]

    def learn(self, note, stays):
        keys, guess, size = note
        outcome = 2 if guess is None else int(guess != stays)
        self.requests[outcome] += 1
        self.bytes[outcome] += size
        for table, key in zip(self.tables, keys):
            table[key] = stays

    def decide(self, stays):
        for note in self.undecided:
            self.learn(note, stays)
        self.undecided = []

    def look(self, live):
        """Whether what is live ebbs."""
        if live < self.mark:
            self.mark = live * 7 / 8
            if not self.is_low:
                self.is_low = True
                self.end_round()
        elif live * 5 / 8 > self.mark:
            self.mark, self.is_low = live * 5 / 8, False

    def end_round(self):
        if self.is_on:
            self.decide(True)
        self.last_crest = self.crest if self.is_on else self.now
        self.is_on, self.most, self.crest = True, 0, self.now

    def note(self, size, freed):
        units = -(-size // 4096)
        ratio, self.last = units / self.last, units
        self.history = [*self.history[-32:], (ratio, freed)]

    def malloc(self, name, size, live):
        ratio = -(-size // 4096) / self.last
        keys = [key(self.history, ratio) for key in self.keys]
        known = (table[key] for table, key in zip(self.tables, keys) if key in table)
        self.note(size, False)
        self.now += 1
        if self.is_on:
            if live > self.most:
                self.most, self.crest = live, self.now
                self.decide(False)
            self.born[name] = self.now, (keys, next(known, None), size)

    def free(self, name, size):
        self.note(size, True)
        born, note = self.born.pop(name, (None, None))
        if born is None:
            return
        if born <= self.last_crest:
            self.learn(note, True)
        elif born > self.crest:
            self.learn(note, False)
        else:
            self.undecided.append(note)


def run(calls, keys):
    rounds, live = Rounds(keys), 0
    for is_malloc, name, size in calls:
        live += size if is_malloc else -size
        if is_malloc:
            rounds.look(live)
        if size > LARGE and is_malloc:
            rounds.malloc(name, size, live)
        elif size > LARGE:
            rounds.free(name, size)
    return [part / sum(of) for of in (rounds.requests, rounds.bytes) for part in of]


def main():
    of_all = {name: [] for name in WAYS}
    for path in sys.argv[1:]:
        with gzip.open(path, "rt") as file:
            rows = list(csv.DictReader(file))
        calls = [(row["Action"] == "allocate", row["Pointer"], int(row["Size"])) for row in rows]
        print(path.rpartition("/")[2])
        for name, keys in WAYS.items():
            parts = run(calls, keys)
            of_all[name].append(parts)
            print(f"  {name:18} requests {parts[0]:.3f} {parts[1]:.4f} {parts[2]:.3f}", end="")
            print(f"  bytes {parts[3]:.3f} {parts[4]:.4f} {parts[5]:.3f}")
    print("mean")
    for name, parts in of_all.items():
        mean = [sum(column) / len(parts) for column in zip(*parts)]
        print(f"  {name:18} requests {mean[0]:.3f} {mean[1]:.4f} {mean[2]:.3f}", end="")
        print(f"  bytes {mean[3]:.3f} {mean[4]:.4f} {mean[5]:.3f}")


main()
