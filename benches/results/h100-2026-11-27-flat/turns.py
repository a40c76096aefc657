"""Two builds of vpmm in turns, on one processor after another.

python3 turns.py FOLDER SECONDS DEVICE CASE...     in the repository; FOLDER has vpmm.base and vpmm.now

A case is one of `vpmm bench`, or t:TRACE.
"""

import collections
import json
import os
import subprocess
import sys
import time

BUILDS = ["base", "now"]
folder, seconds, device, *cases = sys.argv[1:]


def measure(build, case, processor):
    command = ["taskset", "-c", str(processor), f"{folder}/vpmm.{build}"]
    if case.startswith("t:"):
        command += ["replay", f"traces/{case[2:]}.csv.gz", "--repeat", "60"]
    else:
        command += ["bench", "--case", case, "--allocator", "default"]
    output = json.loads(subprocess.check_output([*command, "--device", device, "--json"], text=True))
    return min(output.get("pass_ns_per_op") or [output["ns_per_op"]])


found, begin, rounds = collections.defaultdict(list), time.time(), 0
while time.time() - begin < float(seconds):
    processor = (rounds * 5 + 1) % os.cpu_count()
    rounds += 1
    for case in cases:
        for build in BUILDS if rounds % 2 else reversed(BUILDS):
            found[case, build].append(measure(build, case, processor))

for case in cases:
    line = []
    for build in BUILDS:
        took = sorted(found[case, build])
        parts = [took[len(took) // part] for part in (10, 4, 2)]
        line.append(f"{build} n={len(took)} min {took[0]:.2f} p10 {parts[0]:.2f} p25 {parts[1]:.2f} med {parts[2]:.2f}")
    print(case, "|".join(line))
