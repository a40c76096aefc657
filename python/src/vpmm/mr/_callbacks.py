"""Functions of Python's as a resource, and as what makes room."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from .. import _pool
from .._library import address, answer, ffi, handle, lib, within
from ._functions import Functions
from ._resource import DeviceMemoryResource, UpstreamResourceAdaptor, handle_of


def _note(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """What a function raises, or a signal's handler before it begins, is kept for who called the library."""
    Functions.note(error)


def _note_of_request(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    Functions.note(error, is_lack=isinstance(error, Exception))


@ffi.callback("void *(void *, size_t, size_t, void *)", onerror=_note_of_request)
def _allocate(context: Any, size: int, align: int, stream: Any) -> Any:
    allocate, _ = ffi.from_handle(context).functions
    return handle(allocate(size, int(ffi.cast("uintptr_t", stream))), "an address")


@ffi.callback("void(void *, void *, size_t, size_t, void *)", onerror=_note)
def _deallocate(context: Any, pointer: Any, size: int, align: int, stream: Any) -> None:
    _, deallocate = ffi.from_handle(context).functions
    deallocate(address(pointer), size, int(ffi.cast("uintptr_t", stream)))


@ffi.callback("uint32_t(void *, size_t)", onerror=_note_of_request)
def _make_room(context: Any, size: int) -> int:
    (function,) = ffi.from_handle(context).functions
    return bool(function(size))


@ffi.callback("void(void *)", onerror=_note)
def _finish(context: Any) -> None:
    ffi.from_handle(context).forget()


def _behind(functions: Functions) -> Any:
    """What the library's own functions call these by: not once the interpreter ends."""
    behind = ffi.new("vpmm_python_functions *")
    behind.allocate, behind.deallocate = _allocate, _deallocate
    behind.make_room, behind.finish = _make_room, _finish
    behind.context = functions.context
    functions.behind = behind
    return behind


class CallbackMemoryResource(DeviceMemoryResource):
    """Memory from two functions: ``allocate_func(size, stream)`` answers an address at a multiple of 256 (0
    where there is none), ``deallocate_func(ptr, size, stream)`` frees it. Streams come as numbers. They use
    nothing that stands on the resource. What they raise comes out of the call that led to them."""

    def __init__(
        self,
        allocate_func: Callable[[int, int], int],
        deallocate_func: Callable[[int, int, int], None],
        *,
        device: int = 0,
    ):
        number = within("device", device, 32)
        functions = Functions(allocate_func, deallocate_func)
        with _forgotten_if_it_fails(functions):
            made = answer(
                "vpmm_resource *",
                lib.vpmm_resource_callback,
                _pool._driver(),
                number,
                ffi.addressof(lib, "vpmm_python_allocate"),
                ffi.addressof(lib, "vpmm_python_deallocate"),
                _behind(functions),
                ffi.addressof(lib, "vpmm_python_finish"),
            )
        self._take(made, device)


class FailureCallbackResourceAdaptor(UpstreamResourceAdaptor):
    """Asks ``callback(size)`` when there is no memory, and tries again as long as it answers true."""

    def __init__(self, upstream_mr: DeviceMemoryResource, callback: Callable[[int], bool]):
        below, functions = handle_of(upstream_mr), Functions(callback)
        with _forgotten_if_it_fails(functions):
            made = answer(
                "vpmm_resource *",
                lib.vpmm_resource_failure_callback,
                below,
                ffi.addressof(lib, "vpmm_python_make_room"),
                _behind(functions),
                ffi.addressof(lib, "vpmm_python_finish"),
            )
        self._upstream = upstream_mr
        self._take(made, upstream_mr.device)


@contextlib.contextmanager
def _forgotten_if_it_fails(functions: Functions) -> Iterator[None]:
    try:
        yield
    except BaseException:
        functions.forget()
        raise
