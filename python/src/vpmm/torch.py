"""PyTorch on vpmm's pools.

>>> import vpmm.torch
>>> vpmm.torch.use()          # before the first CUDA call
>>> # … a program as it is …

Two ways: :func:`use` makes the process's pool PyTorch's allocator, of which :func:`MemPool` sets a part
apart; without it, :func:`MemPool` backs a region of a program that keeps PyTorch's own allocator.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

from . import _library, _pool
from ._errors import InUseError
from ._mem_pool import HeapMemPool
from ._typing import Unpack

_SETTERS = {
    "set_init_fn": "vpmm_torch_init",
    "set_reset_fn": "vpmm_torch_reset",
    "set_memory_fraction_fn": "vpmm_torch_memory_fraction",
    "set_base_alloc_fn": "vpmm_torch_base_alloc",
    "set_record_stream_fn": "vpmm_torch_record_stream",
    "set_begin_allocate_to_pool": "vpmm_torch_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn": "vpmm_torch_end_allocate_to_pool",
    "set_release_pool": "vpmm_torch_release_pool",
}


def _address(name: str) -> int:
    # By name, as PyTorch finds the first two: some have types of C++, which cffi knows nothing of.
    function = getattr(ctypes.CDLL(_library.path()), name)
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@functools.cache
def allocator() -> Any:
    """The ``torch.cuda.memory.CUDAPluggableAllocator``, with everything that it can be told set. Made
    once."""
    from torch.cuda.memory import CUDAPluggableAllocator

    plugged = CUDAPluggableAllocator(_library.path(), "vpmm_torch_alloc", "vpmm_torch_free")
    inner = plugged.allocator()
    for setter, function in _SETTERS.items():
        getattr(inner, setter)(_address(function))
    return plugged


def use(device: int | None = None, *, report: bool = True, **options: Unpack[_pool.PoolOptions]) -> None:
    """Makes the process's pools PyTorch's allocator, for all devices. Before the first CUDA call.

    Options are those of :class:`vpmm.Pool`, for one device or all. With ``report``, as by default,
    PyTorch's own questions (``torch.cuda.memory_allocated``, ``max_memory_reserved``, ``memory_stats``,
    ``memory_summary``, ``reset_peak_memory_stats`` and so on) are answered from the pool; PyTorch itself
    answers that a plugged-in allocator cannot say.

    Once more with the same options, or none, is nothing; with others it is a :class:`vpmm.InUseError`.
    """
    import torch

    global _is_used, _is_reported
    if _is_used and _is_reported and not report:
        raise InUseError("vpmm.torch.use() was called before, with report=True", "VPMM_IN_USE")
    if options or device is not None:
        if _is_used and _pool.is_configured_otherwise(device, **options):
            raise InUseError("vpmm.torch.use() was called before, with other options", "VPMM_IN_USE")
        _pool.configure(device, **options)
    if _is_used:
        return
    torch.cuda.memory.change_current_allocator(allocator())
    # Which PyTorch has no function to set for; what it does without is to raise an error.
    _library.lib.vpmm_torch_answer_cache_info()
    _is_used, _is_reported = True, report
    if report:
        _answer_questions()


_is_used = _is_reported = False


def is_used() -> bool:
    """Whether the process's pools are PyTorch's allocator: :func:`use`."""
    return _is_used


def MemPool(name: str | None = None, *, device: Any = None, **arguments: Any) -> Any:
    """Memory apart from the other, for :func:`use_mem_pool`.

    After :func:`use` it is a :class:`HeapMemPool`, of the ``name`` if one is given: a heap of its own in the
    process's pool. PyTorch's own class does not go with a plugged-in allocator.

    Without it is a ``torch.cuda.MemPool`` whose memory is the process's pool's. PyTorch cuts it up by its own
    scheme, so its statistics, graphs and snapshots are as usual; further arguments are PyTorch's.
    """
    if _is_used:
        if arguments:
            raise TypeError(f"a heap of the pool takes no {', '.join(arguments)}")
        return HeapMemPool(name, device=_index(device))
    if name is not None:
        raise TypeError("PyTorch's own MemPool has no name: it is a heap after vpmm.torch.use()")
    import torch

    return torch.cuda.MemPool(allocator().allocator(), **arguments)


@contextlib.contextmanager
def use_mem_pool(pool: Any, device: Any = None) -> Iterator[None]:
    """What this thread allocates in the block on the pool's device comes from the :func:`MemPool`. What is
    freed finds its way back by itself, whichever thread frees it, and wherever."""
    if isinstance(pool, HeapMemPool):
        if device is not None and _index(device) != pool.device:
            raise ValueError(f"the pool is of device {pool.device}")
        with pool.using():
            yield
    else:
        import torch

        with torch.cuda.use_mem_pool(pool, device):
            yield


def statistics(device: int | None = None) -> dict[str, Any]:
    """What the pool holds, in the shape of ``torch.cuda.memory_stats_as_nested_dict``, with all that
    ``torch.cuda.memory_stats`` and ``memory_summary`` have.

    What PyTorch calls allocated is live, what it calls reserved is held; active has what is freed and may
    still be in use on further streams, as in snapshots. The small pool is that of the paged profile's
    small requests. The pool counts what is, and some peaks, but no totals except of segments: a total,
    and a peak that it does not have, is the least that it can have been, so that ``allocated - freed`` is
    what is current. Of a device of which nothing was asked for all is 0, and its pool is not made for the
    question, as that takes memory of the device.
    """
    import torch

    if not torch.cuda.is_initialized():
        return {}
    index = _index(device)
    now = _pool.statistics(index) if _has_pool(index) else _pool.NOTHING
    return _nested(now, _failed_requests(index) - _failed_before.get(index, 0))


#: Requests that had failed when PyTorch's counts were begun anew, by the device.
_failed_before: dict[int, int] = {}


def _failed_requests(index: int) -> int:
    return _library.lib.vpmm_torch_failed_requests(index)


def _has_pool(index: int) -> bool:
    return bool(_library.lib.vpmm_process_has_pool(index))


def _nested(now: _pool.Statistics, failed_requests: int = 0) -> dict[str, Any]:
    def figures(current: int, peak: int = 0, allocated: int = 0) -> dict[str, int]:
        peak = max(peak, current)
        allocated = max(allocated, peak)
        return {"current": current, "peak": peak, "allocated": allocated, "freed": allocated - current}

    def kinds(
        large: dict[str, int], small: dict[str, int] | None = None, peak: int = 0
    ) -> dict[str, dict[str, int]]:
        """`peak` is of both together."""
        small = small or figures(0)
        allocated = large["allocated"] + small["allocated"]
        both = figures(large["current"] + small["current"], peak, allocated)
        return {"all": both, "large_pool": large, "small_pool": small}

    live, small_live = figures(now.live_bytes, now.peak_live_bytes), figures(now.small_live_bytes)
    count, small_count = figures(now.live_count), figures(now.small_live_count)
    active = figures(now.live_bytes + now.deferred_bytes, now.peak_live_bytes)
    # What was freed otherwise is its own stream's at once.
    inactive = now.idle_bytes + now.cached_bytes + now.pending_bytes - now.deferred_bytes
    held = figures(now.mapped_bytes, now.peak_mapped_bytes)
    small_held = figures(now.small_mapped_bytes, now.peak_small_mapped_bytes)
    return {
        "allocation": kinds(count, small_count),
        "segment": kinds(figures(now.extent_count, allocated=now.extents_created)),
        "active": kinds(count, small_count),
        "inactive_split": kinds(figures(0)),
        "allocated_bytes": kinds(live, small_live, now.peak_live_bytes),
        "requested_bytes": kinds(live, small_live, now.peak_live_bytes),
        "active_bytes": kinds(active, small_live, now.peak_live_bytes),
        "reserved_bytes": kinds(held, small_held, held["peak"] + small_held["peak"]),
        "inactive_split_bytes": kinds(figures(inactive)),
        # No block is too long to be divided.
        "max_split_size": -1,
        "oversize_allocations": figures(0),
        "oversize_segments": figures(0),
        # Nothing is flushed and asked for again: what is free serves, wherever it is.
        "num_alloc_retries": 0,
        "num_ooms": failed_requests,
        "num_device_alloc": now.extents_created,
        "num_device_free": now.extents_created - now.extent_count,
        "num_sync_all_streams": now.host_waits,
    }


def failed_frees() -> int:
    """How many of PyTorch's frees have failed; the first of them were told on the standard error stream."""
    return _library.lib.vpmm_torch_failed_frees()


def forget_stream(stream: Any) -> bool:
    """Says that a ``torch.cuda.ExternalStream`` that was allocated on is about to be destroyed. PyTorch's own
    streams live as long as the process."""
    return _pool.forget_stream(stream.cuda_stream, stream.device.index)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return _library.within("device", device, 32)
    import torch

    index = None if device is None else torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def _answer_questions() -> None:
    """Has PyTorch's own functions ask the pool. The others are made of these."""
    import torch
    from torch.cuda import memory

    def reset_peak_memory_stats(device: Any = None) -> None:
        """Starts the peaks of the pool anew, if there is one."""
        index = _index(device)
        if _has_pool(index):
            _pool.reset_peaks(index)

    def reset_accumulated_memory_stats(device: Any = None) -> None:
        """Starts the count of failures anew; the pool counts all else from its begin."""
        index = _index(device)
        _failed_before[index] = _failed_requests(index)

    # `memory_stats` wants what its dictionary is made of under this name.
    memory.memory_stats_as_nested_dict = statistics
    for function in (reset_peak_memory_stats, reset_accumulated_memory_stats):
        setattr(memory, function.__name__, function)
        setattr(torch.cuda, function.__name__, function)
    torch.cuda.memory_stats_as_nested_dict = statistics

    # The same for any accelerator, where PyTorch has that.
    accelerator = getattr(torch.accelerator, "memory", None) if hasattr(torch, "accelerator") else None
    if hasattr(accelerator, "memory_stats"):
        for function in (torch.cuda.memory_stats, reset_peak_memory_stats, reset_accumulated_memory_stats):
            setattr(accelerator, function.__name__, function)
            setattr(torch.accelerator, function.__name__, function)
