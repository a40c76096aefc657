"""Memory resources and adaptors, by RMM's names.

>>> import vpmm
>>> pool = vpmm.mr.PoolMemoryResource(initial_pool_size="1 GiB")
>>> counted = vpmm.mr.StatisticsResourceAdaptor(vpmm.mr.LimitingResourceAdaptor(pool, "8 GiB"))
>>> print(counted)
statistics
└─ limiting(limit=8 GiB)
   └─ vpmm(profile=default device=0)
>>> with vpmm.mr.using(counted):
...     buffer = vpmm.DeviceBuffer(1000)

What makes memory: :class:`PoolMemoryResource`, :class:`CudaMemoryResource`,
:class:`CudaAsyncMemoryResource`, :class:`ManagedMemoryResource`, :class:`PinnedHostMemoryResource`,
:class:`HostMemoryResource`, :class:`CallbackMemoryResource`. What divides that of another resource:
:class:`CoalescingMemoryResource`, :class:`FixedSizeMemoryResource`, :class:`BinningMemoryResource`,
:class:`ArenaMemoryResource`, :class:`CachingMemoryResource`. What does more with one: the adaptors. Any of
them stands on any other, and :func:`open` makes whole stacks of a text.

A resource ends with the last reference to it, to what stands on it, and to the buffers of it. Sizes are
numbers, or texts such as ``"20 GB"``; streams are numbers or other libraries' objects.
"""

from __future__ import annotations

from ._adaptors import (
    AlignedResourceAdaptor,
    Counters,
    LimitingResourceAdaptor,
    LoggingResourceAdaptor,
    PrefetchResourceAdaptor,
    StatisticsResourceAdaptor,
    ThreadSafeResourceAdaptor,
    TrackingResourceAdaptor,
)
from ._callbacks import CallbackMemoryResource, FailureCallbackResourceAdaptor
from ._current import (
    get_current_device_resource,
    reset_current_device_resource,
    set_current_device_resource,
    using,
)
from ._makers import (
    CudaAsyncMemoryResource,
    CudaMemoryResource,
    HostMemoryResource,
    ManagedMemoryResource,
    PinnedHostMemoryResource,
    PoolMemoryResource,
)
from ._names import open
from ._pools import (
    ArenaMemoryResource,
    BinningMemoryResource,
    CachingMemoryResource,
    CoalescingMemoryResource,
    FixedSizeMemoryResource,
)
from ._resource import DeviceMemoryResource, Facts, UpstreamResourceAdaptor

__all__ = [
    "AlignedResourceAdaptor",
    "ArenaMemoryResource",
    "BinningMemoryResource",
    "CachingMemoryResource",
    "CallbackMemoryResource",
    "CoalescingMemoryResource",
    "Counters",
    "CudaAsyncMemoryResource",
    "CudaMemoryResource",
    "DeviceMemoryResource",
    "Facts",
    "FailureCallbackResourceAdaptor",
    "FixedSizeMemoryResource",
    "HostMemoryResource",
    "LimitingResourceAdaptor",
    "LoggingResourceAdaptor",
    "ManagedMemoryResource",
    "PinnedHostMemoryResource",
    "PoolMemoryResource",
    "PrefetchResourceAdaptor",
    "StatisticsResourceAdaptor",
    "ThreadSafeResourceAdaptor",
    "TrackingResourceAdaptor",
    "UpstreamResourceAdaptor",
    "get_current_device_resource",
    "open",
    "reset_current_device_resource",
    "set_current_device_resource",
    "using",
]
