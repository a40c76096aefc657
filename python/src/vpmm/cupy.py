"""CuPy on the process's pool.

>>> import cupy, vpmm.cupy
>>> cupy.cuda.set_allocator(vpmm.cupy.allocator)
"""

from __future__ import annotations

from typing import Any

from ._buffer import DeviceBuffer
from ._errors import OutOfMemoryError


def allocator(size: int) -> Any:
    """For ``cupy.cuda.set_allocator``: memory of CuPy's current device, on its current stream, freed on
    that stream. Where there is none the error is CuPy's own, which is a ``MemoryError``, with the pool's
    map in its text."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    device = cupy.cuda.device.get_device_id()
    try:
        buffer = DeviceBuffer(size, stream=stream, device=device)
    except OutOfMemoryError as error:
        made = cupy.cuda.memory.OutOfMemoryError(size, 0)
        made.args = (str(error),)
        raise made from error
    memory = cupy.cuda.UnownedMemory(ptr=buffer.ptr, size=size, owner=buffer, device_id=device)
    return cupy.cuda.MemoryPointer(memory, 0)
