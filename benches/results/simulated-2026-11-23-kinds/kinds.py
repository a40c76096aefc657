"""Writes traces like those of some kinds of programs, as logs for `vpmm replay`: of kinds that the
repository's four are not of. Nothing of them was recorded; sizes and orders are what such programs make,
times are guesses.

    python3 kinds.py FOLDER
"""

import csv
import gzip
import itertools
import pathlib
import random
import sys

MIB = 1 << 20


class Trace:
    """Allocations and frees with their times."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.rows, self.sizes, self._now, self._next = [], {}, 0.0, 0x7F00_0000_0000

    def get(self, size, stream=0):
        size = max(512, -(-int(size) // 512) * 512)
        pointer = self._next
        self._next += size + 2 * MIB
        self.sizes[pointer] = (size, stream)
        self._row("allocate", pointer, 8e-6)
        return pointer

    def free(self, *pointers):
        for pointer in pointers:
            self._row("free", pointer, 4e-6)

    def size(self, pointer):
        return self.sizes[pointer][0]

    def work(self, seconds):
        self._now += seconds

    def backward(self, kept):
        """Frees what a forward pass kept, the last first, with a gradient of each for a moment."""
        while kept:
            pointer = kept.pop()
            gradient = self.get(self.size(pointer))
            yield gradient
            self.free(pointer, gradient)

    def _row(self, action, pointer, took):
        self._now += took
        minutes, seconds = divmod(self._now, 60)
        time = f"00:{int(minutes):02}:{seconds:09.6f}"
        self.rows.append([1, time, action, hex(pointer), *self.sizes[pointer]])

    def save(self, path):
        with gzip.open(path, "wt", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["Thread", "Time", "Action", "Pointer", "Size", "Stream"])
            rows.writerows(self.rows)


def experts(trace, steps=60, layers=12, count=16, width=2048, tokens=16384):
    """Training of a mixture of experts: how many tokens each gets differs with every step."""
    for _ in range(layers):
        trace.get(8 * width * width)
        [trace.get(2 * width * width) for _ in range(2 * count)]
    for step in range(steps):
        rows, kept = int(tokens * trace.random.uniform(0.4, 1)), []
        for _ in range(layers):
            kept += [trace.get(rows * width * size) for size in (2, 6, 2)] + [trace.get(rows * count * 4)]
            cuts = [0, *sorted(trace.random.random() ** 1.5 for _ in range(count - 1)), 1]
            shares = [int(2 * rows * (end - begin)) for begin, end in itertools.pairwise(cuts)]
            out = []
            for share in filter(None, shares):
                kept += [trace.get(share * 8), *(trace.get(share * width * size) for size in (2, 4, 4))]
                out.append(trace.get(share * width * 2))
            together = trace.get(4 * rows * width)
            trace.free(*out)
            kept.append(trace.get(2 * rows * width))
            trace.free(together)
            trace.work(3e-4)
        scores = trace.get(rows * 32000 * 2)
        kept.append(trace.get(rows * 32000 * 4))
        trace.free(scores)
        gradients = []
        for _ in trace.backward(kept):
            if trace.random.random() < 0.08:
                gradients.append(trace.get(2 * width * width))
        if step == 0:
            [trace.get(32 * width * width) for _ in range(layers)]
            [trace.get(8 * width * width) for _ in range(layers * count)]
        trace.free(*gradients)
        trace.work(2e-2)


def graphs(trace, steps=300, layers=4):
    """Training on samples of a graph, of which no two are of one size."""
    trace.get(3 << 30)
    [trace.get(256 * 256 * 4) for _ in range(40)]
    for _ in range(steps):
        nodes = int(trace.random.lognormvariate(11.5, 0.5))
        edges = int(nodes * trace.random.uniform(5, 25))
        kept = [trace.get(edges * 16), trace.get(nodes * 602 * 4)]
        for _ in range(layers):
            messages = trace.get(edges * 256)
            kept.append(trace.get(edges * 16))
            sums = trace.get(edges * 256)
            trace.free(messages)
            kept += [trace.get(nodes * 1024), sums]
            if trace.random.random() < 0.5:
                trace.free(trace.get(nodes * 4), trace.get(nodes * 8))
            nodes, edges = (int(count * trace.random.uniform(0.3, 0.9)) for count in (nodes, edges))
            kept.append(trace.get(nodes * 1024))
            trace.work(2e-4)
        for _ in trace.backward(kept):
            pass
        trace.work(5e-3)


def renew(trace, blocks, at, size):
    """Has a new block in the place of another, which is freed when it is there."""
    old, blocks[at] = blocks[at], trace.get(size)
    trace.free(old)


def generation(trace, rounds=12, layers=32, row=4096):
    """Text generated with caches that grow by a token at a time, each into a new block."""
    [trace.get(12 * 2048 * row) for _ in range(layers)]
    for _ in range(rounds):
        texts, length = trace.random.randint(4, 24), trace.random.randint(100, 1200)
        caches = [trace.get(texts * length * row) for _ in range(2 * layers)]

        for _ in range(trace.random.randint(60, 200)):
            length += 1
            for layer in range(layers):
                beside = [trace.get(texts * 16384), trace.get(texts * 64 * length)]
                for at in (2 * layer, 2 * layer + 1):
                    renew(trace, caches, at, texts * length * row)
                trace.free(*beside)
            trace.free(trace.get(texts * 128000), trace.get(texts * 128000))
            trace.work(1e-3)
            if texts > 2 and trace.random.random() < 0.01:
                texts -= 1
                for at in range(2 * layers):
                    renew(trace, caches, at, texts * length * row)
        trace.free(*caches)


def server(trace, requests=2500, streams=6):
    """Requests on several streams, each with a cache that lives as long as it does."""
    trace.get(6 << 30)
    [trace.get(trace.random.choice([4, 16, 33]) * MIB) for _ in range(200)]
    active = []
    for _ in range(requests):
        stream = trace.random.randint(1, streams)
        length = min(int(trace.random.lognormvariate(6, 0.9)) + 8, 8000)
        before = [trace.get(length * 8192, stream) for _ in range(6)]
        before.append(trace.get(min(length * length * 2, 800 * MIB), stream))
        caches = [trace.get(length * 4096, stream) for _ in range(trace.random.randint(4, 16))]
        trace.free(*before)
        active.append((stream, length, caches))
        trace.work(1e-3)
        while len(active) > trace.random.randint(20, 60):
            trace.free(*active.pop(trace.random.randrange(len(active)))[2])
        for stream, length, _ in trace.random.sample(active, min(6, len(active))):
            sizes = [16 << 10, 64 << 10, MIB, length * 64]
            trace.free(*[trace.get(trace.random.choice(sizes), stream) for _ in range(8)])


def randomly(trace, calls=20_000, live=100):
    """Sizes of 2 to 64 MiB that hardly come again, freed in no order."""
    held = []
    for _ in range(calls):
        if len(held) == live:
            trace.free(held.pop(trace.random.randrange(live)))
        held.append(trace.get(trace.random.randint(2 * MIB, 64 * MIB)))
        trace.work(9e-5)


if __name__ == "__main__":
    for seed, kind in enumerate((experts, graphs, generation, server, randomly), 1):
        made = Trace(seed)
        kind(made)
        made.save(pathlib.Path(sys.argv[1]) / f"{kind.__name__}.csv.gz")
        print(f"{kind.__name__}: {len(made.rows)} calls, {made._now:.1f} s")
