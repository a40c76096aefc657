"""What the pools hold and did, for PyTorch's memory_viz page and for programs."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import pickle
import sys
from collections.abc import Iterator
from typing import Any

from ._library import NULL, Raised, call, ffi, lib

#: With what ends a folder's name: `vpmm_tools.py` beside it is somebody else's.
_PACKAGE = os.path.join(os.path.dirname(__file__), "")

_MOST_FRAMES = 64

#: A stack of calls, the innermost first: file, line, function.
_Place = tuple[tuple[str, int, str], ...]


class _Places:
    """The stacks of calls of the last events, by numbers that no two ever share.

    No lock: in between the garbage collector and signals' handlers may run, free memory, and come here again.
    Each step is one of a dictionary's or a counter's, which nothing comes in between of.
    """

    _calls = itertools.count(1)

    def __init__(self, events: int):
        # With room for threads that have a number, and not yet the event with it.
        self._span = events + 1000
        self._now: dict[_Place, int] = {}
        self._before: dict[_Place, int] = {}

    def number_of(self, place: _Place) -> int:
        call = next(self._calls)
        if call % self._span == 0:
            # An event that is still kept is of these calls, or of as many before.
            self._before, self._now = self._now, {}
        now = self._now
        return now.get(place) or now.setdefault(place, self._before.get(place, call))

    def by_number(self) -> dict[int, _Place]:
        # The copies are made at one go, while others may go on.
        both = self._before.copy(), self._now.copy()
        return {number: place for places in both for place, number in places.items()}


_places = _Places(0)
_is_asked = False

#: With the address of a class of exceptions, in place of a number: the library has the thread raise one.
_RAISED = 1 << 63
#: Such classes, as they are to last.
_classes: set[type[BaseException]] = set()


def has_places() -> bool:
    """Whether requests ask where the program is."""
    return _is_asked


def _raised(kind: type[BaseException], error: BaseException, trace: Any) -> int:
    """What a signal's handler raises, as of Ctrl-C, is the program's. That it is deep in calls is not."""
    if issubclass(kind, RecursionError | MemoryError):
        return 0
    _classes.add(kind)
    return _RAISED | id(kind)


@ffi.callback("uint64_t(void)", error=0, onerror=_raised)
def _where() -> int:
    frames: list[tuple[str, int, str]] = []
    frame = sys._getframe().f_back
    while frame is not None and len(frames) < _MOST_FRAMES:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE):
            frames.append((code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return _places.number_of(tuple(frames))


def record_history(most: int = 100_000, *, frames: bool = True) -> None:
    """Keeps the last so many requests, frees and failures of the process's pools for :func:`snapshot`, with
    the Python calls that led to each; what was kept before is forgotten. 0 ends it. Without it a request
    costs nothing more; with frames it costs microseconds."""
    global _places, _is_asked
    if not 0 <= most < 1 << 64:
        raise ValueError(f"a history of {most} requests")
    before = _places, _is_asked
    _places = _Places(most)
    _is_asked = _is_asked or bool(most and frames)
    if most and frames:
        # Not at once: a tensor may end while an exception is under way, or the interpreter.
        place = ffi.addressof(lib, "vpmm_python_where"), ffi.cast("void *", _where)
    else:
        place = NULL, NULL
    try:
        call(lib.vpmm_process_record_history, most, *place)
    except BaseException:
        # What is kept goes on, with its places.
        _places, _is_asked = before
        raise
    _is_asked = bool(most and frames)


def _frames(place: _Place) -> list[dict[str, Any]]:
    return [{"filename": file, "line": line, "name": name} for file, line, name in place]


def _with_requests(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """PyTorch tells of a free twice: when it is asked for, and when the memory is its stream's again, which
    here is at once. Its page takes one without the other for a block that waits."""
    for event in events:
        if event["action"] == "free_completed":
            yield {**event, "action": "free_requested"}
        yield event


def _unmapped(events: list[dict[str, Any]], segments: list[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    """From where to where blocks were in which nothing is mapped any more."""
    ends = (1 << 64, 1 << 64)
    mapped = iter(sorted((made["address"], made["address"] + made["total_size"]) for made in segments))
    blocks = sorted((event["addr"], event["addr"] + event["size"]) for event in events if event.get("addr"))
    segment, done = next(mapped, ends), 0
    for begin, end in blocks:
        begin = max(begin, done)
        while begin < end:
            if segment[1] <= begin:
                segment = next(mapped, ends)
            elif segment[0] <= begin:
                begin = segment[1]
            else:
                stop = min(end, segment[0])
                yield begin, stop
                begin = stop
        done = max(done, end)


def taken(function: Any, *arguments: Any) -> dict[str, Any]:
    """What a function of the library's writes."""
    parts: list[bytes] = []
    raised = Raised()

    @ffi.callback("void(char *, size_t)", onerror=raised.note)
    def write(text: Any, length: int) -> None:
        parts.append(ffi.buffer(text, length)[:])

    call(function, *arguments, ffi.addressof(lib, "vpmm_python_write"), ffi.cast("void *", write))
    raised.go_on()
    made = json.loads(b"".join(parts))
    for segment in made["segments"]:
        segment["segment_pool_id"] = tuple(segment["segment_pool_id"])
    return made


def written(made: dict[str, Any], path: str | os.PathLike[str] | None) -> dict[str, Any]:
    """The same, and in a file if there is to be one."""
    if path is not None:
        file = pathlib.Path(path)
        if file.suffix == ".json":
            file.write_text(json.dumps(made))
        else:
            file.write_bytes(pickle.dumps(made, protocol=4))
    return made


def snapshot(path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """What the process's pools hold, and did since :func:`record_history`, in the structure of
    ``torch.cuda.memory._snapshot()``. What is unmapped by now of where blocks were is told last, as
    ``segment_unmap``: the pool keeps no notes of when it was. With a path it is also written: as JSON where
    the name ends in ``.json``, else as a pickle of protocol 4, which https://pytorch.org/memory_viz opens."""
    made = taken(lib.vpmm_process_snapshot)
    places = _places.by_number()
    last: dict[tuple[int, int], dict[str, Any]] = {}
    for device, events in enumerate(made["device_traces"]):
        events = made["device_traces"][device] = list(_with_requests(events))
        for event in events:
            event["frames"] = _frames(places.get(event.pop("where"), ()))
            if event["action"] == "alloc":
                last[device, event["addr"]] = event
    for segment in made["segments"]:
        for block in segment["blocks"]:
            made_by = last.get((segment["device"], block["address"]))
            if made_by is not None and block["vpmm_state"] == "live":
                block["frames"], block["requested_size"] = made_by["frames"], made_by["size"]
    for device, events in enumerate(made["device_traces"]):
        own = [segment for segment in made["segments"] if segment["device"] == device]
        # Its page looks for a segment around each block that there was.
        events += [
            {
                **{"action": "segment_unmap", "addr": begin, "size": end - begin, "stream": 0},
                **{"time_us": events[-1]["time_us"], "frames": []},
            }
            for begin, end in _unmapped(events, own)
        ]
    return written(made, path)
