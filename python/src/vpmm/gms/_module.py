"""A module's tensors by their names: parameters, buffers, and those that are plain attributes, such as the
scales of a quantised layer."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any


def registered(module: Any) -> Iterator[tuple[str, Any, str]]:
    """Parameters and buffers: name, tensor, kind. Those that have several names have each of them."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield name, parameter, "parameter"
    for name, buffer in module.named_buffers(remove_duplicate=False):
        yield name, buffer, "buffer"


def attributes(module: Any) -> Iterator[tuple[str, Any, str]]:
    """Tensors that a module has as attributes, and those in lists and tuples of nothing else, as ``name.0``
    and so on. Not what is a parameter or buffer under another name, nor what properties make."""
    import torch

    known = {id(tensor) for _, tensor, _ in registered(module)}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for name, value in vars(owner).items():
            if isinstance(value, torch.Tensor):
                if id(value) not in known:
                    yield start + name, value, "tensor_attr"
            elif isinstance(value, list | tuple) and value:
                if all(isinstance(item, torch.Tensor) for item in value):
                    for number, item in enumerate(value):
                        if id(item) not in known:
                            yield f"{start}{name}.{number}", item, "tensor_attr"


def put_attributes(module: Any, tensors: dict[str, tuple[Any, str]]) -> None:
    """Has a module have tensors, each with its kind, as attributes by the names of :func:`attributes`: a
    parameter's as it is, of others copies. Where the module has one of the kind already it gets the
    memory, so that whoever else knows it has that, too. Names of parts that the module does not have are
    left out, and so is what is a parameter or buffer there."""
    known = {id(tensor) for _, tensor, _ in registered(module)}
    items: dict[tuple[Any, str], dict[int, tuple[Any, str]]] = collections.defaultdict(dict)
    for name, tensor in tensors.items():
        owner, path = module, name.split(".")
        while len(path) > 1 and owner._modules.get(path[0]) is not None:
            owner = owner._modules[path.pop(0)]
        attribute = path[0]
        if isinstance(getattr(type(owner), attribute, None), property):
            continue
        if len(path) == 1:
            setattr(owner, attribute, _put(getattr(owner, attribute, None), tensor, known))
        elif len(path) == 2 and path[1].isdigit():
            items[owner, attribute][int(path[1])] = tensor
    for (owner, attribute), numbered in items.items():
        held = getattr(owner, attribute, [])
        if not isinstance(held, list | tuple):
            continue
        made = list(held)
        for number, tensor in sorted(numbered.items()):
            if number < len(made):
                made[number] = _put(made[number], tensor, known)
            elif number == len(made):
                made.append(_put(None, tensor, known))
        whole: Any = tuple(made)
        if isinstance(held, list):
            held[:] = made
            whole = held
        elif hasattr(held, "_fields"):
            whole = type(held)(*made)
        setattr(owner, attribute, whole)


def _put(held: Any, published: tuple[Any, str], known: set[int]) -> Any:
    """What is to stand where a tensor is to be put."""
    import torch

    if id(held) in known:
        return held
    tensor, kind = published
    if kind != "parameter":
        tensor = tensor.clone()
    if not isinstance(held, torch.Tensor) or held.is_inference():
        return tensor
    if (held.shape, held.dtype, held.device) != (tensor.shape, tensor.dtype, tensor.device):
        return tensor
    held.data = tensor
    return held
