"""A worker process with a pool of its own: what Dask's and Ray's workers have in common."""

from __future__ import annotations

import logging
import os
from typing import Any

from . import _pool, _snapshot, mr
from ._errors import InUseError
from ._typing import Unpack

_LOGGER = logging.getLogger("vpmm")


class Settings(_pool.PoolOptions, total=False):
    """What :class:`Worker` takes by name."""

    pool_size: int | str | None
    torch: bool
    cupy: bool
    numba: bool
    history: int
    snapshot: str | None
    log: str | None
    log_directory: str | None


class Worker:
    """What a worker's pool is to be, and who allocates from it.

    ``limit`` and whatever else :class:`vpmm.Pool` takes. ``pool_size`` is what the pool holds from the begin.
    ``torch``, ``cupy`` and ``numba`` have these libraries allocate from it. ``history`` is how many requests
    are kept; with ``snapshot``, a folder, the worker writes what its pool held there when it ends. ``log`` is
    a file for a row for each allocation of buffers, CuPy and Numba, in RMM's format, in ``log_directory``
    where one is given, in which it is ``vpmm.csv`` without a name. Folders are made.
    """

    def __init__(
        self,
        *,
        pool_size: int | str | None = None,
        torch: bool = False,
        cupy: bool = False,
        numba: bool = False,
        history: int = 0,
        snapshot: str | None = None,
        log: str | None = None,
        log_directory: str | None = None,
        **options: Unpack[_pool.PoolOptions],
    ):
        # A mistake is told to who asks for workers, and not by every worker.
        _pool._options(0, **options)
        self.options, self.pool_size = options, _pool.bytes_of(pool_size or 0)
        self.torch, self.cupy, self.numba = torch, cupy, numba
        self.history, self.snapshot = history, snapshot
        self.log = log if log_directory is None else os.path.join(log_directory, log or "vpmm.csv")

    @classmethod
    def check(cls, **settings: Unpack[Settings]) -> None:
        """Raises what is wrong with settings, to which others may be added: as long as they leave the profile
        open it is the one that they fit."""
        if "profile" not in settings and (settings.get("initial_pages") or settings.get("page_size")):
            settings = {**settings, "profile": "paged"}
        cls(**settings)

    def prepare(self) -> None:
        """Has the process's pool be so once it is made, and libraries allocate from it. Touches no device, so
        that ``CUDA_VISIBLE_DEVICES`` may still be set."""
        try:
            _pool.configure(**self.options)
        except InUseError:
            # Made by something before, or by a worker's settings that are given once more.
            _LOGGER.warning("the worker's pool was made before, and stays as it is")
        if self.cupy:
            import cupy

            from .cupy import allocator

            cupy.cuda.set_allocator(allocator)
        if self.numba:
            from numba import cuda

            from .numba import VpmmNumbaManager

            cuda.set_memory_manager(VpmmNumbaManager)
        if self.torch:
            from . import torch

            torch.use()

    def begin(self, name: str = "") -> None:
        """Makes the process's pool of device 0, which is the worker's own GPU where
        ``CUDA_VISIBLE_DEVICES`` says so. ``name`` tells workers' files apart."""
        self.prepare()
        pool = _pool.Pool.of_process()
        if self.pool_size:
            pool.free(pool.malloc(self.pool_size))
        if self.history:
            _snapshot.record_history(self.history)
        if self.snapshot:
            # A folder that cannot be there is told of now, and not when the work is done.
            os.makedirs(self.snapshot, exist_ok=True)
        if self.log:
            os.makedirs(os.path.dirname(self.log) or ".", exist_ok=True)
            stem, ending = os.path.splitext(self.log)
            file = f"{stem}{_in_a_file_s_name(name)}{ending}"
            process = mr.PoolMemoryResource.of_process()
            mr.set_current_device_resource(mr.LoggingResourceAdaptor(process, file))
        _LOGGER.info("vpmm's pool on device 0: %s", self.options or "no limit")

    def end(self, name: str) -> None:
        """Says what the pool held at most, and writes what is to be written."""
        now = _pool.statistics()
        held = now.peak_mapped_bytes + now.peak_small_mapped_bytes
        _LOGGER.info("vpmm held at most %s bytes, %s live", held, now.peak_live_bytes)
        if self.log:
            # What is still allocated by it is freed through it; its file ends with the last of that.
            mr.reset_current_device_resource()
        if self.snapshot:
            file = f"vpmm{_in_a_file_s_name(name)}.pickle"
            _snapshot.snapshot(os.path.join(self.snapshot, file))


def _in_a_file_s_name(name: Any) -> str:
    safe = "".join(letter if letter.isalnum() else "-" for letter in str(name))
    return f"-{safe}" if safe else ""
