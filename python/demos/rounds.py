"""Allocators measured in short turns, each by a process that lives on: what a machine does to one of them in
a quick or a slow phase it does to all, so what counts is the ratio of two turns of one round, which have the
same steps."""

import math
import statistics
import time

import ratios
import turns
from workload import times

#: The one that is compared with the others.
OURS = "vpmm"


def labels(allocators):
    """A name for each; one that comes again tells what a figure is worth, as both should be the same."""
    return [
        name if allocators.index(name) == at else f"{name}#{allocators[:at].count(name) + 1}"
        for at, name in enumerate(allocators)
    ]


def order(names, number):
    """Whose turns come when in a round: each is at each place, after each other, as often."""
    first = number % len(names)
    turned = names[first:] + names[:first]
    return turned if number // len(names) % 2 == 0 else turned[::-1]


class OutOfMemory(Exception):
    """A workload did not fit."""


class Measurement:
    """Processes of one workload, and their rounds."""

    def __init__(self, commands, say=print):
        self._say = say
        self._processes = {}
        self.rounds = []
        try:
            # They get ready beside one another, which is not timed.
            for label, command in commands.items():
                self._processes[label] = turns.Process(label, command)
            ready = [process.answer(600) for process in self._processes.values()]
            self._warmup = ready[0]["warmup"]
        except BaseException:
            self.end()
            raise

    def end(self):
        for process in self._processes.values():
            process.end()

    def turn(self, label, steps):
        made = self._processes[label].ask("turn", steps)
        if "out_of_memory" in made:
            raise OutOfMemory(f"{label}: at step {made['steps']}: {made['out_of_memory']}")
        return made

    def warm_up(self, seconds, cycle):
        """The first steps, in whole cycles where there are any; how many of them take so many seconds where
        they take longest, or a cycle."""
        slowest = 0.0
        first = max(self._warmup, 1)
        if cycle:
            first = cycle * max(math.ceil(first / cycle), 2)
        for label in self._processes:
            made = self.turn(label, first)
            slowest = max(slowest, statistics.median(made["gaps_ms"]))
            self._say(f"    first {made['steps']} steps, {label}: {made['wall_s']:.1f} s")
        return cycle or max(round(seconds * 1e3 / max(slowest, 1e-3)), 1)

    def run(self, steps, most, seconds):
        """Rounds of so many steps a turn, until there are enough or the time is over; but each allocator has
        each place once."""
        names = list(self._processes)
        begin = time.perf_counter()
        for number in range(most):
            if number >= len(names) and time.perf_counter() - begin > seconds:
                break
            made = {label: self.turn(label, steps) for label in order(names, number)}
            self.rounds.append(made)
            each = {label: 1e3 * made[label]["wall_s"] / steps for label in names}
            text = "  ".join(f"{label} {took:.3f}" for label, took in each.items())
            if OURS in each:
                by = (f"{peer} {each[OURS] / each[peer]:.4f}" for peer in names if peer != OURS)
                text += f" ms a step; {OURS} / {', '.join(by)}"
            self._say(f"    round {number + 1:>3} of {most}: {text}")

    def ask(self, label, what, *arguments):
        return self._processes[label].ask(what, *arguments)

    def results(self):
        """Of each, what came of it, and of its turns."""
        return {
            label: {**process.ask("result"), "label": label, **times([made[label] for made in self.rounds])}
            for label, process in self._processes.items()
        }

    def beside(self, work):
        """What is beside the point: where it fails the rest stands."""
        try:
            return work()
        except (turns.Failed, OutOfMemory) as error:
            self._say(f"    failed: {error}")
            return None

    def busy(self, steps):
        """The GPU's own time in further steps, as the first process has it told, and what these steps take
        the others, which are not slowed by the telling."""
        first, *others = self._processes
        told = self.ask(first, "profile", steps)
        walls = {label: self.turn(label, steps)["wall_s"] for label in others}
        return {
            "steps": steps,
            "profiled": first,
            "launches": told["launches"],
            "busy_ms": told["busy_s"] / steps * 1e3,
            "profiled_wall_ms": told["wall_s"] / steps * 1e3,
            "wall_ms": {label: wall / steps * 1e3 for label, wall in walls.items()},
        }


def compared(rounds, base, what="wall_s"):
    """Of each other, the time of a base's turn by that of its own in the same round."""
    return {
        label: ratios.summary([made[base][what] / made[label][what] for made in rounds])
        for label in rounds[0]
        if label != base
    }


def undisturbed(rounds, base):
    """Where every turn has the same steps: what a cycle of them takes each, taking each step from the turn
    where it was fastest, since whatever disturbs a step makes it slower. Of each other the base's by its own;
    and the same by each quarter of the rounds."""

    def cycle(label, some):
        return sum(map(min, zip(*(made[label]["gaps_ms"] for made in some), strict=True)))

    labels_ = list(rounds[0])
    quarters = [rounds[at::4] for at in range(4) if len(rounds) >= 4]

    def by(label):
        ratio = cycle(base, rounds) / cycle(label, rounds)
        return {"ratio": ratio, "quarters": [cycle(base, some) / cycle(label, some) for some in quarters]}

    steps = len(rounds[0][base]["gaps_ms"])
    return {
        "rounds": len(rounds),
        "step_ms": {label: cycle(label, rounds) / steps for label in labels_},
        "ratios": {label: by(label) for label in labels_ if label != base},
    }


def best(compared_):
    """Which of the others the base does worst against."""
    return max(compared_, key=lambda label: compared_[label]["median"])


def measure(workload, commands, options, say=print):
    """A workload under allocators in turns: what came of each, and what the turns say of ours, and of one
    that was measured twice."""
    measurement = Measurement(commands, say)
    made = {"workload": workload, "results": {}, "ratios": {}, "processor": {}, "undisturbed": None}
    made |= {"busy": None, "where": None}
    try:
        steps = measurement.warm_up(options.turn_seconds, options.cycle)
        measurement.run(steps, options.rounds, options.seconds)
        made["turn_steps"] = steps
        made["rounds_s"] = [
            {label: round(turn["wall_s"], 6) for label, turn in one.items()} for one in measurement.rounds
        ]
        made["results"] = measurement.results()
        names = list(commands)
        if OURS in names and len(names) > 1:
            made["ratios"][OURS] = compared(measurement.rounds, OURS)
            made["processor"] = compared(measurement.rounds, OURS, "processor_s")
            if options.cycle:
                made["undisturbed"] = undisturbed(measurement.rounds, OURS)
        for label in names:
            if "#" in label and not label.startswith(OURS):
                first = label.partition("#")[0]
                made["ratios"][label] = {first: compared(measurement.rounds, label)[first]}
        if options.profile:
            made["busy"] = measurement.beside(lambda: measurement.busy(min(options.profile, steps)))
        if options.where and OURS in names:
            made["where"] = measurement.beside(lambda: measurement.ask(OURS, "where", options.where * steps))
    finally:
        measurement.end()
    return made
