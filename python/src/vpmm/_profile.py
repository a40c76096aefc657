"""What a part of a program holds at most."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

from . import _pool
from ._library import but_in_a_child, lock_of_each_process

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclasses.dataclass
class Record:
    """What was seen under a name, over all its calls."""

    name: str
    calls: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    """The most that was live beyond what was live at the begin, of all calls. Small requests of the paged
    profile, whose peak the pool does not know, count as far as they were kept."""
    kept_bytes: int = 0
    """What was live at the ends beyond what was at the begins, in sum; what leaks adds up here."""
    peak_held_bytes: int = 0
    """The most physical memory held at the time, by the whole pool."""


_records: dict[str, Record] = {}
#: Taken once more by what runs in between: a finalizer, a signal's handler that reports.
_lock = threading.RLock()
lock_of_each_process(sys.modules[__name__], "_lock")


class profile(contextlib.ContextDecorator):
    """Notes what a block or a function has live and held at most, under a name.

    >>> with vpmm.profile("forward"):
    ...     ...
    >>> @vpmm.profile()
    ... def step(): ...
    >>> print(vpmm.report())

    A coroutine or a generator counts from its begin to its end, with what runs in between; an asynchronous
    generator raises :class:`TypeError`. It counts the whole pool of the device, whichever thread allocates.
    Blocks may be nested; the pool's own peaks, as :func:`vpmm.statistics` tells them, go on.
    """

    def __init__(self, name: str | None = None, *, device: int = 0):
        self.name, self.device = name, device
        self._stack: list[Any] = []

    def __call__(self, function: _Function) -> _Function:
        name = self.name or f"{function.__module__}.{function.__qualname__}"
        device = self.device

        # One of its own for each call, so that calls may run at the same time, and in each other. What a call
        # of these makes has done nothing yet.
        if inspect.isasyncgenfunction(function):
            raise TypeError(f"{name} is an asynchronous generator: profile a block in it")

        async def awaited(*arguments: Any, **named: Any) -> Any:
            with profile(name, device=device):
                return await function(*arguments, **named)

        def generated(*arguments: Any, **named: Any) -> Any:
            with profile(name, device=device):
                return (yield from function(*arguments, **named))

        def called(*arguments: Any, **named: Any) -> Any:
            with profile(name, device=device):
                return function(*arguments, **named)

        wrapped: Callable[..., Any] = called
        if inspect.iscoroutinefunction(function):
            wrapped = awaited
        elif inspect.isgeneratorfunction(function):
            wrapped = generated
            code = getattr(function, "__code__", None)
            if code is not None and code.co_flags & inspect.CO_ITERABLE_COROUTINE:
                wrapped = types.coroutine(wrapped)
        return cast("_Function", functools.wraps(function)(wrapped))

    def __enter__(self) -> profile:
        peaks = _pool.Peaks.enter(self.device)
        self._stack.append((peaks, time.perf_counter()))
        return self

    def __exit__(self, *_: Any) -> None:
        peaks, begin = self._stack.pop()
        with but_in_a_child():
            self._note(peaks, begin)

    def _note(self, peaks: _pool.Peaks, begin: float) -> None:
        seen, before = peaks.leave(), peaks.begin
        kept = seen.live_bytes + seen.small_live_bytes - before.live_bytes - before.small_live_bytes
        held = seen.peak_mapped_bytes + seen.peak_small_mapped_bytes
        with _lock:
            record = _records.setdefault(self.name or "unnamed", Record(self.name or "unnamed"))
            record.calls += 1
            record.seconds += time.perf_counter() - begin
            record.peak_bytes = max(record.peak_bytes, seen.peak_live_bytes - before.live_bytes, kept)
            record.kept_bytes += kept
            record.peak_held_bytes = max(record.peak_held_bytes, held)


def records() -> list[Record]:
    """What was seen so far, in the order of names' first ends."""
    with _lock:
        return [dataclasses.replace(record) for record in list(_records.values())]


def forget_records() -> None:
    """Begins anew."""
    with _lock:
        _records.clear()


def report() -> str:
    """What was seen so far, as a table."""
    head = ("name", "calls", "seconds", "peak bytes", "kept bytes", "peak held")
    rows = [
        (
            record.name,
            str(record.calls),
            f"{record.seconds:.3f}",
            f"{record.peak_bytes:,}",
            f"{record.kept_bytes:,}",
            f"{record.peak_held_bytes:,}",
        )
        for record in records()
    ]
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]

    def line(row: tuple[str, ...]) -> str:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join(cells)

    return "\n".join(line(row) for row in (head, *rows))
