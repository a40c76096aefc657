"""Two builds of vpmm in turns, on one processor after another of a machine that others use, too.

python3 turns.py FOLDER SECONDS CASE...     in the repository; FOLDER has vpmm.base and vpmm.now

A case is one of `vpmm bench`, or t:TRACE. A processor is left alone while a loop in registers (turn.c) takes
more than 1.1 times what it takes at best, and so is what was measured just before that.
"""

import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

BUILDS = ["base", "now"]
MOST = 1.1
folder, seconds, *cases = sys.argv[1:]
loop = tempfile.mkdtemp() + "/turn"
subprocess.run(["gcc", "-O2", "-o", loop, pathlib.Path(__file__).with_name("turn.c")], check=True)


def on(processor, *command):
    return subprocess.check_output(["taskset", "-c", str(processor), *command], text=True)


def turn(processor):
    return float(on(processor, loop))


def measure(build, case, processor):
    command = [f"{folder}/vpmm.{build}"]
    if case.startswith("t:"):
        command += ["replay", f"traces/{case[2:]}.csv.gz", "--repeat", "40"]
        return min(json.loads(on(processor, *command, "--device", "cuda:0", "--json"))["pass_ns_per_op"])
    command += ["bench", "--case", case, "--allocator", "default"]
    return json.loads(on(processor, *command, "--device", "cuda:0", "--json"))["ns_per_op"]


processors = os.cpu_count()
best = min(turn(processor) for processor in range(processors) for _ in range(2))
found, begin, rounds, left_out = collections.defaultdict(list), time.time(), 0, 0
while time.time() - begin < float(seconds):
    processor = (rounds * 5 + 1) % processors
    rounds += 1
    for case in cases:
        if turn(processor) > MOST * best:
            left_out += 1
            continue
        for build in BUILDS if rounds % 2 else reversed(BUILDS):
            took = measure(build, case, processor)
            if turn(processor) > MOST * best:
                left_out += 1
            else:
                found[case, build].append(took)

print(f"a turn of a loop in registers, ns, at best: {best}; runs left out: {left_out}")
for case in cases:
    for build in BUILDS:
        all_of_it = sorted(found[case, build])
        if all_of_it:
            middle = all_of_it[len(all_of_it) // 2]
            print(case, build, len(all_of_it), f"[{all_of_it[0]}] median {middle}")
