"""PyTorch's tensors in memory that the GPU memory service owns.

One process publishes a module, any number of others attach it without a copy::

    with GMSClientMemoryManager(path) as manager:
        manager.connect(RequestedLockType.RW_OR_RO)
        if manager.granted_lock_type == GrantedLockType.RW:
            load_weights(module)
            publish(module, manager)
        else:
            attach(module, manager)

A module that is made in the service's memory is published without a copy, and a cache can be given up and
had back with its tensors' addresses kept::

    manager = get_or_create_gms_client_memory_manager(path, 0, RequestedLockType.RW, tag="weights")
    with use_pool("weights"):
        module = load_model()
    publish(module, manager)

Entries of metadata have the Python service's form, so that either side may be that one's.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Mapping
from typing import Any

from . import GMSClientMemoryManager, GrantedLockType, LocalMapping, RequestedLockType
from ._module import attributes, put_attributes, registered
from ._pools import (
    create_scratch_manager,
    evict_gms_client_memory_manager,
    get_gms_client_memory_manager,
    get_gms_client_memory_managers,
    get_or_create_gms_client_memory_manager,
    gms_use_mem_pool,
    prune_allocations,
    release_unused,
    use_pool,
)

__all__ = [
    "attach",
    "create_scratch_manager",
    "evict_gms_client_memory_manager",
    "get_gms_client_memory_manager",
    "get_gms_client_memory_managers",
    "get_or_create_gms_client_memory_manager",
    "gms_use_mem_pool",
    "materialize_module_from_gms",
    "prune_allocations",
    "publish",
    "register_module_tensors",
    "release_unused",
    "tensor_at",
    "tensors",
    "use_pool",
]


class _Memory:
    """Device memory for ``torch.as_tensor``, which takes it as it is. What keeps it alive goes along."""

    def __init__(self, address: int, size: int, keeper: Any):
        self.keeper = keeper
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensor_at(
    manager: GMSClientMemoryManager, address: int, shape: Any, dtype: Any, stride: Any = None
) -> Any:
    """A tensor on memory that a manager has mapped. The manager lives as long as the tensor."""
    import torch

    width = torch.empty((), dtype=dtype).element_size()
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device=f"cuda:{manager.device}")
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    memory = _Memory(address, (last + 1) * width, manager)
    flat = torch.as_tensor(memory, device=f"cuda:{manager.device}")
    return flat.view(dtype).as_strided(tuple(shape), tuple(stride))


def _describe(tensor: Any, kind: str) -> bytes:
    about = {
        "dtype": str(tensor.dtype),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "tensor_type": kind,
    }
    return json.dumps(about, sort_keys=True).encode()


class _Holders:
    """A manager's mappings as they are now, by what lies in them. In their order, as models have tens of
    thousands of tensors, each perhaps with a mapping of its own."""

    def __init__(self, mappings: Mapping[int, LocalMapping]):
        self._mappings, self._begins = mappings, sorted(mappings)

    def of(self, address: int, size: int) -> int | None:
        """Where the mapping begins that has these bytes."""
        # No two overlap: it is the last one that does not begin later.
        at = bisect.bisect_right(self._begins, address)
        if not at:
            return None
        va = self._begins[at - 1]
        return va if address + size <= va + self._mappings[va].aligned_size else None

    def allocation_id(self, va: int) -> str:
        """The allocation of the mapping that begins there."""
        return self._mappings[va].allocation_id


def register_module_tensors(manager: GMSClientMemoryManager, model: Any) -> set[str]:
    """Puts metadata for a module's tensors, which are in the manager's memory: the allocations' names.
    :func:`publish` does this and all the rest.

    :raises RuntimeError: a parameter is not in the manager's memory; buffers and tensors that are plain
        attributes need not be.
    """
    holders, names = _Holders(manager.mappings), set()
    for name, tensor, kind in itertools.chain(registered(model), attributes(model)):
        if tensor.numel() == 0 or (kind == "tensor_attr" and not tensor.is_cuda):
            continue
        address = tensor.data_ptr()
        va = holders.of(address, 1)
        if va is not None:
            allocation_id = holders.allocation_id(va)
            manager.metadata_put(name, allocation_id, address - va, _describe(tensor, kind))
            names.add(allocation_id)
        elif kind == "parameter":
            raise RuntimeError(f"{name} is not in the memory of the service")
    return names


def publish(
    module: Any, manager: GMSClientMemoryManager, tag: str = "weights", *, with_attributes: bool = True
) -> None:
    """Copies a module's parameters and buffers to memory of the service, unless they are there, has the
    module use that, and publishes it. The manager is a writer; afterwards it reads, and the module's
    parameters are read-only on the device: a kernel that writes to them fails. Buffers are in memory of the
    process's own, as programs write to them. Tensors that share their storage share it there.

    Tensors that are plain attributes of the module or its parts, or in lists or tuples that are, go with the
    buffers; without ``with_attributes`` only those that are in memory of the service.

    What was made with :func:`use_pool` is there. All that stands in such a pool is published with its
    memory, read-only as well: nothing but the module is to live there."""
    import torch

    storages: dict[int, tuple[int, Any]] = {}
    placed = []
    release_unused(manager)
    holders = _Holders(manager.mappings)
    with torch.no_grad():
        for name, tensor, kind in itertools.chain(registered(module), attributes(module)):
            if tensor.numel() == 0 or not tensor.is_cuda:
                continue
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            held = holders.of(key, storage.nbytes())
            if held is not None:
                storages[key] = (key, storage)
            elif kind == "tensor_attr" and not with_attributes and key not in storages:
                continue
            elif key not in storages:
                address = manager.create_mapping(size=storage.nbytes(), tag=tag)
                copy = tensor_at(manager, address, (storage.nbytes(),), torch.uint8)
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                copy.copy_(whole)
                # The storage stays alive, so that no other has its address.
                storages[key] = (address, storage)
            placed.append((name, tensor, kind, storages[key][0]))
    torch.cuda.synchronize(manager.device)
    holders = _Holders(manager.mappings)
    moved, copied = [], []
    for name, tensor, kind, address in placed:
        offset = tensor.storage_offset() * tensor.element_size()
        va = holders.of(address, 1)
        assert va is not None
        name_there = holders.allocation_id(va)
        manager.metadata_put(name, name_there, address - va + offset, _describe(tensor, kind))
        if tensor.data_ptr() == address + offset:
            if kind == "parameter":
                tensor.requires_grad_(False)
            else:
                copied.append(tensor)
            continue
        there = tensor_at(manager, address + offset, tensor.shape, tensor.dtype, tensor.stride())
        moved.append((tensor, kind, there))
    manager.commit()
    manager.connect(RequestedLockType.RO)
    manager.remap_all_vas()
    for tensor, kind, there in moved:
        if kind == "parameter":
            tensor.requires_grad_(False)
            tensor.data = there
    for tensor in copied:
        tensor.data = tensor.clone()


def tensors(manager: GMSClientMemoryManager) -> dict[str, tuple[Any, str]]:
    """The published tensors by name, in place and read-only, each with its kind: ``parameter``, ``buffer``
    or ``tensor_attr``."""
    import torch

    addresses = manager.import_all()
    found = {}
    for name in manager.metadata_list():
        entry = manager.metadata_get(name)
        if entry is None:
            continue
        allocation_id, offset, value = entry
        about = json.loads(value)
        dtype = getattr(torch, about["dtype"].removeprefix("torch."))
        address = addresses[allocation_id] + offset
        tensor = tensor_at(manager, address, about["shape"], dtype, about["stride"])
        found[name] = (tensor, about.get("tensor_type", "parameter"))
    return found


def attach(module: Any, manager: GMSClientMemoryManager) -> None:
    """Has a module, of the same structure as the one that was published, use the published tensors: the
    parameters as they are, read-only; buffers are copied, as programs write to them. The manager reads. The
    module may have been made on PyTorch's ``meta`` device, without memory of its own.

    What was published and is no parameter or buffer of the module becomes an attribute of the part of it
    that the name says, if there is one: a copy, but for parameters.

    :raises KeyError: the module has a tensor that was not published.
    :raises ValueError: a tensor was published with another shape or type.
    """
    import torch

    if manager.granted_lock_type == GrantedLockType.RW:
        raise ValueError("the manager writes: nothing is published")
    published = tensors(manager)
    others = dict(published)
    replaced: dict[int, Any] = {}
    with torch.no_grad():
        for name, tensor, kind in list(registered(module)):
            others.pop(name, None)
            if tensor.numel() == 0:
                continue
            there, _ = published[name]
            if there.shape != tensor.shape or there.dtype != tensor.dtype:
                text = f"{name} is {tensor.dtype} of {tuple(tensor.shape)}, published as"
                raise ValueError(f"{text} {there.dtype} of {tuple(there.shape)}")
            there = there if kind == "parameter" else there.clone()
            if tensor.device != there.device:
                replaced.setdefault(id(tensor), there)
                _replace(module, name, replaced[id(tensor)], kind)
                continue
            if kind == "parameter":
                tensor.requires_grad_(False)
            tensor.data = there
        put_attributes(module, others)


def _replace(module: Any, name: str, tensor: Any, kind: str) -> None:
    """Puts another tensor in a module's place, for one that is elsewhere."""
    import torch

    owner_name, _, leaf = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    if kind == "parameter":
        owner._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor


def materialize_module_from_gms(manager: GMSClientMemoryManager, model: Any, *, device_index: int) -> None:
    """:func:`attach`, as the Python service calls it."""
    if manager.device != device_index:
        raise RuntimeError(f"the manager is of device {manager.device}, not {device_index}")
    attach(model, manager)
