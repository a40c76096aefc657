"""Memory lent by DLPack: https://dmlc.github.io/dlpack."""

from __future__ import annotations

import ctypes
from typing import Any

from ._library import address, ffi, lib

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

# For ever: borrowers may outlast this module, and look there for the deleter.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_LENT))

#: Capsules keep its address.
_NAME = b"dltensor"

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(managed: int) -> None:
    _LENT.pop(managed, None)


# The borrower and the capsule call these, which call that: either may end while an exception is under way.
_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address(ffi.addressof(lib, "vpmm_python_delete")))
_end_capsule = address(ffi.addressof(lib, "vpmm_python_end_capsule"))


def capsule(owner: Any, pointer: int, size: int, device: tuple[int, int]) -> Any:
    """A capsule that lends bytes, and keeps their owner until the borrower is done."""
    shape = (ctypes.c_int64 * 1)(size)
    managed = _Managed()
    managed.tensor.data = pointer or None
    managed.tensor.device = _Device(*device)
    managed.tensor.ndim = 1
    managed.tensor.dtype = _Type(_UNSIGNED, 8, 1)
    managed.tensor.shape = shape
    managed.context = ctypes.cast(_delete, ctypes.c_void_p)
    managed.deleter = _deleter
    at = ctypes.addressof(managed)
    _LENT[at] = (owner, managed, shape)
    return _new_capsule(at, _NAME, _end_capsule)
