"""Heaps of the process's pool that stand apart, as PyTorch's MemPool does."""

from __future__ import annotations

import collections
import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

from ._errors import Error
from ._library import answer, block, call, encoded, ffi, lib
from ._pool import Pool, Statistics, bytes_of, statistics_by
from ._sleep import resume, suspend


class HeapMemPool:
    """A heap of the process's pool on a device, whose memory nobody else gets.

    With a ``name`` it is the heap that :func:`vpmm.tag` has by that name. Without one it is one of its own;
    when the last reference goes, its free memory goes back to the device, and what is still allocated
    follows at the next ``empty_cache`` or :func:`vpmm.trim` after it was freed. One that is asleep then
    wakes, with what it held.
    """

    _numbers: ClassVar[Iterator[int]] = itertools.count()
    #: Heaps that were given up, by the device: they serve again, as the addresses of each are kept. No lock,
    #: but what happens at one go: the garbage collector gives heaps up anywhere, also where one is taken.
    _resting: ClassVar[dict[int, collections.deque[tuple[int, Any]]]] = {}

    def __init__(self, name: str | None = None, *, device: int = 0):
        self.device = device
        if name is None:
            self._number, self._heap = self._rested(device) or self._made(device)
            self.name = _name_of(self._number)
            self._end = weakref.finalize(self, self._give_up, device, self._number, self._heap)
            self._end.atexit = False
        else:
            self._number, self.name, self._heap = next(self._numbers), name, _open(name, device)

    @classmethod
    def _made(cls, device: int) -> tuple[int, Any]:
        number = next(cls._numbers)
        return number, _open(_name_of(number), device)

    @classmethod
    def _rested(cls, device: int) -> tuple[int, Any] | None:
        """A heap that was given up, and of which nothing is allocated any more."""
        resting = cls._resting.setdefault(device, collections.deque())
        for _ in range(len(resting)):
            try:
                number, heap = resting.pop()
            except IndexError:
                # Others were quicker.
                break
            with contextlib.suppress(Error):
                if statistics_by(lib.vpmm_tagged_stats, heap).live_count == 0:
                    # Where there was no memory for that when it was given up, or is none now.
                    cls._wake(device, number, heap)
                    return number, heap
            resting.appendleft((number, heap))
        return None

    @staticmethod
    def _wake(device: int, number: int, heap: Any) -> None:
        """With what is still allocated as it was: nobody else can resume it."""
        if answer("uint32_t", lib.vpmm_tagged_is_asleep, heap):
            live_count = statistics_by(lib.vpmm_tagged_stats, heap).live_count
            resume(_name_of(number), empty=live_count == 0, device=device)

    @classmethod
    def _give_up(cls, device: int, number: int, heap: Any) -> None:
        try:
            cls._wake(device, number, heap)
            call(lib.vpmm_tagged_trim_to, heap, 0, ffi.NULL)
        except Error:
            # Nobody is there to be told; the next trim of the pool tries again.
            pass
        cls._resting.setdefault(device, collections.deque()).append((number, heap))

    @property
    def id(self) -> tuple[int, int]:
        """Two numbers, as PyTorch's has them."""
        return (0, self._number)

    @contextlib.contextmanager
    def using(self) -> Iterator[HeapMemPool]:
        """What this thread allocates in the block on the pool's device comes from it."""
        with block() as this_block:
            call(lib.vpmm_python_push_tag, this_block, encoded(self.name), self.device)
            yield self

    def statistics(self) -> Statistics:
        """What the heap holds."""
        return statistics_by(lib.vpmm_tagged_stats, self._heap)

    def trim(self, keep: int | str = 0) -> int:
        """Gives free memory of the heap back to the device until so much is held; answers the bytes."""
        return answer("uint64_t", lib.vpmm_tagged_trim_to, self._heap, bytes_of(keep))

    def suspend(self, **options: Any) -> int:
        """Gives all of its memory to the device: :func:`vpmm.suspend`."""
        return suspend(self.name, device=self.device, **options)

    def resume(self, **options: Any) -> int:
        """Brings it back: :func:`vpmm.resume`."""
        return resume(self.name, device=self.device, **options)

    def __repr__(self) -> str:
        now = self.statistics()
        sizes = f"live={now.live_bytes}, held={now.mapped_bytes}"
        return f"HeapMemPool({self.name!r}, device={self.device}, {sizes})"


def _name_of(number: int) -> str:
    return f"mem pool {number}"


def _open(name: str, device: int) -> Any:
    pool = Pool.of_process(device)
    heap = answer("vpmm_tagged *", lib.vpmm_tagged_open, pool._handle, encoded(name))
    return ffi.gc(heap, lib.vpmm_tagged_release)
