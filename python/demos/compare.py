"""Runs a workload under PyTorch's allocator, the same with expandable segments, and vpmm, each in a process
of its own, in turns; prints a table and, with ``--output``, writes every run as a line of JSON.

    python python/demos/compare.py gpt --repeat 2 -- --steps 100
    python python/demos/compare.py gpt --largest batch --limit 20 -- --steps 12 --warmup 2
"""

import argparse
import json
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ALLOCATORS = ("torch", "expandable", "vpmm")


def run(workload, allocator, further):
    """One run; what it printed."""
    command = [sys.executable, str(HERE / f"{workload}.py"), "--allocator", allocator, *further]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        tail = "\n".join((done.stderr or done.stdout).splitlines()[-25:])
        return {"workload": workload, "allocator": allocator, "failed": done.returncode, "text": tail}
    result = json.loads(lines[-1])
    if done.stderr.strip():
        result["stderr"] = done.stderr.strip()[-2000:]
    return result


def largest(workload, allocator, further, name, limit, most):
    """The largest value of an argument with which the workload completes within the limit."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        made = run(workload, allocator, [*further, f"--{name}", str(middle), "--limit", str(limit)])
        if "failed" in made:
            return made
        if made["out_of_memory"]:
            high = middle - 1
        else:
            low = middle
    return {"workload": workload, "allocator": allocator, "limit_gb": limit, f"largest_{name}": low}


def row(result):
    if "failed" in result:
        return [result["allocator"], f"failed ({result['failed']}):\n{result['text']}"]
    if result.get("out_of_memory"):
        return [result["allocator"], f"out of memory at step {result['steps']}"]
    return [
        result["allocator"],
        f"{result.get('step_ms', float('nan')):9.3f}",
        f"{result.get('median_step_ms', float('nan')):9.3f}",
        f"{result['peak_allocated_bytes'] / 1e9:8.3f}",
        f"{result['peak_held_bytes'] / 1e9:8.3f}",
        f"{result['held_per_allocated']:7.4f}",
        f"{result['device_used_bytes'] / 1e9:8.3f}",
        result["losses"],
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("workload")
    parser.add_argument("--allocators", default=",".join(ALLOCATORS))
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--largest", metavar="ARGUMENT", help="find its largest value within --limit")
    parser.add_argument("--limit", type=float, default=20.0, help="GB (10^9 bytes), for --largest")
    parser.add_argument("--most", type=int, default=256, help="the largest value tried")
    parser.add_argument("--output", type=pathlib.Path)
    parser.add_argument("further", nargs="*", help="after --: for the workload")
    args = parser.parse_args()
    allocators = args.allocators.split(",")
    results = []

    def keep(result):
        results.append(result)
        if args.output:
            with args.output.open("a") as file:
                file.write(json.dumps(result) + "\n")

    if args.largest:
        for allocator in allocators:
            keep(largest(args.workload, allocator, args.further, args.largest, args.limit, args.most))
            print(json.dumps(results[-1]), flush=True)
        return int(any("failed" in result for result in results))

    print(f"{args.workload}: allocator, step ms (mean), (median), allocated GB, held GB, held/allocated,")
    print("    device in use GB, losses", flush=True)
    for turn in range(args.repeat):
        for allocator in allocators[turn % len(allocators) :] + allocators[: turn % len(allocators)]:
            keep(run(args.workload, allocator, args.further))
            print("  ".join(row(results[-1])), flush=True)
    good = [result for result in results if "failed" not in result and not result["out_of_memory"]]
    names = {result["losses"] for result in good}
    print("losses are the same to the bit" if len(names) == 1 else f"losses differ: {sorted(names)}")
    # Of one count for all: each allocator rounds in its own way.
    allocated = {result["peak_allocated_bytes"] for result in good if result["allocator"] == "torch"}
    if allocated:
        for allocator in allocators:
            held = [r["peak_held_bytes"] for r in good if r["allocator"] == allocator]
            if held:
                ratio = max(held) / min(allocated)
                print(f"held by {allocator} / allocated at PyTorch's peak = {ratio:.4f}")
    times = {}
    for result in good:
        if "step_ms" in result:
            times.setdefault(result["allocator"], []).append(result["step_ms"])
    best = {allocator: min(values) for allocator, values in times.items()}
    others = [value for allocator, value in best.items() if allocator != "vpmm"]
    if "vpmm" in best and others:
        print(f"step time: vpmm / the best of the others = {best['vpmm'] / min(others):.4f}")
    return int(len(good) < len(results) or len(names) != 1)


if __name__ == "__main__":
    sys.exit(main())
