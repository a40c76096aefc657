"""Functions of Python's that the library calls, and what they raise."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

from .. import _snapshot
from .._errors import Error
from .._library import ffi, lib


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


def _of_function(error: BaseException) -> BaseException:
    """What a function of Python's has raised, which is told from what the library answers by that."""
    if isinstance(error, Error):
        error._is_of_function = True
    return error


def forwarded(function: Any, *arguments: Any, back: Callable[[Any], None] | None = None) -> Any:
    """Calls the library; what a function of Python's has raised in there goes on here. `back` gives back what
    came of it, where that raises all the same; not by a lack that was made good, as by a callback that makes
    room."""
    if not (Functions._live or _snapshot.has_places()):
        return function(*arguments)
    # What calls those may hold a lock, which a buffer of the same resource would wait for at its end: the
    # garbage collector rests from here on, as all that Python makes may set it off. Until the block is left,
    # however that is: a signal's handler may raise something anywhere in it, but not where it is left.
    with ffi.gc(ffi.new("uint32_t *"), lib.vpmm_python_go_on) as this_call:
        lib.vpmm_python_rest(this_call)
        # What the garbage collector frees comes here, too, in the middle of other things.
        before = Functions.exchange(None)
        try:
            try:
                result = function(*arguments)
            except Exception:
                noted = Functions.exchange(None)
                if noted is not None:
                    raise _of_function(noted[0]) from None
                raise
            noted = Functions.exchange(None)
            if noted is None or noted[1]:
                return result
            if back is not None:
                back(result)
            raise _of_function(noted[0])
        finally:
            Functions.exchange(before)
