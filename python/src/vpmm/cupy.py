"""CuPy on the process's pool, or on any resource.

>>> import cupy, vpmm.cupy
>>> cupy.cuda.set_allocator(vpmm.cupy.allocator)
>>> cupy.cuda.set_allocator(vpmm.cupy.allocator_of(resource))
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ._buffer import DeviceBuffer
from ._errors import OutOfMemoryError
from .mr import DeviceMemoryResource


def allocator(size: int, *, mr: DeviceMemoryResource | None = None) -> Any:
    """For ``cupy.cuda.set_allocator``: memory of CuPy's current device, on its current stream, freed on
    that stream, from ``mr``, else from the device's current resource, which is the process's pool unless
    another one was set. Where there is none the error is CuPy's own, which is a ``MemoryError``, with the
    pool's map in its text."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    device = cupy.cuda.device.get_device_id()
    try:
        buffer = DeviceBuffer(size, stream=stream, device=device, mr=mr)
    except OutOfMemoryError as error:
        made = cupy.cuda.memory.OutOfMemoryError(size, 0)
        made.args = (str(error),)
        raise made from error
    memory = cupy.cuda.UnownedMemory(ptr=buffer.ptr, size=size, owner=buffer, device_id=device)
    return cupy.cuda.MemoryPointer(memory, 0)


def allocator_of(mr: DeviceMemoryResource) -> Callable[[int], Any]:
    """The same from a resource, for ``cupy.cuda.set_allocator``."""
    return functools.partial(allocator, mr=mr)
