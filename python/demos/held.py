"""Where a pool's memory is that nobody has: by what it waits for, and by the size of its pieces."""

import itertools

MIB = 1 << 20

#: What an extent has at least. Whole ones that are free can move.
GRANULE = 2 * MIB

#: Sizes of pieces, each from the one before.
SIZES = {"below 2 MiB": 2 * MIB, "2 to 20 MiB": 20 * MIB, "from 20 MiB": None}

#: What a block that is not live is, as snapshots say it.
KINDS = {
    "cached": "front",
    "deferred": "deferred",
    "pending": "shards",
    "idle": "common",
    "moving": "in transit",
}

GAPS = "between live"


def spans(segment):
    """The pieces of a segment without a gap: address, bytes, what it is. What no block has is on its way."""
    at = segment["address"]
    for block in segment["blocks"]:
        if block["address"] > at:
            yield at, block["address"] - at, "moving"
        yield block["address"], block["size"], block["vpmm_state"]
        at = block["address"] + block["size"]
    end = segment["address"] + segment["total_size"]
    if at < end:
        yield at, end - at, "moving"


def size_of(count):
    """Which of the sizes so many bytes are of."""
    return next(name for name, most in SIZES.items() if most is None or count < most)


def where(segments):
    """What a snapshot's segments hold: live bytes, and for each kind of other memory, and for all kinds side
    by side between two live blocks, the bytes and pieces of each size. Of the latter also what is in whole
    granules."""
    kinds = {kind: {size: [0, 0] for size in SIZES} for kind in [*KINDS.values(), GAPS]}
    live = held = whole = 0

    def note(kind, count):
        entry = kinds[kind][size_of(count)]
        entry[0] += count
        entry[1] += 1

    for segment in segments:
        if segment["is_asleep"]:
            continue
        held += segment["total_size"]
        for is_live, group in itertools.groupby(spans(segment), lambda span: span[2] == "live"):
            pieces = list(group)
            begin, end = pieces[0][0], pieces[-1][0] + pieces[-1][1]
            if is_live:
                live += end - begin
                continue
            for _, count, state in pieces:
                note(KINDS[state], count)
            note(GAPS, end - begin)
            whole += max(end // GRANULE - -(-begin // GRANULE), 0) * GRANULE
    return {"live_bytes": live, "held_bytes": held, "kinds": kinds, "whole_granule_bytes": whole}


def table(found):
    """It as lines of text."""
    free = found["held_bytes"] - found["live_bytes"]
    if "statistics" in found:
        yield f"the most that was live until then: {found['statistics']['peak_live_bytes'] / 1e9:.3f} GB"
    yield (
        f"held {found['held_bytes'] / 1e9:.3f} GB, live {found['live_bytes'] / 1e9:.3f}, "
        f"else {free / 1e9:.3f}: held / live = {found['held_bytes'] / max(found['live_bytes'], 1):.4f}"
    )
    yield f"{'GB in pieces':>14}" + "".join(f"{size:>20}" for size in SIZES) + f"{'all':>20}"
    for kind, sizes in found["kinds"].items():
        cells = [*sizes.values(), [sum(column) for column in zip(*sizes.values(), strict=True)]]
        yield f"{kind:>14}" + "".join(f"{bytes_ / 1e9:>11.3f} in {count:>5}" for bytes_, count in cells)
    yield (
        f"of what is {GAPS} blocks {found['whole_granule_bytes'] / 1e9:.3f} GB are whole granules, which can "
        f"move, and {(free - found['whole_granule_bytes']) / 1e9:.3f} GB less than one at an end"
    )


def fullest(torch, work):
    """Calls a function, and looks at the process's pool after each of PyTorch's operations: :func:`where` at
    the moment when most was live, with the pool's statistics then."""
    import dataclasses

    from torch.utils._python_dispatch import TorchDispatchMode

    import vpmm

    # The way up to what has been seen before is of no interest.
    most, segments, statistics = vpmm.statistics().peak_live_bytes // 2, None, None

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), further=None):
            nonlocal most, segments, statistics
            made = function(*arguments, **(further or {}))
            now = vpmm.statistics()
            # Another one for each few thousandths is often enough.
            if now.live_bytes > most * 1.003:
                most, segments, statistics = now.live_bytes, vpmm.snapshot()["segments"], now
            return made

    with Watch():
        work()
    if segments is None:
        return None
    return {**where(segments), "statistics": dataclasses.asdict(statistics)}
