"""What makes memory."""

from __future__ import annotations

from .. import _pool
from .._library import answer, lib
from .._typing import Unpack
from ._resource import DeviceMemoryResource, bytes_or_none, device_over, settings_text


class CudaMemoryResource(DeviceMemoryResource):
    """``cudaMalloc`` and ``cudaFree``."""

    def __init__(self, *, device: int = 0):
        self._open("cuda-malloc", device)


class ManagedMemoryResource(DeviceMemoryResource):
    """``cudaMallocManaged``: memory that moves between host and device as it is used. A free waits for
    ``device``; what other devices do with the memory must have finished."""

    def __init__(self, *, device: int = 0):
        self._open("managed", device)


class PinnedHostMemoryResource(DeviceMemoryResource):
    """Page-locked memory of the host, which devices reach. A free waits for ``device``; what others do with
    the memory must have finished."""

    def __init__(self, *, device: int = 0):
        self._open("pinned", device)


class HostMemoryResource(DeviceMemoryResource):
    """The program's own memory, which a GPU does not reach: for tests. What copies from and to its buffers
    does so on the host, at once."""

    def __init__(self, *, device: int = 0):
        self._open("host", device)


class CudaAsyncMemoryResource(DeviceMemoryResource):
    """A pool of the driver's: ``cudaMallocFromPoolAsync``. ``release_threshold`` is what it keeps when the
    host has waited, all where nothing is said; ``maximum_pool_size`` the most that it may hold."""

    def __init__(
        self,
        initial_pool_size: int | str | None = None,
        release_threshold: int | str | None = None,
        *,
        maximum_pool_size: int | str | None = None,
        device: int = 0,
    ):
        initial, threshold = bytes_or_none(initial_pool_size), bytes_or_none(release_threshold)
        most = bytes_or_none(maximum_pool_size)
        self._open(settings_text("cuda-async", initial=initial, max=most, threshold=threshold), device)


class PoolMemoryResource(DeviceMemoryResource):
    """A pool of this library's, with the options of :class:`vpmm.Pool`.

    It takes its memory from the device: with an ``upstream_mr`` that is no :class:`CudaMemoryResource` use
    :class:`CoalescingMemoryResource`, which does as RMM's pool does. ``initial_pool_size`` is mapped when the
    pool is made; ``maximum_pool_size`` is its limit.
    """

    def __init__(
        self,
        upstream_mr: DeviceMemoryResource | None = None,
        initial_pool_size: int | str | None = None,
        maximum_pool_size: int | str | None = None,
        *,
        device: int | None = None,
        **options: Unpack[_pool.PoolOptions],
    ):
        if upstream_mr is not None and not isinstance(upstream_mr, CudaMemoryResource):
            raise TypeError(
                f"a PoolMemoryResource takes its memory from the device, not from {upstream_mr!r}: "
                "CoalescingMemoryResource stands on any resource"
            )
        device = device_over(upstream_mr, device)
        if maximum_pool_size is not None:
            options["limit"] = maximum_pool_size
        pool = _pool.Pool(device, **options)
        initial = bytes_or_none(initial_pool_size)
        if initial:
            pool.free(pool.malloc(initial))
        self._of(pool)

    def _of(self, pool: _pool.Pool) -> None:
        self._take(answer("vpmm_resource *", lib.vpmm_resource_of_pool, pool._handle), pool.device)

    @classmethod
    def of_process(cls, device: int = 0) -> PoolMemoryResource:
        """The process's pool on a device, which PyTorch, CuPy and Numba share."""
        resource = cls.__new__(cls)
        resource._of(_pool.Pool.of_process(device))
        return resource

    @property
    def pool(self) -> _pool.Pool:
        """The pool itself."""
        pool = _pool.Pool.__new__(_pool.Pool)
        pool._take(answer("vpmm_pool *", lib.vpmm_resource_pool, self._handle), self.device)
        return pool

    def pool_size(self) -> int:
        """The bytes that it holds of the device."""
        now = self.pool.statistics()
        return now.mapped_bytes + now.small_mapped_bytes
