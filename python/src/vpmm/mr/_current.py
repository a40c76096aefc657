"""A device's current resource."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

from .. import _pool
from .._library import NULL, but_in_a_child, call, lib, lock_of_each_process, within
from ._makers import PoolMemoryResource
from ._resource import DeviceMemoryResource, device_of, handle_of

_current: dict[int, DeviceMemoryResource] = {}
#: Taken once more by what runs in between: a finalizer, a signal's handler.
_current_lock = threading.RLock()
lock_of_each_process(sys.modules[__name__], "_current_lock")
_last_turn: object = None


def current_or_none(device: int) -> DeviceMemoryResource | None:
    """The resource that was made current, if one was."""
    return _current.get(device)


def get_current_device_resource(device: int = 0) -> DeviceMemoryResource:
    """A device's current resource: the one that was set, else the process's pool. Buffers, and what CuPy and
    Numba allocate, come from it."""
    return _current.get(device) or PoolMemoryResource.of_process(device)


def set_current_device_resource(mr: DeviceMemoryResource) -> None:
    """Makes a resource its device's current one, for all threads, and for C and C++ code that asks this
    library. What was allocated before is freed where it came from."""
    _set(device_of(mr), mr)


def reset_current_device_resource(device: int = 0) -> None:
    """Makes the process's pool the current resource again."""
    _set(device, None)


def _set(device: int, resource: DeviceMemoryResource | None) -> None:
    global _last_turn
    raw = NULL if resource is None else handle_of(resource)
    within("device", device, 32)
    with _current_lock:
        # It may end with this, which is not to be under the lock.
        former = _current.get(device)
        turn = None
        # Anew, if one was set in between: here and in the library it is to be the same one.
        while turn is None or _last_turn is not turn:
            _last_turn = turn = object()
            call(lib.vpmm_resource_set_current, _pool._driver(), device, raw)
            if resource is None:
                _current.pop(device, None)
            else:
                _current[device] = resource
    del former


@contextlib.contextmanager
def using(resource: DeviceMemoryResource) -> Iterator[DeviceMemoryResource]:
    """Makes a resource its device's current one in a block, for all threads; the former one is current again
    after it."""
    device = device_of(resource)
    former = current_or_none(device)
    try:
        # In here, and what ends it once more: a signal's handler may raise something in either.
        _set(device, resource)
        yield resource
    finally:
        try:
            _set_back(device, former)
        except BaseException:
            _set_back(device, former)
            raise


def _set_back(device: int, former: DeviceMemoryResource | None) -> None:
    with but_in_a_child():
        _set(device, former)
