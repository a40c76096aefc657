"""PyTorch's tensors in a writer's layout: they are made in memory that the service owns, by a ``MemPool`` of
PyTorch's own allocator or, beside :func:`vpmm.torch.use`, by a heap that cuts up in the same way."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any

from .. import _library
from .._library import answer, block, call, ffi, lib
from . import GMSClientMemoryManager, GrantedLockType, LockTimeoutError, RequestedLockType


@dataclasses.dataclass
class _Pool:
    manager: GMSClientMemoryManager
    is_scratch: bool = False
    # The pool, once it is used and until what was made there is published.
    memory: _OfPyTorch | _OfProcess | None = None

    def is_over(self) -> bool:
        """Whether nothing is left of its manager: it was closed, or has no lock, no memory and no
        addresses."""
        manager = self.manager
        if manager._is_closed:
            return True
        return not (manager.is_connected or manager.mappings or manager.scratch_summary()[0])


_pools: dict[str, _Pool] = {}
# For each tag, held by the thread that has its manager made and connected: another would wait for this one's
# lock.
_making: dict[str, threading.Lock] = {}


@functools.cache
def _allocator() -> Any:
    from torch.cuda.memory import CUDAPluggableAllocator

    return CUDAPluggableAllocator(_library.path(), "vpmm_gms_torch_alloc", "vpmm_gms_torch_free")


class _OfPyTorch:
    """A pool of PyTorch's own allocator."""

    def __init__(self, device: int):
        import torch

        self._device = device
        self._pool = torch.cuda.MemPool(_allocator().allocator())

    def using(self) -> contextlib.AbstractContextManager[None]:
        import torch

        return torch.cuda.use_mem_pool(self._pool, self._device)

    def end(self) -> None:
        """Segments of which nothing is allocated go, and the others as they become free."""
        import torch

        del self._pool
        torch.cuda.empty_cache()


class _OfProcess:
    """A heap for programs whose allocator the process's pools are."""

    def __init__(self, device: int):
        raw = answer("vpmm_gms_heap *", lib.vpmm_gms_heap_open, device)
        self._handle = ffi.gc(raw, lib.vpmm_gms_heap_release)

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        with block() as this_block:
            call(lib.vpmm_python_push_heap, this_block, self._handle)
            yield

    def end(self) -> None:
        """As :meth:`_OfPyTorch.end`."""
        ffi.release(self._handle)


def _new_memory(device: int) -> _OfPyTorch | _OfProcess:
    from .. import torch as plugged

    return _OfProcess(device) if plugged.is_used() else _OfPyTorch(device)


def get_or_create_gms_client_memory_manager(
    socket_path: str,
    device: int,
    mode: RequestedLockType | str,
    *,
    tag: str = "weights",
    timeout_ms: int | None = None,
) -> GMSClientMemoryManager:
    """The process's manager for a tag; at the first call it is made and connected, and other threads that ask
    for it meanwhile wait for it as long as they would for the lock. With a writer's lock tensors can be made
    in its memory: :func:`gms_use_mem_pool`.

    :raises LockTimeoutError: the lock was not to be had in the time for it.
    :raises RuntimeError: there is one for the tag with another server, device or lock.
    """
    wanted = RequestedLockType(mode)
    making = _making.setdefault(tag, threading.Lock())
    begin = time.monotonic()
    most = None if timeout_ms is None or timeout_ms < 0 else timeout_ms / 1000
    if not making.acquire(timeout=-1 if most is None else min(most, threading.TIMEOUT_MAX)):
        raise LockTimeoutError(f"another thread connects the manager for {tag!r}", "VPMM_TIMED_OUT")
    try:
        manager = _manager_as_wanted(socket_path, device, wanted, tag)
        if manager is None:
            left = None if most is None else max(0, int((most - (time.monotonic() - begin)) * 1000))
            manager = GMSClientMemoryManager(socket_path, device=device, tag=tag)
            manager.connect(wanted, left)
            _pools[tag] = _Pool(manager)
        return manager
    finally:
        making.release()


def _manager_as_wanted(
    socket_path: str, device: int, wanted: RequestedLockType, tag: str
) -> GMSClientMemoryManager | None:
    """The manager that there is for a tag.

    :raises RuntimeError: it has another server, device or lock than wanted.
    """
    pool = _pools.get(tag)
    if pool is None:
        return None
    if pool.is_over():
        del _pools[tag]
        return None
    manager = pool.manager
    if (manager.socket_path, manager.device) != (str(socket_path), device):
        text = f"{manager.socket_path} on device {manager.device}"
        raise RuntimeError(f"the manager for {tag!r} is of {text}")
    has = manager.granted_lock_type
    if wanted.value in ("rw", "ro") and (has is None or has.value != wanted.value):
        raise RuntimeError(f"the manager for {tag!r} has {has}, not {wanted.value}")
    return manager


def create_scratch_manager(
    socket_path: str, device: int, *, tag: str = "kv_cache", scratch_size: int = 512 << 20
) -> GMSClientMemoryManager:
    """A manager for a tag that connects to nobody yet: tensors that are made in its pool have addresses,
    with one block of memory behind all of them, until the process takes over."""
    if tag in _pools and not _pools[tag].manager._is_closed:
        raise RuntimeError(f"there is a manager for {tag!r}")
    manager = GMSClientMemoryManager(socket_path, device=device, tag=tag, scratch_size=scratch_size)
    _pools[tag] = _Pool(manager, is_scratch=True)
    return manager


def get_gms_client_memory_manager(tag: str = "weights") -> GMSClientMemoryManager | None:
    """The process's manager for a tag."""
    pool = _pools.get(tag)
    return None if pool is None else pool.manager


def get_gms_client_memory_managers() -> tuple[GMSClientMemoryManager, ...]:
    """The process's managers, for whatever tags."""
    return tuple(pool.manager for pool in _pools.values())


def evict_gms_client_memory_manager(manager: GMSClientMemoryManager) -> None:
    """Forgets a manager, whose tensors live as long as it does."""
    for tag in [tag for tag, pool in _pools.items() if pool.manager is manager]:
        del _pools[tag]


@contextlib.contextmanager
def gms_use_mem_pool(tag: str = "weights", device: Any = None) -> Iterator[None]:
    """Tensors that this thread makes meanwhile are in memory of the tag's manager, which writes. Publishing
    them copies nothing. With PyTorch's own allocator and after :func:`vpmm.torch.use`; what that
    function's pool tells of its memory does not have these in it.

    :raises RuntimeError: there is no manager for the tag, or it does not write, or its memory is away.
    """
    pool = _pools.get(tag)
    if pool is None:
        raise RuntimeError(f"there is no manager for {tag!r}")
    manager = pool.manager
    is_scratch = pool.is_scratch and not manager.is_connected
    if not (is_scratch or manager.granted_lock_type is GrantedLockType.RW):
        raise RuntimeError(f"the manager for {tag!r} does not write: no tensors can be made there")
    if manager.is_unmapped:
        # What is free in the pool has addresses and no memory.
        raise RuntimeError(f"the memory of {tag!r} is away: no tensors can be made there")
    if device is not None and _index(device) != manager.device:
        raise RuntimeError(f"the manager for {tag!r} is of device {manager.device}")
    if pool.memory is None:
        pool.memory = _new_memory(manager.device)
    with manager._block_of_torch(tag, is_scratch), pool.memory.using():
        yield


use_pool = gms_use_mem_pool


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    import torch

    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def release_unused(manager: GMSClientMemoryManager) -> None:
    """Ends a writer's pool: memory in it that no tensor has goes back to the server, so that it is not
    published. Tensors in it stay."""
    import torch

    for pool in _pools.values():
        if pool.manager is manager and pool.memory is not None:
            torch.cuda.synchronize(manager.device)
            ended, pool.memory = pool.memory, None
            ended.end()


def prune_allocations(
    manager: GMSClientMemoryManager,
    *,
    referenced_allocation_ids: Collection[str],
    synchronize: bool = True,
) -> None:
    """Frees a writer's mapped allocations but for those that are named, whatever is in them."""
    if manager.granted_lock_type is not GrantedLockType.RW or manager.is_unmapped:
        return
    if synchronize:
        import torch

        torch.cuda.synchronize(manager.device)
    for va, mapping in manager.mappings.items():
        if mapping.is_mapped and mapping.allocation_id not in referenced_allocation_ids:
            manager.destroy_mapping(va)
