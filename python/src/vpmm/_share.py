"""Memory for other processes, and of them, by a connected Unix stream socket."""

from __future__ import annotations

import contextlib
import os
import select
import socket as sockets
import threading
from collections.abc import Iterator
from typing import Any

from . import _pool
from ._library import NULL, address, answer, call, ffi, lib, within

_ACCESS = {"read": 1, "read and write": 3}


def descriptor(socket: Any) -> int:
    """Of a socket, or given as such."""
    if isinstance(socket, int):
        # What the library has room for below 0 it refuses itself.
        return socket if -1 << 31 <= socket < 0 else within("socket", socket, 31)
    if getattr(socket, "gettimeout", lambda: None)() is not None:
        # With a time limit of Python's the descriptor does not block, and the library would not wait.
        raise ValueError("the socket has to block: settimeout(None); SO_RCVTIMEO and SO_SNDTIMEO limit it")
    return socket.fileno()


@contextlib.contextmanager
def _same(number: int) -> Iterator[sockets.socket]:
    """The socket of a descriptor, by one of its own."""
    own = os.dup(number)
    try:
        same = sockets.socket(fileno=own)
    except OSError:
        # It is no socket, and Python leaves it open.
        os.close(own)
        raise
    with same:
        yield same


def _with_something(number: int) -> int:
    """Waits until something has come for a socket. Not in the library, so that handlers of signals run meanwhile,
    as of Ctrl-C; but for a time limit of the socket's own, which that keeps."""
    try:
        with _same(number) as same:
            limit = same.getsockopt(sockets.SOL_SOCKET, sockets.SO_RCVTIMEO, 16)
    except OSError:
        # The library says what it is.
        return number
    if not any(limit):
        poll = select.poll()
        poll.register(number, select.POLLIN)
        poll.poll()
    return number


def send(function: Any, *arguments: Any) -> None:
    """Calls a function that sends something through a socket, its last argument, and waits for who receives it. In the
    main thread another one does, so that handlers of signals run meanwhile. What one raises ends it, and the socket:
    an answer that came later would be taken for another's."""
    *before, number = arguments
    own = None
    if threading.current_thread() is threading.main_thread():
        # Its own: by that number there may be another file while it still comes to its end.
        with contextlib.suppress(OSError):
            own = os.dup(number)
    if own is None:
        call(function, *arguments)
        return
    outcome: list[BaseException | None] = []

    def work() -> None:
        try:
            call(function, *before, own)
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)
        finally:
            os.close(own)

    works = threading.Thread(target=work, daemon=True)
    try:
        try:
            works.start()
        except RuntimeError:
            # The system has no more threads.
            work()
        else:
            works.join()
    except BaseException:
        if not outcome:
            with contextlib.suppress(OSError), _same(number) as same:
                same.shutdown(sockets.SHUT_RDWR)
        raise
    error = outcome.pop()
    try:
        if error is not None:
            raise error
    finally:
        # Not in a circle with what it has come through.
        del error


class Export:
    """A whole pool on its way to another process: :meth:`vpmm.Pool.export_all`. One for each receiver."""

    def __init__(self, pool: _pool.Pool):
        made = answer("vpmm_export *", lib.vpmm_export_create, pool._handle)
        self._handle = ffi.gc(made, lib.vpmm_export_release)

    def send(self, socket: Any) -> None:
        """Sends what the pool has; from the second time on what it has made since, for
        :meth:`Imported.receive_more`. What a signal's handler raises in the main thread ends the wait for the
        receiver, and shuts the socket down."""
        send(lib.vpmm_export_send_all, self._handle, descriptor(socket))


class Imported:
    """Memory of another process's pool, mapped in this one until it is closed, or the last reference goes.

    >>> with vpmm.Imported.receive(socket) as memory:
    ...     mine.copy_from_device(memory)

    One allocation is an array of bytes, by ``__cuda_array_interface__``. That what uses it comes after what
    has written it is for the processes to see to.
    """

    _handle: Any
    #: Held by the thread that waits for more.
    _receives: threading.RLock
    _is_read_only: bool
    device: int
    """The device's number."""

    @classmethod
    def receive(cls, socket: Any, *, device: int = 0, access: str = "read") -> Imported:
        """Takes what the process at the other end of a socket sends, and maps it for a device, to ``"read"``
        or to ``"read and write"``. Blocks until it has come, or a signal's handler raises something before."""
        if access not in _ACCESS:
            raise ValueError(f"access cannot be {access!r}; known: {', '.join(_ACCESS)}")
        kind, way = "vpmm_import *", _ACCESS[access]
        number, from_where = within("device", device, 32), _with_something(descriptor(socket))
        made = answer(kind, lib.vpmm_import_receive, _pool._driver(), number, from_where, way)
        imported = cls()
        imported._receives = threading.RLock()
        imported._handle = ffi.gc(made, lib.vpmm_import_release)
        imported.device, imported._is_read_only = device, access == "read"
        return imported

    def receive_more(self, socket: Any) -> None:
        """Takes what a whole pool has made since it was sent last."""
        with self._receives:
            call(lib.vpmm_import_receive_more, self._open(), _with_something(descriptor(socket)))

    @property
    def ptr(self) -> int | None:
        """Where an allocation that was sent begins; ``None`` of a whole pool."""
        pointer = ffi.new("void **")
        call(lib.vpmm_import_memory, self._open(), pointer, NULL)
        return address(pointer[0]) or None

    @property
    def nbytes(self) -> int:
        """The bytes of an allocation, or of a whole pool all that is mapped."""
        return answer("uint64_t", lib.vpmm_import_memory, self._open(), NULL)

    def translate(self, there: int) -> int:
        """Where an address of the other process is in this one; :class:`vpmm.PointerError` where it has no
        memory here."""
        return address(answer("void *", lib.vpmm_import_translate, self._open(), within("address", there, 64)))

    def close(self) -> None:
        """Waits for the device's work and unmaps it. Nothing may use the memory any more. Where another
        thread waits in :meth:`receive_more` that is when it returns."""
        handle, self._handle = self._handle, None
        if handle is not None and self._receives.acquire(blocking=False):
            try:
                ffi.release(handle)
            finally:
                self._receives.release()
        # Else with the last reference, which that call has.

    def __enter__(self) -> Imported:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        pointer = self.ptr
        if pointer is None:
            raise AttributeError("a whole pool is no array: translate its addresses")
        return {
            "data": (pointer, self._is_read_only),
            "shape": (self.nbytes,),
            "strides": None,
            "typestr": "|u1",
            "stream": None,
            "version": 3,
        }

    def _open(self) -> Any:
        if self._handle is None:
            raise ValueError("the memory was closed")
        return self._handle
