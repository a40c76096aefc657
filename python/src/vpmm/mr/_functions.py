"""Functions of Python's that the library calls, and what they raise."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

from .._library import ffi


class Functions:
    """Python's functions behind a resource, as long as that calls them, and what they have raised."""

    _live: ClassVar[dict[int, Functions]] = {}
    _raised = threading.local()

    def __init__(self, *functions: Callable[..., Any]):
        self.functions = functions
        self.context = ffi.new_handle(self)
        self._live[int(ffi.cast("uintptr_t", self.context))] = self

    def forget(self) -> None:
        """Once nothing calls them."""
        self._live.pop(int(ffi.cast("uintptr_t", self.context)), None)

    @classmethod
    def note(cls, error: BaseException) -> None:
        cls._raised.error = error

    @classmethod
    def take(cls) -> BaseException | None:
        error = getattr(cls._raised, "error", None)
        cls._raised.error = None
        return error


def forwarded(function: Any, *arguments: Any) -> Any:
    """Calls the library; what a function of Python's has raised in there goes on here."""
    if not Functions._live:
        return function(*arguments)
    Functions.take()
    try:
        result = function(*arguments)
    except Exception:
        error = Functions.take()
        if error is not None:
            raise error from None
        raise
    error = Functions.take()
    if error is not None:
        raise error
    return result
