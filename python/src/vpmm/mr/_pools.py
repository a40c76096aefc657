"""What divides the memory of another resource."""

from __future__ import annotations

from typing import Any

from .. import _pool
from .._library import NULL, call, lib
from ._functions import forwarded
from ._makers import CudaMemoryResource
from ._resource import (
    DeviceMemoryResource,
    UpstreamResourceAdaptor,
    bytes_or_none,
    device_of,
    device_over,
    handle_of,
    settings_text,
)


class CoalescingMemoryResource(UpstreamResourceAdaptor):
    """RMM's pool, over anything: best fit, free neighbours become one."""

    def __init__(
        self,
        upstream_mr: DeviceMemoryResource,
        initial_pool_size: int | str | None = None,
        maximum_pool_size: int | str | None = None,
    ):
        text = settings_text(
            "coalescing", initial=bytes_or_none(initial_pool_size), max=bytes_or_none(maximum_pool_size)
        )
        self._open(text, device_of(upstream_mr), upstream_mr)


class FixedSizeMemoryResource(UpstreamResourceAdaptor):
    """Blocks of one size, so many taken at a time; a longer request finds none."""

    def __init__(
        self,
        upstream_mr: DeviceMemoryResource,
        block_size: int | str = 1 << 20,
        blocks_to_preallocate: int | None = None,
    ):
        text = settings_text("fixed-size", block=bytes_or_none(block_size), blocks=blocks_to_preallocate)
        self._open(text, device_of(upstream_mr), upstream_mr)


class BinningMemoryResource(UpstreamResourceAdaptor):
    """Sends each request to the bin of the least size that suffices, and longer ones to ``upstream_mr``. Bins
    are of 2 to the exponents, both included; without exponents, or with -1 as RMM has it, there is none
    before :meth:`add_bin`."""

    def __init__(
        self,
        upstream_mr: DeviceMemoryResource,
        min_size_exponent: int | None = None,
        max_size_exponent: int | None = None,
    ):
        least, most = (None if of == -1 else of for of in (min_size_exponent, max_size_exponent))
        if (least is None) != (most is None):
            raise TypeError("both exponents, or none")
        text = settings_text("binning", least=least, most=most)
        self._open(text, device_of(upstream_mr), upstream_mr)

    def add_bin(self, allocation_size: int | str, bin_resource: DeviceMemoryResource | None = None) -> None:
        """Adds a bin for requests of up to so many bytes: blocks of that size, or another resource."""
        size = _pool.bytes_of(allocation_size)
        own = NULL if bin_resource is None else handle_of(bin_resource)
        forwarded(call, lib.vpmm_resource_add_bin, self._handle, size, own)


class ArenaMemoryResource(UpstreamResourceAdaptor):
    """One piece of memory, divided among streams: half of what is free where no size is said."""

    def __init__(self, upstream_mr: DeviceMemoryResource, arena_size: int | str | None = None):
        text = settings_text("arena", bytes=bytes_or_none(arena_size))
        self._open(text, device_of(upstream_mr), upstream_mr)


class CachingMemoryResource(UpstreamResourceAdaptor):
    """PyTorch's scheme, over anything; settings as in ``PYTORCH_CUDA_ALLOC_CONF``, such as
    ``max_split_size_mb=64``. Over :class:`CudaMemoryResource` where nothing is said."""

    def __init__(
        self, upstream_mr: DeviceMemoryResource | None = None, *, device: int | None = None, **settings: Any
    ):
        device = device_over(upstream_mr, device)
        if upstream_mr is None:
            upstream_mr = CudaMemoryResource(device=device)
        self._open(settings_text("caching", **settings), device, upstream_mr)
