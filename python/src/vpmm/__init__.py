"""GPU memory pools on CUDA's virtual memory management, for PyTorch, CuPy, Numba and by hand.

One pool a device serves the whole process: ``vpmm.torch.use()``, ``vpmm.cupy.allocator`` and
``vpmm.numba.VpmmNumbaManager`` all take memory from it, and :func:`statistics` says what it holds.
Nothing of the three is imported before it is asked for. With the environment variable
``VPMM_DEVICE=sim`` a simulated device takes the GPU's place.
"""

from __future__ import annotations

from . import mr
from ._buffer import DeviceBuffer
from ._errors import (
    ContextLostError,
    DisconnectedError,
    DriverError,
    Error,
    InputOutputError,
    InUseError,
    InvalidArgumentError,
    LockTimeoutError,
    NotFoundError,
    NoThreadError,
    OutOfMemoryError,
    PointerError,
    RefusedError,
    StaleMemoryLayoutError,
    StateError,
    StreamError,
    UnsupportedError,
)
from ._library import lib as _lib
from ._pool import (
    Pool,
    PoolOptions,
    Statistics,
    configure,
    device_count,
    device_memory,
    forget_stream,
    keep_stream,
    reset_peaks,
    statistics,
    trim,
)
from ._profile import Record, forget_records, profile, records, report
from ._share import Export, Imported
from ._sleep import resume, suspend, tag
from ._snapshot import record_history, snapshot

__all__ = [
    "ContextLostError",
    "DeviceBuffer",
    "DisconnectedError",
    "DriverError",
    "Error",
    "Export",
    "Imported",
    "InUseError",
    "InputOutputError",
    "InvalidArgumentError",
    "LockTimeoutError",
    "NoThreadError",
    "NotFoundError",
    "OutOfMemoryError",
    "PointerError",
    "Pool",
    "PoolOptions",
    "Record",
    "RefusedError",
    "StaleMemoryLayoutError",
    "StateError",
    "Statistics",
    "StreamError",
    "UnsupportedError",
    "configure",
    "device_count",
    "device_memory",
    "forget_records",
    "forget_stream",
    "keep_stream",
    "mr",
    "profile",
    "record_history",
    "records",
    "report",
    "reset_peaks",
    "resume",
    "snapshot",
    "statistics",
    "suspend",
    "tag",
    "trim",
]


def _version() -> str:
    number = _lib.vpmm_version()
    return f"{number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"


__version__ = _version()
