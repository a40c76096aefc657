"""Functions of Python's as a resource, and as what makes room."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from .. import _pool
from .._library import NULL, address, answer, ffi, lib
from ._functions import Collector, Functions
from ._resource import DeviceMemoryResource, UpstreamResourceAdaptor, handle_of


@contextlib.contextmanager
def _called(context: Any, *, is_request: bool = False) -> Iterator[tuple[Callable[..., Any], ...]]:
    """The functions of a resource, as what stands on it calls them. What they raise is kept for who called
    the library."""
    # Where that was no Python the garbage collector is still on.
    this_call = object()
    try:
        Collector.rest(this_call)
        yield ffi.from_handle(context).functions
    except BaseException as error:
        Functions.note(error, is_lack=is_request and isinstance(error, Exception))
    finally:
        Collector.go_on(this_call)


@ffi.callback("void *(void *, size_t, size_t, void *)")
def _allocate(context: Any, size: int, align: int, stream: Any) -> Any:
    with _called(context, is_request=True) as (allocate, _):
        return ffi.cast("void *", allocate(size, int(ffi.cast("uintptr_t", stream))))
    return NULL


@ffi.callback("void(void *, void *, size_t, size_t, void *)")
def _deallocate(context: Any, pointer: Any, size: int, align: int, stream: Any) -> None:
    with _called(context) as (_, deallocate):
        deallocate(address(pointer), size, int(ffi.cast("uintptr_t", stream)))


@ffi.callback("uint32_t(void *, size_t)")
def _make_room(context: Any, size: int) -> int:
    with _called(context, is_request=True) as (function,):
        return bool(function(size))
    return 0


@ffi.callback("void(void *)")
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
        functions = Functions(allocate_func, deallocate_func)
        with _forgotten_if_it_fails(functions):
            made = answer(
                "vpmm_resource *",
                lib.vpmm_resource_callback,
                _pool._driver(),
                device,
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
