"""Numba on the process's pool, or on any resource, by its external memory management.

>>> from numba import cuda
>>> import vpmm.numba
>>> cuda.set_memory_manager(vpmm.numba.VpmmNumbaManager)   # before the first use of a device

or ``vpmm.numba.manager_of(resource)`` there, or
``NUMBA_CUDA_MEMORY_MANAGER=vpmm.numba`` in the environment. This module needs Numba.
"""

from __future__ import annotations

import ctypes
from typing import Any

from numba import cuda

try:
    from numba.cuda.cudadrv.driver import USE_NV_BINDING
except ImportError:
    # Newer ones have no other bindings than NVIDIA's.
    USE_NV_BINDING = True

from . import _pool
from ._buffer import DeviceBuffer
from .mr import DeviceMemoryResource


class VpmmNumbaManager(cuda.HostOnlyCUDAMemoryManager):
    """Device memory from the device's current resource, which is the process's pool unless another one was
    set, on the legacy default stream; host memory as Numba has it. What runs on a stream without an order
    with that one (``cudaStreamNonBlocking``) has to be ordered with an array's begin and end:
    ``docs/python.md``.
    """

    #: The resource, if not the current one.
    mr: DeviceMemoryResource | None = None

    def memalloc(self, size: int) -> Any:
        """Allocates device memory."""
        device = self.context.device.id
        buffer = DeviceBuffer(size, device=device, mr=self.mr)

        def finalizer() -> None:
            buffer.free()

        # Numba's driver bindings differ in what they take for an address.
        pointer = buffer.ptr if USE_NV_BINDING else ctypes.c_uint64(buffer.ptr)
        return cuda.MemoryPointer(self.context, pointer, size, finalizer=finalizer)

    def get_memory_info(self) -> Any:
        """Free and total bytes of the device, for Numba's questions: what the pool holds free counts as
        free."""
        free, total = _pool.device_memory(self.context.device.id)
        if self.mr is not None:
            return cuda.MemoryInfo(free=free, total=total)
        now = _pool.statistics(self.context.device.id)
        return cuda.MemoryInfo(free=free + now.mapped_bytes - now.live_bytes, total=total)

    def get_ipc_handle(self, memory: Any) -> Any:
        """Not by CUDA's old handles: memory of this pool is shared by :meth:`vpmm.Pool.export`."""
        raise NotImplementedError("memory of vpmm's pools has no CUDA IPC handle")

    def initialize(self) -> None:
        """Makes the pool of the context's device."""
        super().initialize()
        _pool.Pool.of_process(self.context.device.id)

    def reset(self) -> None:
        """Gives free memory back to the device."""
        super().reset()
        _pool.trim(device=self.context.device.id)

    @property
    def interface_version(self) -> int:
        """Of Numba's plug-in interface."""
        return 1


def manager_of(mr: DeviceMemoryResource) -> type[VpmmNumbaManager]:
    """The same from a resource, for ``numba.cuda.set_memory_manager``."""
    return type("VpmmNumbaManager", (VpmmNumbaManager,), {"mr": mr})


# What Numba looks for in the module that NUMBA_CUDA_MEMORY_MANAGER names.
_numba_memory_manager = VpmmNumbaManager
