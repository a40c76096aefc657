"""Runs workloads under PyTorch's allocator, the same with expandable segments, and vpmm; prints tables and,
with ``--output``, writes lines of JSON.

In rounds: a process for each allocator, which take turns of some steps each. Says how long vpmm's turns take
by the others' of the same round, and how long the processor works in them, how much of a step the GPU
waits, and where vpmm's free memory is.

    python python/demos/compare.py --rounds 30 gpt,resnet,lora,generate

One run after another, each in a process of its own:

    python python/demos/compare.py --repeat 2 gpt -- --steps 100
    python python/demos/compare.py --largest batch --limit 20 gpt -- --steps 12 --warmup 2
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

import held
import ratios
import rounds
import turns
from workload import file_to_be

HERE = pathlib.Path(__file__).resolve().parent
ALLOCATORS = ("torch", "expandable", "vpmm")

NAMES = """some with commas between; one that comes twice says what is noise,
and vpmm:NAME=VALUE;NAME=VALUE has settings that vpmm.Pool has"""

#: What a pool has for `moves_per_second` where nothing is said.
DEFAULT_MOVES = 1000


def command(workload, allocator, further):
    """What runs a workload: one of the demos, or a file."""
    file = workload if workload.endswith(".py") else str(HERE / f"{workload}.py")
    name, _, settings = allocator.partition(":")
    more = ["--settings", settings] if settings else []
    return [sys.executable, file, "--allocator", name, *more, *further]


def run(workload, allocator, further):
    """One run; what it printed."""
    done = subprocess.run(command(workload, allocator, further), capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        tail = "\n".join((done.stderr or done.stdout).splitlines()[-25:])
        return {"workload": workload, "allocator": allocator, "failed": done.returncode, "text": tail}
    result = {**json.loads(lines[-1]), "label": allocator}
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


HEAD = """    allocator, step ms (mean), (median), ms that the host is ahead of the GPU after a step (median),
    steps after which it is not, at the peak: allocated GB, held GB, held / allocated,
    at the end: allocated GB, held GB, losses"""


def row(result):
    name = f"{result.get('label', result['allocator']):>12}"
    if "failed" in result:
        return f"{name}  failed ({result['failed']}):\n{result['text']}"
    if result.get("out_of_memory"):
        return f"{name}  out of memory at step {result['steps']}"
    nothing = float("nan")
    cells = [
        f"{result.get('step_ms', nothing):9.3f}",
        f"{result.get('median_step_ms', nothing):9.3f}",
        f"{result.get('lead_ms', nothing):9.3f}",
        f"{result.get('caught_up', nothing):5.0%}",
        f"{result['peak_allocated_bytes'] / 1e9:8.3f}",
        f"{result['peak_held_bytes'] / 1e9:8.3f}",
        f"{result['held_per_allocated']:7.4f}",
        f"{result['end_allocated_bytes'] / 1e9:8.3f}",
        f"{result['end_held_bytes'] / 1e9:8.3f}",
        result["losses"],
    ]
    return "  ".join([name, *cells])


def tell_losses(good):
    """Says whether losses are the same; whether they are."""
    names = {result["losses"] for result in good}
    print("losses are the same to the bit" if len(names) == 1 else f"losses differ: {sorted(names)}")
    return len(names) == 1


def tell_held(good, allocators):
    """What each holds by one count of what is allocated for all: each allocator rounds in its own way."""
    allocated = {result["peak_allocated_bytes"] for result in good if result["allocator"] == "torch"}
    for allocator in dict.fromkeys(allocators):
        most = [r["peak_held_bytes"] for r in good if r["label"].partition("#")[0] == allocator]
        if allocated and most:
            print(f"held by {allocator} / allocated at PyTorch's peak = {max(most) / min(allocated):.4f}")


def in_rounds(workload, args, keep):
    """A workload in rounds. Whether all is well."""
    allocators = args.allocators.split(",")
    names = rounds.labels(allocators)
    commands = {}
    for label, allocator in zip(names, allocators, strict=True):
        commands[label] = command(workload, allocator, args.further)
        if args.cycle:
            commands[label] += ["--cycle", str(args.cycle)]
        if allocator.partition(":")[0] == rounds.OURS:
            # The pool counts all time; the process works in its own turns only.
            rate = DEFAULT_MOVES if args.moves_per_second is None else args.moves_per_second
            commands[label] += ["--moves-per-second", str(round(rate / len(allocators)))]
    print(f"{workload}: {', '.join(names)}, in turns", flush=True)
    begin = time.perf_counter()
    try:
        made = rounds.measure(workload, commands, args, lambda text: print(text, flush=True))
    except (turns.Failed, rounds.OutOfMemory) as error:
        print(error)
        keep({"workload": workload, "failed": str(error)})
        return False
    results = list(made["results"].values())
    for result in results:
        keep(result)
    keep({name: value for name, value in made.items() if name != "results"})
    print(HEAD)
    for result in results:
        print(row(result))
    same = tell_losses(results)
    tell_held(results, allocators)
    for base, compared in made["ratios"].items():
        for label, summed in compared.items():
            print(f"step time: {base} / {label} = {ratios.told(summed)}")
    if rounds.OURS in made["ratios"]:
        compared = made["ratios"][rounds.OURS]
        others = {label: one for label, one in compared.items() if not label.startswith(rounds.OURS)}
    else:
        others = {}
    if others:
        best = rounds.best(others)
        print(f"step time: {rounds.OURS} / the best of the others, {best}, = {ratios.told(compared[best])}")
    for label, summed in made["processor"].items():
        print(f"time of the processor: {rounds.OURS} / {label} = {ratios.told(summed)}")
    if made["undisturbed"]:
        tell_undisturbed(made["undisturbed"])
    for result in results:
        if result["allocator"] == rounds.OURS:
            rate = result["handles_per_s"]
            quarters = ", ".join(str(one) for one in result["handles_per_s_of_quarters"])
            print(
                f"{result['label']} made or moved {rate} handles a second of its own time, "
                f"in quarters of it {quarters}"
            )
    tell_busy(made["busy"])
    if made["where"]:
        print("where memory was at the fullest moment seen, in further steps:")
        print("\n".join(f"    {line}" for line in held.table(made["where"])))
    print(f"{workload} took {time.perf_counter() - begin:.0f} s", flush=True)
    return same


def tell_undisturbed(undisturbed):
    each = ", ".join(f"{label} {took:.3f}" for label, took in undisturbed["step_ms"].items())
    print(f"ms a step, each step at its fastest of {undisturbed['rounds']} rounds: {each}")
    for label, one in undisturbed["ratios"].items():
        quarters = ", ".join(f"{ratio:.4f}" for ratio in one["quarters"])
        print(f"    {rounds.OURS} / {label} = {one['ratio']:.4f}, of quarters of the rounds {quarters}")


def tell_busy(busy):
    if not busy:
        return
    print(
        f"in {busy['steps']} further steps the GPU worked {busy['busy_ms']:.3f} ms a step, in "
        f"{busy['launches'] / busy['steps']:.0f} pieces, of {busy['profiled_wall_ms']:.3f} "
        f"({busy['profiled']}, slowed by the profiler)"
    )
    for label, wall in busy["wall_ms"].items():
        waited = 1 - busy["busy_ms"] / wall
        print(f"    {label}: of {wall:.3f} ms in the same steps; {waited:.1%} it waited for the host")


def one_after_another(workload, args, keep):
    """Runs of a workload. Whether all is well."""
    allocators = args.allocators.split(",")
    further = args.further
    if args.moves_per_second is not None:
        further = [*further, "--moves-per-second", str(args.moves_per_second)]
    results = []
    print(f"{workload}:\n{HEAD}", flush=True)
    for turn in range(args.repeat):
        for allocator in allocators[turn % len(allocators) :] + allocators[: turn % len(allocators)]:
            results.append(run(workload, allocator, further))
            keep(results[-1])
            print(row(results[-1]), flush=True)
    good = [result for result in results if "failed" not in result and not result["out_of_memory"]]
    same = tell_losses(good)
    tell_held(good, allocators)
    times = {}
    for result in good:
        if "step_ms" in result:
            times.setdefault(result["label"], []).append(result["step_ms"])
    best = {allocator: min(values) for allocator, values in times.items()}
    others = [value for label, value in best.items() if label != "vpmm"]
    if "vpmm" in best and others:
        print(f"step time: vpmm / the best of the others = {best['vpmm'] / min(others):.4f}")
    for result in good:
        if result.get("where"):
            print("where memory was at the fullest moment seen, in further steps:")
            print("\n".join(f"    {line}" for line in held.table(result["where"])))
    return same and len(good) == len(results)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("workload", help="one, or some with commas between")
    parser.add_argument("--allocators", default=",".join(ALLOCATORS), help=NAMES)
    parser.add_argument("--moves-per-second", type=int, help="of vpmm's pool, in its own time")
    parser.add_argument("--output", "--json", type=file_to_be, metavar="FILE")
    turn = parser.add_argument_group("in rounds")
    turn.add_argument("--rounds", type=int, default=0, help="at most so many; 0: one run after another")
    turn.add_argument("--seconds", type=float, default=60.0, help="no further rounds after so long")
    turn.add_argument("--turn-seconds", type=float, default=0.5, help="about what a turn takes")
    turn.add_argument("--cycle", type=int, default=0, metavar="STEPS", help="the same steps in every turn")
    turn.add_argument("--profile", type=int, default=8, metavar="STEPS", help="how long the GPU works then")
    turn.add_argument("--where", type=int, default=2, metavar="TURNS", help="where vpmm's memory is then")
    runs = parser.add_argument_group("one run after another")
    runs.add_argument("--repeat", type=int, default=1)
    runs.add_argument("--largest", metavar="ARGUMENT", help="find its largest value within --limit")
    runs.add_argument("--limit", type=float, default=20.0, help="GB (10^9 bytes), for --largest")
    runs.add_argument("--most", type=int, default=256, help="the largest value tried")
    parser.add_argument("further", nargs="*", help="after --: for the workload")
    return parser.parse_args()


def main():
    args = arguments()

    def keep(result):
        if args.output:
            with args.output.open("a") as file:
                file.write(json.dumps(result) + "\n")

    good = True
    for workload in args.workload.split(","):
        if args.largest:
            for allocator in args.allocators.split(","):
                made = largest(workload, allocator, args.further, args.largest, args.limit, args.most)
                keep(made)
                print(json.dumps(made), flush=True)
                good &= "failed" not in made
        elif args.rounds:
            good &= in_rounds(workload, args, keep)
        else:
            good &= one_after_another(workload, args, keep)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
