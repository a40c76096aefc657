"""What can go wrong, as exceptions."""

from __future__ import annotations

import os
import re
from typing import Any

#: What the library says of the system's errors, with the file where there is one whose name is a text.
_OF_SYSTEM = re.compile(r"(?:failed: (?P<file>[^\ufffd]+): )?[^:]+ \(os error (?P<number>\d{1,9})\)")


def _say_as_the_system(error: OSError, text: str) -> None:
    """Number and file of an error of the system's: from the text, so that a copy by pickle has them, too."""
    if found := _OF_SYSTEM.search(text):
        error.errno, error.filename = int(found["number"]), found["file"]
        error.strerror = os.strerror(error.errno)


class Error(RuntimeError):
    """A call of the library failed. ``status`` is the name that ``vpmm.h`` has for why."""

    #: Whether a function of Python's has raised it that the library calls, which does not fail by that.
    _is_of_function = False

    def __init__(self, text: str, status: str = "VPMM_OTHER"):
        super().__init__(text)
        self.status = status
        if isinstance(self, OSError):
            _say_as_the_system(self, text)

    def __str__(self) -> str:
        # One of the system's would else be told by its number, without what failed.
        return BaseException.__str__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # Dask, which makes exceptions without their arguments where there is no such method, cannot make
        # those of the system's.
        return type(self), (*self.args, self.status), self.__dict__


class OutOfMemoryError(Error, MemoryError):
    """There is no memory for a request. The text has a map of the pool."""


class InvalidArgumentError(Error, ValueError):
    """No function can be asked for that."""


class PointerError(Error, ValueError):
    """A pointer is no allocation of the pool's, or was freed already."""


class StreamError(Error, ValueError):
    """A stream is of another device or context, or captures a graph."""


class DriverError(Error):
    """The driver is not there, too old, or answered with an error."""


class ContextLostError(DriverError):
    """The context is destroyed, or the device has failed for good."""


class UnsupportedError(Error, NotImplementedError):
    """The device, the driver or the pool cannot do that."""


class InUseError(Error):
    """Somebody else is using it, or it was made already."""


class StateError(Error):
    """What it is asked of is not in the state for it: asleep, awake, connected, closed."""


class NotFoundError(Error, LookupError):
    """Nothing has that name."""


class InputOutputError(Error, OSError):
    """A file, a socket, or what came through it. Where the system said why, ``errno`` is its number, and
    ``filename`` the file that it is about."""


class LockTimeoutError(Error, TimeoutError):
    """A lock was not to be had in the time for it."""


class DisconnectedError(Error, ConnectionError):
    """No server could be reached, or the connection to it has failed."""


class NoThreadError(Error):
    """The system would not start the thread that a pool is to have of its own (``background``, ``ahead``)."""


class RefusedError(Error):
    """A server would not do it, and says why."""


class StaleMemoryLayoutError(Error):
    """The published layout is not the one whose addresses were kept."""


_OF_STATUS = {
    "VPMM_INVALID_ARGUMENT": InvalidArgumentError,
    "VPMM_OUT_OF_MEMORY": OutOfMemoryError,
    "VPMM_NO_DRIVER": DriverError,
    "VPMM_DRIVER_ERROR": DriverError,
    "VPMM_CONTEXT_LOST": ContextLostError,
    "VPMM_UNSUPPORTED": UnsupportedError,
    "VPMM_BAD_POINTER": PointerError,
    "VPMM_DOUBLE_FREE": PointerError,
    "VPMM_BAD_STREAM": StreamError,
    "VPMM_IN_USE": InUseError,
    "VPMM_BAD_STATE": StateError,
    "VPMM_NOT_FOUND": NotFoundError,
    "VPMM_IO_ERROR": InputOutputError,
    "VPMM_TIMED_OUT": LockTimeoutError,
    "VPMM_DISCONNECTED": DisconnectedError,
    "VPMM_REFUSED": RefusedError,
    "VPMM_STALE": StaleMemoryLayoutError,
    "VPMM_NO_THREAD": NoThreadError,
}


#: Options of pools and other resources that have other names in Python.
_OPTIONS = {
    "va_size_bytes": "addresses",
    "page_size_bytes": "page_size",
    "initial_bytes": "initial_pool_size",
    "max_bytes": "maximum_pool_size",
    "arena_bytes": "arena_size",
    "block_bytes": "block_size",
    "blocks_at_once": "blocks_to_preallocate",
    "powers": "max_size_exponent",
}
# With its value, or as what another one is held against.
_OPTION = re.compile(rf"\b({'|'.join(_OPTIONS)})(?==|$)")


def error_of(status: str, text: str) -> Error:
    """The exception for a status."""
    if status == "VPMM_INVALID_ARGUMENT":
        text = _OPTION.sub(lambda found: _OPTIONS[found[1]], text)
    return _OF_STATUS.get(status, Error)(text or status, status)
