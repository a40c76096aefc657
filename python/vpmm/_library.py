"""libvpmm by ctypes: where it is, what it declares, and how its errors become exceptions.

PyTorch, CuPy and this package must share one copy of the library, since it has the process's pools. So
it is a file that each of them opens, and not a part of an extension module.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p

from ._errors import error_of

_HERE = pathlib.Path(__file__).resolve().parent

#: Every device that has no options of its own, for :func:`vpmm.configure`.
EVERY_DEVICE = 0xFFFF_FFFF


def path() -> str:
    """The file of the library: what ``VPMM_LIBRARY`` names, else the one in this package."""
    named = os.environ.get("VPMM_LIBRARY")
    file = pathlib.Path(named) if named else _HERE / "libvpmm.so"
    if not file.is_file():
        hint = "set VPMM_LIBRARY, or install the package with `pip install ./python`"
        raise ImportError(f"libvpmm is not at {file}: {hint}")
    return str(file)


class PoolOptions(ctypes.Structure):
    """``vpmm_pool_options``."""

    _fields_ = [
        ("size", c_size_t),
        ("device", c_uint32),
        ("profile", c_uint32),
        ("limit_bytes", c_uint64),
        ("va_size_bytes", c_uint64),
        ("release_threshold_bytes", c_uint64),
        ("wait_nanoseconds", c_uint64),
        ("initial_pages", c_uint64),
        ("page_size_bytes", c_uint64),
        ("pending_policy", c_uint32),
        ("reserved", c_uint32),
    ]


class Stats(ctypes.Structure):
    """``vpmm_stats``."""

    _fields_ = [("size", c_size_t)] + [
        (name, c_uint64)
        for name in (
            "live_bytes",
            "peak_live_bytes",
            "cached_bytes",
            "idle_bytes",
            "pending_bytes",
            "mapped_bytes",
            "peak_mapped_bytes",
            "reserved_bytes",
            "small_live_bytes",
            "small_mapped_bytes",
            "peak_small_mapped_bytes",
            "live_count",
            "small_live_count",
            "extent_count",
            "extents_created",
            "extents_moved",
            "device_waits",
            "host_waits",
        )
    ]


_Handle = c_void_p

#: Functions that answer a status, with the types of their arguments. A test holds this to `vpmm.h`.
CHECKED = {
    "vpmm_driver_device_count": (_Handle, POINTER(c_uint32)),
    "vpmm_stream_create": (_Handle, c_uint32, POINTER(c_void_p)),
    "vpmm_stream_destroy": (_Handle, c_void_p),
    "vpmm_stream_synchronize": (_Handle, c_uint32, c_void_p),
    "vpmm_pool_create": (_Handle, POINTER(PoolOptions), POINTER(_Handle)),
    "vpmm_pool_destroy": (_Handle,),
    "vpmm_malloc": (_Handle, c_size_t, c_void_p, POINTER(c_void_p)),
    "vpmm_free": (_Handle, c_void_p, c_void_p),
    "vpmm_record_stream": (_Handle, c_void_p, c_void_p),
    "vpmm_pool_trim_to": (_Handle, c_uint64, POINTER(c_uint64)),
    "vpmm_pool_reset_peaks": (_Handle,),
    "vpmm_pool_stats": (_Handle, POINTER(Stats)),
    "vpmm_pool_layout": (_Handle, c_char_p, c_size_t, POINTER(c_size_t)),
    "vpmm_pool_validate": (_Handle,),
    "vpmm_process_configure": (POINTER(PoolOptions),),
    "vpmm_process_driver": (POINTER(_Handle),),
    "vpmm_process_pool": (c_uint32, POINTER(_Handle)),
    "vpmm_process_malloc": (c_uint32, c_size_t, c_void_p, POINTER(c_void_p)),
    "vpmm_process_free": (c_uint32, c_void_p, c_void_p),
    "vpmm_process_forget_stream": (c_uint32, c_void_p, POINTER(c_uint32)),
}

#: Functions that answer anything else: the type of that first.
OTHERS = {
    "vpmm_version": (c_uint32,),
    "vpmm_last_error": (c_char_p,),
    "vpmm_status_name": (c_char_p, c_int),
    "vpmm_driver_release": (None, _Handle),
    "vpmm_pool_release": (None, _Handle),
    "vpmm_pool_options_init": (None, POINTER(PoolOptions)),
    "vpmm_stats_init": (None, POINTER(Stats)),
    "vpmm_torch_failed_frees": (c_uint64,),
}


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(path())
    for name, arguments in CHECKED.items():
        function = getattr(library, name)
        function.restype, function.argtypes = c_int, arguments
        function.errcheck = _check
    for name, (result, *arguments) in OTHERS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _check(status, function, arguments):
    if status:
        name = library.vpmm_status_name(status).decode()
        text = (library.vpmm_last_error() or b"").decode(errors="replace")
        raise error_of(name, text)
    return status


library = _load()


def address(name: str) -> int:
    """The address of a function of the library."""
    return ctypes.cast(getattr(library, name), c_void_p).value


def answer(name: str, kind, *arguments):
    """Calls a function that writes one value through its last argument, and answers the value."""
    value = kind()
    getattr(library, name)(*arguments, byref(value))
    return value.value
