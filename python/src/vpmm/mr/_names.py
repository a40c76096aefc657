"""Resources by the names that the ``vpmm`` command has for them."""

from __future__ import annotations

from typing import Any

from .._library import NULL, lib
from ._adaptors import (
    AlignedResourceAdaptor,
    LimitingResourceAdaptor,
    LoggingResourceAdaptor,
    PrefetchResourceAdaptor,
    StatisticsResourceAdaptor,
    ThreadSafeResourceAdaptor,
    TrackingResourceAdaptor,
)
from ._callbacks import CallbackMemoryResource, FailureCallbackResourceAdaptor
from ._makers import (
    CudaAsyncMemoryResource,
    CudaMemoryResource,
    HostMemoryResource,
    ManagedMemoryResource,
    PinnedHostMemoryResource,
    PoolMemoryResource,
)
from ._pools import (
    ArenaMemoryResource,
    BinningMemoryResource,
    CachingMemoryResource,
    CoalescingMemoryResource,
    FixedSizeMemoryResource,
)
from ._resource import DeviceMemoryResource, device_over, handle_of, lines_of, opened

#: By the names in trees.
_BY_NAME: dict[str, type[DeviceMemoryResource]] = {
    "aligned": AlignedResourceAdaptor,
    "arena": ArenaMemoryResource,
    "binning": BinningMemoryResource,
    "caching": CachingMemoryResource,
    "callback": CallbackMemoryResource,
    "cuda-async": CudaAsyncMemoryResource,
    "device-malloc": CudaMemoryResource,
    "failure-callback": FailureCallbackResourceAdaptor,
    "fixed-size": FixedSizeMemoryResource,
    "host-malloc": HostMemoryResource,
    "limiting": LimitingResourceAdaptor,
    "logging": LoggingResourceAdaptor,
    "managed": ManagedMemoryResource,
    "pinned-host": PinnedHostMemoryResource,
    "pool": CoalescingMemoryResource,
    "prefetch": PrefetchResourceAdaptor,
    "statistics": StatisticsResourceAdaptor,
    "thread-safe": ThreadSafeResourceAdaptor,
    "tracking": TrackingResourceAdaptor,
    "vpmm": PoolMemoryResource,
}


def of_handle(made: Any, device: int) -> DeviceMemoryResource:
    """A handle of the library's as what it is."""
    resource = DeviceMemoryResource()
    resource._take(made, device)
    # Its own, as all that it has of its kind is asked of the handle.
    resource.__class__ = _BY_NAME.get(lines_of(str(resource))[0].split("(")[0], DeviceMemoryResource)
    return resource


def open(
    text: str, upstream: DeviceMemoryResource | None = None, *, device: int | None = None
) -> DeviceMemoryResource:
    """A resource, or a stack of them, by the names that the ``vpmm`` command has for them.

    >>> vpmm.mr.open("statistics(limiting(1GiB,cuda-async))")

    With an ``upstream`` the text is of what stands on that: ``vpmm.mr.open("limiting(1GiB)", pool)``.
    """
    below = NULL if upstream is None else handle_of(upstream)
    number = device_over(upstream, device)
    return of_handle(opened(text, number, below), number)
