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

import busy
import held
import record
import turns

#: Before `import torch`, as cuBLAS and PyTorch read them early.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

#: Each by its name on the command line.
ALLOCATORS = ("torch", "expandable", "vpmm")

#: A GPU that is so little behind its host has nothing to do before the next launch or two.
CAUGHT_UP_MS = 0.1


def settings(text):
    """Settings of a pool, as ``vpmm.Pool`` has them: numbers, and what is none."""

    def value(word):
        for kind in (int, float):
            try:
                return kind(word)
            except ValueError:
                pass
        return word

    pairs = [pair.partition("=") for pair in text.split(";")]
    for name, _, word in pairs:
        if not (name and word):
            raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE;NAME=VALUE")
    return {name: value(word) for name, _, word in pairs}


def file_to_be(text):
    """A path that can be written to: what does not fit there is told before anything is measured."""
    try:
        # Nothing of what is there is lost.
        with open(text, "a"):
            return pathlib.Path(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from None


def arguments(description, steps=100, warmup=20, **further):
    """The command line: the allocator, the steps, a limit, and what a workload has beside."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--allocator", choices=ALLOCATORS, default="vpmm")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--warmup", type=int, default=warmup, help="steps that are not timed")
    parser.add_argument("--limit", type=float, help="the most memory in GB (10^9 bytes)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cycle", type=int, default=0, metavar="STEPS", help="the same ones again and again")
    parser.add_argument("--moves-per-second", type=int, help="of vpmm's pool, as vpmm.Pool has it")
    parser.add_argument("--settings", type=settings, metavar="NAME=VALUE;…", help="further ones of that pool")
    parser.add_argument("--where", type=int, metavar="STEPS", help="where vpmm's memory is in further steps")
    parser.add_argument("--turns", type=int, metavar="DESCRIPTOR", help="do what comes over this pipe")
    logged = "log the allocations of --allocator torch"
    parser.add_argument("--record", type=file_to_be, metavar="FILE.csv.gz", help=logged)
    for name, (kind, default) in further.items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind, default=default)
    return parser.parse_args()


def choose(args):
    """Sets the allocator up; answers torch."""
    # What the environment says would be measured under another name; the former has the last word.
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        os.environ.pop(variable, None)
    if args.allocator == "expandable":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    import torch

    if args.allocator == "vpmm":
        import vpmm.torch

        options = {"limit": int(args.limit * 1e9)} if args.limit else {}
        if args.moves_per_second is not None:
            options["moves_per_second"] = args.moves_per_second
        vpmm.torch.use(**{**options, **(args.settings or {})})
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


class Session:
    """A workload's steps, some at a time, and what came of them all."""

    def __init__(self, args, torch, step, rewind):
        self._args, self._torch, self._step, self._rewind = args, torch, step, rewind
        self._number = 0
        self._values = []
        self._out_of_memory = None

    def turn(self, steps):
        """Further steps, from an idle GPU to an idle GPU. A step's ``gap`` is the GPU's time from its begin
        to that of the next. Its ``lead`` is how far behind the host the GPU was when the host had the step
        behind it: where that is nothing the GPU waited for the host. ``processor_s`` is what all threads of
        the process worked until the last step was enqueued. ``handles`` are vpmm's that moved or were
        made."""
        cuda = self._torch.cuda
        losses, marks, returned = [], [], []

        def mark():
            event = cuda.Event(enable_timing=True)
            event.record()
            marks.append(event)
            returned.append(time.perf_counter())

        cuda.synchronize()
        handles = self._handles()
        begin, worked = time.perf_counter(), time.process_time()
        try:
            mark()
            for _ in range(steps):
                losses.append(self._next().detach())
                mark()
            worked = time.process_time() - worked
            cuda.synchronize()
        except cuda.OutOfMemoryError as error:
            self._out_of_memory = str(error).splitlines()[0]
            return {"out_of_memory": self._out_of_memory, "steps": self._number}
        end = time.perf_counter()
        if losses:
            self._values += self._torch.stack(losses).double().tolist()
        # The first mark was reached when it was made, as nothing was before it.
        at = [marks[0].elapsed_time(mark) for mark in marks]
        ahead = [(moment - returned[0]) * 1e3 for moment in returned]
        return {
            "steps": steps,
            "wall_s": end - begin,
            # A ratio is made of it.
            "processor_s": max(worked, 1e-9),
            "gaps_ms": [b - a for a, b in itertools.pairwise(at)],
            "leads_ms": [device - host for device, host in zip(at[1:], ahead[1:], strict=True)],
            "handles": self._handles() - handles,
        }

    def _handles(self):
        """Those that vpmm has made or moved so far."""
        if self._args.allocator != "vpmm":
            return 0
        import vpmm

        now = vpmm.statistics()
        return now.extents_created + now.extents_moved

    def profile(self, steps):
        """Further steps, and how long the GPU works in them."""
        return {"steps": steps, **busy.profiled(self._torch, lambda: self._further(steps))}

    def where(self, steps):
        """Further steps, and where the pool's memory is at the fullest moment that is seen."""
        if self._args.allocator != "vpmm":
            return None
        return held.fullest(self._torch, lambda: self._further(steps))

    def _further(self, steps):
        for _ in range(steps):
            self._next()
        self._torch.cuda.synchronize()

    def _next(self):
        if self._args.cycle and self._number % self._args.cycle == 0:
            self._rewind()
        loss = self._step(self._number)
        self._number += 1
        return loss

    def result(self):
        """What came of the turns."""
        cuda = self._torch.cuda
        peak, most_held = cuda.max_memory_allocated(), cuda.max_memory_reserved()
        free, total = cuda.mem_get_info()
        values = [] if self._out_of_memory else self._values
        result = {
            "workload": pathlib.Path(sys.argv[0]).stem,
            "allocator": self._args.allocator,
            "device": cuda.get_device_name(),
            "torch": self._torch.__version__,
            "steps": self._number,
            "out_of_memory": self._out_of_memory,
            "losses": fingerprint(values),
            "first_loss": values[0] if values else None,
            "last_loss": values[-1] if values else None,
            "peak_allocated_bytes": peak,
            "peak_held_bytes": most_held,
            "held_per_allocated": round(most_held / peak, 5) if peak else None,
            "end_allocated_bytes": cuda.memory_allocated(),
            "end_held_bytes": cuda.memory_reserved(),
            # With the context, what libraries take for themselves, and other processes that take turns.
            "device_used_bytes": total - free,
        }
        if self._args.allocator == "vpmm":
            import dataclasses

            import vpmm
            import vpmm.torch

            result["moves_per_second"] = self._args.moves_per_second
            result["settings"] = self._args.settings
            result["pool"] = dataclasses.asdict(vpmm.statistics())
            result["failed_frees"] = vpmm.torch.failed_frees()
        else:
            counts = cuda.memory_stats()
            result["retries"] = counts.get("num_alloc_retries", 0)
            # With what was freed while another stream was at work on it, as far as the host knew.
            result["peak_active_bytes"] = counts.get("active_bytes.all.peak")
        return result


def times(turns):
    """What turns that were not out of memory took a step."""
    steps, wall = sum(turn["steps"] for turn in turns), sum(turn["wall_s"] for turn in turns)
    leads = [lead for turn in turns for lead in turn["leads_ms"]]
    bounds = [len(turns) * quarter // 4 for quarter in range(5)]
    quarters = [turns[begin:end] for begin, end in itertools.pairwise(bounds)]
    return {
        "step_ms": round(wall / steps * 1e3, 4),
        "median_step_ms": round(statistics.median(gap for turn in turns for gap in turn["gaps_ms"]), 4),
        "lead_ms": round(statistics.median(leads), 3),
        "caught_up": round(sum(lead < CAUGHT_UP_MS for lead in leads) / len(leads), 3),
        "processor_ms": round(sum(turn["processor_s"] for turn in turns) / steps * 1e3, 4),
        "handles_per_s": handles_per_s(turns),
        "handles_per_s_of_quarters": [handles_per_s(quarter) for quarter in quarters if quarter],
    }


def handles_per_s(turns):
    """What was moved or made in a second of the turns' own time."""
    return round(sum(turn["handles"] for turn in turns) / sum(turn["wall_s"] for turn in turns), 1)


def run(args, torch, step, shapes, sampler):
    """Has ``step(number)``, which answers a loss on the device, called: in turns with other processes, or by
    itself, with a line of JSON at the end. What it does by chance it does by ``shapes`` and ``sampler``."""

    def rewind():
        shapes.seed(args.seed)
        sampler.manual_seed(args.seed)

    session = Session(args, torch, step, rewind)
    if args.turns is not None:
        names = ("turn", "profile", "where", "result")
        functions = {name: getattr(session, name) for name in names}
        turns.serve(args.turns, functions, {"warmup": args.warmup})
        return
    warmup = min(args.warmup, args.steps)
    made = [session.turn(warmup)]
    if "out_of_memory" not in made[0]:
        made.append(session.turn(args.steps - warmup))
    if args.record:
        record.end(torch, args.record)
    result = session.result()
    if not result["out_of_memory"] and made[1]["steps"]:
        result |= times(made[1:])
        result["first_steps_s"] = round(sum(made[0]["gaps_ms"]) / 1e3, 3)
    if args.where and not result["out_of_memory"]:
        result["where"] = session.where(args.where)
    print(json.dumps(result))
