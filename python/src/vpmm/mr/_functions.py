"""Functions of Python's that the library calls, and what they raise."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar

from .._library import ffi, lock_of_each_process


class Collector:
    """Has the garbage collector rest in calls of the library that may call Python's functions: perhaps with a
    lock, so that it may not free a buffer of the same resource then. From before a call until it is over, as
    all that Python makes in between may set it off, the first arguments of a function among that."""

    #: By what tells the calls apart, on whichever threads.
    _calls: ClassVar[set[object]] = set()
    #: Whether it rests for these, and was on before.
    _rests = False
    _lock = threading.RLock()

    @classmethod
    def rest(cls, call: object) -> None:
        """Until :meth:`go_on` with the same, whatever comes in between: before what that is called after."""
        with cls._lock:
            cls._calls.add(call)
            if gc.isenabled():
                cls._rests = True
                gc.disable()

    @classmethod
    def go_on(cls, call: object) -> None:
        """Once no other call is under way."""
        lock = cls._lock
        lock.acquire()
        try:
            cls._calls.discard(call)
            if cls._rests and not cls._calls:
                cls._rests = False
                # What it frees, even here, waits for nobody: no call is under way, and none begins yet.
                gc.enable()
        finally:
            lock.release()

    @classmethod
    def after_in_child(cls) -> None:
        """The calls of other threads are not under way in a child of the process."""
        cls._calls.clear()
        if cls._rests:
            cls._rests = False
            gc.enable()


lock_of_each_process(Collector, "_lock")
os.register_at_fork(after_in_child=Collector.after_in_child)


class Functions:
    """Python's functions behind a resource, as long as that calls them, and what they have raised."""

    _live: ClassVar[dict[int, Functions]] = {}
    _raised = threading.local()

    def __init__(self, *functions: Callable[..., Any]):
        self.functions = functions
        self.context = ffi.new_handle(self)
        #: What refers to that as long as the library calls.
        self.behind: Any = None
        self._live[int(ffi.cast("uintptr_t", self.context))] = self

    def forget(self) -> None:
        """Once nothing calls them."""
        self._live.pop(int(ffi.cast("uintptr_t", self.context)), None)

    @classmethod
    def note(cls, error: BaseException, *, is_lack: bool = False) -> None:
        """`is_lack`: a request found no memory by it, which what is above may make good."""
        if not (is_lack and cls._noted()):
            cls._raised.error = error, is_lack

    @classmethod
    def _noted(cls) -> tuple[BaseException, bool] | None:
        return getattr(cls._raised, "error", None)

    @classmethod
    def exchange(cls, noted: tuple[BaseException, bool] | None) -> tuple[BaseException, bool] | None:
        before, cls._raised.error = cls._noted(), noted
        return before


def forwarded(function: Any, *arguments: Any, back: Callable[[Any], None] | None = None) -> Any:
    """Calls the library; what a function of Python's has raised in there goes on here. `back` gives back what
    came of it, where that raises all the same; not by a lack that was made good, as by a callback that makes
    room."""
    if not Functions._live:
        return function(*arguments)
    # What the garbage collector frees comes here, too, in the middle of other things.
    before, this_call = Functions.exchange(None), object()
    try:
        Collector.rest(this_call)
        try:
            result = function(*arguments)
        except Exception:
            noted = Functions.exchange(None)
            if noted is not None:
                raise noted[0] from None
            raise
        noted = Functions.exchange(None)
        if noted is None or noted[1]:
            return result
        if back is not None:
            back(result)
        raise noted[0]
    finally:
        Functions.exchange(before)
        Collector.go_on(this_call)
