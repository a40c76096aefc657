"""PyTorch's ``MemPool`` on a writer's layout: tensors are made in memory that the service owns."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Collection, Iterator
from typing import Any

from .. import _library
from .._library import call, lib
from . import GMSClientMemoryManager, GrantedLockType, RequestedLockType


@dataclasses.dataclass
class _Pool:
    manager: GMSClientMemoryManager
    is_scratch: bool = False
    # PyTorch's pool, once it is used and until what was made there is published.
    memory: Any = None


_pools: dict[str, _Pool] = {}


@functools.cache
def _allocator() -> Any:
    from torch.cuda.memory import CUDAPluggableAllocator

    return CUDAPluggableAllocator(_library.path(), "vpmm_gms_torch_alloc", "vpmm_gms_torch_free")


def _new_memory() -> Any:
    import torch

    return torch.cuda.MemPool(_allocator().allocator())


def get_or_create_gms_client_memory_manager(
    socket_path: str,
    device: int,
    mode: RequestedLockType | str,
    *,
    tag: str = "weights",
    timeout_ms: int | None = None,
) -> GMSClientMemoryManager:
    """The process's manager for a tag; at the first call it is made and connected. With a writer's lock
    tensors can be made in its memory: :func:`gms_use_mem_pool`.

    :raises RuntimeError: there is one for the tag with another server, device or lock.
    """
    wanted = RequestedLockType(mode)
    pool = _pools.get(tag)
    if pool is not None and not pool.manager.is_connected and not pool.manager.mappings:
        del _pools[tag]
        pool = None
    if pool is not None:
        manager = pool.manager
        if (manager.socket_path, manager.device) != (str(socket_path), device):
            text = f"{manager.socket_path} on device {manager.device}"
            raise RuntimeError(f"the manager for {tag!r} is of {text}")
        has = manager.granted_lock_type
        if wanted.value in ("rw", "ro") and (has is None or has.value != wanted.value):
            raise RuntimeError(f"the manager for {tag!r} has {has}, not {wanted.value}")
        return manager
    manager = GMSClientMemoryManager(socket_path, device=device, tag=tag)
    manager.connect(wanted, timeout_ms)
    _pools[tag] = _Pool(manager)
    return manager


def create_scratch_manager(
    socket_path: str, device: int, *, tag: str = "kv_cache", scratch_size: int = 512 << 20
) -> GMSClientMemoryManager:
    """A manager for a tag that connects to nobody yet: tensors that are made in its pool have addresses,
    with one block of memory behind all of them, until the process takes over."""
    if tag in _pools:
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
    them copies nothing.

    :raises RuntimeError: there is no manager for the tag, or it does not write, or
        :func:`vpmm.torch.use` has taken the place of PyTorch's own allocator, which alone has such pools.
    """
    import torch

    from .. import torch as plugged

    if plugged.is_used():
        raise RuntimeError("PyTorch has such pools with its own allocator only: not after vpmm.torch.use()")
    pool = _pools.get(tag)
    if pool is None:
        raise RuntimeError(f"there is no manager for {tag!r}")
    manager = pool.manager
    is_scratch = pool.is_scratch and not manager.is_connected
    if not (is_scratch or manager.granted_lock_type is GrantedLockType.RW):
        raise RuntimeError(f"the manager for {tag!r} does not write: no tensors can be made there")
    if pool.memory is None:
        pool.memory = _new_memory()
    manager.begin_torch(tag, is_scratch)
    try:
        with torch.cuda.use_mem_pool(pool.memory, manager.device if device is None else device):
            yield
    finally:
        call(lib.vpmm_gms_torch_end)


use_pool = gms_use_mem_pool


def release_unused(manager: GMSClientMemoryManager) -> None:
    """Ends a writer's pool: memory in it that no tensor has goes back to the server, so that it is not
    published. Tensors in it stay."""
    import torch

    for pool in _pools.values():
        if pool.manager is manager and pool.memory is not None:
            torch.cuda.synchronize(manager.device)
            # PyTorch gives the segments of a pool that has ended back as they become free.
            pool.memory = None
            torch.cuda.empty_cache()


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
