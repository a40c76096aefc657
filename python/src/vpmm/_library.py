"""libvpmm by cffi: where it is, and how its errors become exceptions.

The declarations in ``_native`` are made from the library's code when the package is built. PyTorch and
CuPy open the same file, so that there is one copy of it in the process, with the process's pools.
"""

from __future__ import annotations

import atexit
import contextlib
import operator
import os
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

from . import _native
from ._errors import Error, error_of
from ._native import ffi, lib

__all__ = [
    "EVERY_DEVICE",
    "NULL",
    "Raised",
    "address",
    "answer",
    "block",
    "but_in_a_child",
    "call",
    "encoded",
    "ffi",
    "handle",
    "integer",
    "interrupts",
    "lib",
    "lock_of_each_process",
    "path",
    "text_of",
    "within",
]

#: Every device that has no options of its own, for :func:`vpmm.configure`.
EVERY_DEVICE = 0xFFFF_FFFF

NULL = ffi.NULL

# Threads that go on until the very end may no longer call functions of Python's then.
atexit.register(lib.vpmm_python_end)
os.register_at_fork(after_in_child=lib.vpmm_python_forked)


@contextlib.contextmanager
def but_in_a_child() -> Iterator[None]:
    """In a child of the process (a fork) memory, and what is known of it, are the parent's, and
    there is nobody to tell so where something ends."""
    try:
        yield
    except Error as error:
        if error.status != "VPMM_FORKED":
            raise


def lock_of_each_process(owner: Any, name: str) -> None:
    """A lock that a thread of the parent holds as it forks is given back by nobody in the child, which has
    one of its own there. By name, so that who holds it then gives back what it took."""
    os.register_at_fork(after_in_child=lambda: setattr(owner, name, threading.RLock()))


def path() -> str:
    """The file of the library."""
    (file,) = pathlib.Path(_native.__file__).parent.glob("*.so")
    return str(file)


def call(function: Any, *arguments: Any) -> None:
    """Calls a function that answers a status; raises unless it went well."""
    if _raised:
        # By a call that something else has ended.
        _raised.pop(threading.get_ident(), None)
    status = function(*arguments)
    if _raised and (error := _raised.pop(threading.get_ident(), None)) is not None:
        raise error
    if status:
        name = ffi.string(lib.vpmm_status_name(status)).decode()
        raise error_of(name, ffi.string(lib.vpmm_last_error()).decode(errors="replace"))


class Raised:
    """What a function that the library calls raises, or a signal's handler that runs there. It cannot pass
    through the library, and goes on when the call is over."""

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def note(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        """The function's ``onerror``."""
        self._error = error

    def go_on(self) -> None:
        """Raises it, if there is something."""
        if self._error is not None:
            raise self._error


def block() -> Any:
    """What a block of the program's has open in the library, by what opens it there. It is closed as this is left,
    without a step of Python's, which a signal's handler may raise something before."""
    return ffi.gc(ffi.new("uint64_t *"), lib.vpmm_python_close)


#: What handlers of signals have raised while a call waits, by the thread.
_raised: dict[int, BaseException] = {}


def _note(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    _raised[threading.get_ident()] = error


@ffi.callback("uint32_t(void)", error=1, onerror=_note)
def _check() -> int:
    # Handlers run before it begins.
    return 0


def interrupts() -> tuple[Any, Any]:
    """A function of the library's, and what it is called with, to be asked by a wait: where a handler of a signal
    raises something that ends the wait, and goes on as what :func:`call` raises."""
    return ffi.addressof(lib, "vpmm_python_check"), ffi.cast("void *", _check)


def answer(kind: str, function: Any, *arguments: Any) -> Any:
    """Calls a function that also writes one value through its last argument, and answers the value."""
    value = ffi.new(kind + " *")
    call(function, *arguments, value)
    return value[0]


def text_of(function: Any, *arguments: Any, after: tuple[Any, ...] = ()) -> str:
    """Calls a function that writes a text, with room for it and for how many bytes it needs; ``after`` is
    what follows these."""
    length = 256
    while True:
        text, needed = ffi.new("char[]", length), ffi.new("size_t *")
        call(function, *arguments, text, length, needed, *after)
        if needed[0] <= length:
            return ffi.string(text).decode()
        length = needed[0]  # it may have grown meanwhile


def encoded(text: str | bytes) -> bytes:
    """A text, or a path as the system has it, for the library, which takes it to end at the first zero."""
    made = text.encode() if isinstance(text, str) else text
    if b"\0" in made:
        raise ValueError(f"{text!r} has a zero character")
    return made


def integer(name: str, number: Any) -> int:
    """A number that is one, as cffi would else take a part of what is none for an address."""
    try:
        return operator.index(number)
    except TypeError:
        raise TypeError(f"{name} cannot be {number!r}: no integer") from None


def within(name: str, number: int, bits: int) -> int:
    """A number that the library has room for."""
    whole = integer(name, number)
    if not 0 <= whole < 1 << bits:
        raise ValueError(f"{name} cannot be {number}")
    return whole


def handle(raw: int, name: str = "pointer") -> Any:
    """A stream or a device address, given as a number, as a pointer."""
    # By itself it would be cut to 64 bits, and be another's. Most are looked at here, as requests pass by.
    is_one = type(raw) is int and 0 <= raw < 1 << 64
    return ffi.cast("void *", raw if is_one else within(name, raw, 64))


def address(function: Any) -> int:
    """The address of a function of the library, or a pointer as a number."""
    return int(ffi.cast("uintptr_t", function))
