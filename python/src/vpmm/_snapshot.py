"""What the pools hold and did, for PyTorch's memory_viz page and for programs."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import sys
import threading
from typing import Any

from ._library import NULL, call, ffi, lib

_PACKAGE = os.path.dirname(__file__)

_places: list[tuple[tuple[str, int, str], ...]] = [()]
_numbers: dict[tuple[tuple[str, int, str], ...], int] = {(): 0}
_places_lock = threading.Lock()
_most_frames = 64


@ffi.callback("uint64_t(void *)", error=0)
def _where(_: Any) -> int:
    frames = []
    frame = sys._getframe().f_back
    while frame is not None and len(frames) < _most_frames:
        code = frame.f_code
        if not code.co_filename.startswith(_PACKAGE):
            frames.append((code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    place = tuple(frames)
    with _places_lock:
        number = _numbers.setdefault(place, len(_places))
        if number == len(_places):
            _places.append(place)
    return number


def record_history(most: int = 100_000, *, frames: bool = True) -> None:
    """Keeps the last so many requests, frees and failures of the process's pools for :func:`snapshot`, with
    the Python calls that led to each; what was kept before is forgotten. 0 ends it. Without it a request
    costs nothing more; with frames it costs microseconds."""
    call(lib.vpmm_process_record_history, most, _where if most and frames else NULL, NULL)


def _frames(number: int) -> list[dict[str, Any]]:
    place = _places[number] if number < len(_places) else ()
    return [{"filename": file, "line": line, "name": name} for file, line, name in place]


def snapshot(path: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """What the process's pools hold, and did since :func:`record_history`, in the structure of
    ``torch.cuda.memory._snapshot()``. With a path it is also written: as JSON where the name ends in
    ``.json``, else as a pickle of protocol 4, which https://pytorch.org/memory_viz opens."""
    parts: list[bytes] = []

    @ffi.callback("void(void *, char *, size_t)")
    def write(_: Any, text: Any, length: int) -> None:
        parts.append(ffi.buffer(text, length)[:])

    call(lib.vpmm_process_snapshot, write, NULL)
    made = json.loads(b"".join(parts))
    last: dict[tuple[int, int], dict[str, Any]] = {}
    for device, events in enumerate(made["device_traces"]):
        for event in events:
            event["frames"] = _frames(event.pop("where"))
            if event["action"] == "alloc":
                last[device, event["addr"]] = event
    for segment in made["segments"]:
        segment["segment_pool_id"] = tuple(segment["segment_pool_id"])
        for block in segment["blocks"]:
            event = last.get((segment["device"], block["address"]))
            if event is not None and block["vpmm_state"] == "live":
                block["frames"], block["requested_size"] = event["frames"], event["size"]
    if path is not None:
        file = pathlib.Path(path)
        if file.suffix == ".json":
            file.write_text(json.dumps(made))
        else:
            file.write_bytes(pickle.dumps(made, protocol=4))
    return made
