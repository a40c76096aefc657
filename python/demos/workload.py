"""What the demos have in common: an allocator chosen before CUDA is touched, steps that are timed, and a
line of JSON at the end."""

import argparse
import hashlib
import itertools
import json
import os
import pathlib
import statistics
import struct
import sys
import time

import record

#: Before `import torch`, as cuBLAS and PyTorch read them early.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

#: Each by its name on the command line.
ALLOCATORS = ("torch", "expandable", "vpmm")


def arguments(description, **further):
    """The command line: the allocator, the steps, a limit, and what a workload has beside."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--allocator", choices=ALLOCATORS, default="vpmm")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=20, help="steps that are not timed")
    parser.add_argument("--limit", type=float, help="the most memory in GB (10^9 bytes)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", metavar="FILE.csv.gz", help="log the allocations of --allocator torch")
    for name, (kind, default) in further.items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=default)
    return parser.parse_args()


def choose(args):
    """Sets the allocator up; answers torch."""
    if args.allocator == "expandable":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    import torch

    if args.allocator == "vpmm":
        import vpmm.torch

        vpmm.torch.use(**({"limit": int(args.limit * 1e9)} if args.limit else {}))
    elif args.limit:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.limit * 1e9 / total)
    if args.record:
        record.begin(torch)
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    # It would write to every new tensor, which no program does.
    torch.utils.deterministic.fill_uninitialized_memory = False
    return torch


def fingerprint(values):
    """A short name of numbers, different if any of their bits is."""
    return hashlib.sha256(b"".join(struct.pack("<d", value) for value in values)).hexdigest()[:16]


def run(args, torch, step):
    """Calls ``step(number)``, which answers a loss on the device, and prints what came of it."""
    losses, marks = [], []
    out_of_memory = None
    cuda = torch.cuda
    number = 0
    begin = None
    try:
        for number in range(args.steps):
            if number == args.warmup:
                cuda.synchronize()
                begin = time.perf_counter()
            mark = cuda.Event(enable_timing=True)
            mark.record()
            marks.append(mark)
            losses.append(step(number).detach())
        cuda.synchronize()
    except cuda.OutOfMemoryError as error:
        out_of_memory = str(error).splitlines()[0]
    end = time.perf_counter()
    if args.record:
        record.end(torch, args.record)
    peak, held = cuda.max_memory_allocated(), cuda.max_memory_reserved()
    values = [] if out_of_memory else torch.stack(losses).double().tolist()
    free, total = cuda.mem_get_info()
    timed = args.steps - args.warmup
    result = {
        "workload": pathlib.Path(sys.argv[0]).stem,
        "allocator": args.allocator,
        "device": cuda.get_device_name(),
        "torch": torch.__version__,
        "steps": number if out_of_memory else args.steps,
        "out_of_memory": out_of_memory,
        "losses": fingerprint(values),
        "first_loss": values[0] if values else None,
        "last_loss": values[-1] if values else None,
        "peak_allocated_bytes": peak,
        "peak_held_bytes": held,
        "held_per_allocated": round(held / peak, 5) if peak else None,
        # With the context and what libraries take for themselves.
        "device_used_bytes": total - free,
    }
    if not out_of_memory and timed > 1:
        gaps = [a.elapsed_time(b) for a, b in itertools.pairwise(marks[args.warmup :])]
        result["step_ms"] = round((end - begin) / timed * 1e3, 4)
        result["median_step_ms"] = round(statistics.median(gaps), 4)
        result["first_steps_s"] = round(marks[0].elapsed_time(marks[args.warmup]) / 1e3, 3)
    if args.allocator == "vpmm":
        import dataclasses

        import vpmm
        import vpmm.torch

        result["pool"] = dataclasses.asdict(vpmm.statistics())
        result["failed_frees"] = vpmm.torch.failed_frees()
    else:
        stats = cuda.memory_stats()
        result["retries"] = stats.get("num_alloc_retries", 0)
    print(json.dumps(result))
    return result
