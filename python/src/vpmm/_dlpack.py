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


class _Version(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]


class _Versioned(ctypes.Structure):
    """The same since version 1.0. Its flags say whether memory may be written; the other leaves it open."""

    _fields_ = [
        ("version", _Version),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


#: What is lent, by the address of its description: kept until the borrower calls the deleter.
_LENT: dict[int, tuple[Any, ...]] = {}

# For ever: borrowers may outlast this module, and look there for the deleter.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_LENT))

#: Capsules keep their addresses.
_NAME, _NAME_OF_VERSIONED = b"dltensor", b"dltensor_versioned"

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(managed: int) -> None:
    _LENT.pop(managed, None)


# The borrower and the capsule call these, which call that: either may end while an exception is under way.
_deleter, _deleter_of_versioned = (
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address(ffi.addressof(lib, name)))
    for name in ("vpmm_python_delete", "vpmm_python_delete_versioned")
)
_end_capsule = address(ffi.addressof(lib, "vpmm_python_end_capsule"))


def capsule(owner: Any, pointer: int, size: int, device: tuple[int, int], *, is_versioned: bool) -> Any:
    """A capsule that lends bytes, and keeps their owner until the borrower is done."""
    shape = (ctypes.c_int64 * 1)(size)
    managed: _Managed | _Versioned
    if is_versioned:
        managed, name = _Versioned(version=_Version(1, 0), deleter=_deleter_of_versioned), _NAME_OF_VERSIONED
    else:
        managed, name = _Managed(deleter=_deleter), _NAME
    managed.tensor.data = pointer or None
    managed.tensor.device = _Device(*device)
    managed.tensor.ndim = 1
    managed.tensor.dtype = _Type(_UNSIGNED, 8, 1)
    managed.tensor.shape = shape
    managed.context = ctypes.cast(_delete, ctypes.c_void_p)
    at = ctypes.addressof(managed)
    _LENT[at] = (owner, managed, shape)
    return _new_capsule(at, name, _end_capsule)
