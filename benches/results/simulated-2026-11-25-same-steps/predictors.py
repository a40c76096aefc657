"""What traces hold by how it is told which blocks stay, as the mean over sizes.

    STEPS=path/to/steps python predictors.py 0.77,1,1.31 oracle:0:0 rat3:1:1 ...

Each further argument is PRED:NOFRONT:SEG of `steps.rs`. Prints what is held by the peak of what was live, and
the share of large requests that nothing was known of.
"""

import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

RESULTS = Path("benches/results")
TRACES = [
    *[
        RESULTS / "simulated-2026-11-25-same-steps" / name
        for name in ("gpt_cycle1", "gpt_cycle4", "lora_cycle4")
    ],
    *[Path("traces") / name for name in ("gpt_train", "resnet_train")],
    RESULTS / "simulated-2026-11-23-growing" / "gpt_run",
    RESULTS / "simulated-2026-11-23-ends" / "resnet_run",
    *[
        RESULTS / "simulated-2026-11-25-programs" / name
        for name in ("lora", "unet", "seq2seq", "gnn", "moe", "cudagraphs")
    ],
]
HELD = re.compile(r"held ([0-9.]+)")
TOLD = re.compile(r"right (\d+) wrong (\d+) unknown (\d+)")


def one(trace, factor, told):
    pred, nofront, seg = told.split(":")
    settings = dict(os.environ, FACTOR=factor, PRED=pred, NOFRONT=nofront, SEG=seg)
    command = [os.environ["STEPS"], f"{trace}.csv.gz", "10", "full"]
    last = subprocess.run(
        command, env=settings, capture_output=True, text=True, check=True
    ).stdout.splitlines()[-1]
    guesses = [int(count) for count in TOLD.search(last).groups()]
    return float(HELD.search(last).group(1)), guesses[2] / sum(guesses)


for trace in TRACES:
    row = []
    for told in sys.argv[2:]:
        held, unknown = zip(*[one(trace, factor, told) for factor in sys.argv[1].split(",")])
        row.append(f"{told} {statistics.mean(held):.4f} u{statistics.mean(unknown):.2f}")
    print(trace.name.ljust(13), " | ".join(row), flush=True)
