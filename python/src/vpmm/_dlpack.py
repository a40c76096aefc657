"""Memory lent by DLPack: https://dmlc.github.io/dlpack."""

from __future__ import annotations

import ctypes
from typing import Any

#: ``kDLCPU``, ``kDLCUDA``, ``kDLCUDAHost``, ``kDLCUDAManaged``.
CPU, CUDA, PINNED, MANAGED = 1, 2, 3, 13
_UNSIGNED = 1


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    ]


#: What is lent, by the address of its description: kept until the borrower calls the deleter.
_LENT: dict[int, tuple[Any, ...]] = {}

_NAME = b"dltensor"

_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _api)
)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(managed: int) -> None:
    _LENT.pop(managed, None)


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _end_capsule(capsule: int) -> None:
    # Who takes the memory renames the capsule; one that nobody took gives it back here.
    if _is_valid(capsule, _NAME):
        _LENT.pop(_pointer_of(capsule, _NAME), None)


def capsule(owner: Any, pointer: int, size: int, device: tuple[int, int]) -> Any:
    """A capsule that lends bytes, and keeps their owner until the borrower is done."""
    shape = (ctypes.c_int64 * 1)(size)
    managed = _Managed()
    managed.tensor.data = pointer or None
    managed.tensor.device = _Device(*device)
    managed.tensor.ndim = 1
    managed.tensor.dtype = _Type(_UNSIGNED, 8, 1)
    managed.tensor.shape = shape
    managed.deleter = _delete
    at = ctypes.addressof(managed)
    _LENT[at] = (owner, managed, shape)
    return _api.PyCapsule_New(at, _NAME, ctypes.cast(_end_capsule, ctypes.c_void_p))
