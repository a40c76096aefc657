"""One pool for each Dask worker, sized and logged.

From a client:

>>> from vpmm.dask import VpmmPlugin
>>> client.register_plugin(VpmmPlugin(limit="60 GB", cupy=True))

or from the command line of a worker, with options of the same names:

    dask worker tcp://… --preload vpmm.dask --vpmm-limit "60 GB" --vpmm-cupy

A worker that stands for one GPU sees that one (``CUDA_VISIBLE_DEVICES``, as dask-cuda sets it), which is
then device 0. This module needs Dask's ``distributed``.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import click
from distributed import WorkerPlugin

from . import _pool, _snapshot
from ._errors import InUseError

_log = logging.getLogger("distributed.vpmm")


def _begin(options: dict[str, Any], *, cupy: bool, history: int) -> None:
    try:
        _pool.configure(**options)
    except InUseError:
        # Made by something before, or by a plug-in of the same name that is registered again.
        _log.warning("the worker's pool was made before, and stays as it is")
    _pool.Pool.of_process()
    if history:
        _snapshot.record_history(history)
    if cupy:
        import cupy as library

        from .cupy import allocator

        library.cuda.set_allocator(allocator)
    _log.info("vpmm's pool on device 0: %s", options or "no limit")


def _end(snapshot: str | None, name: Any) -> None:
    now = _pool.statistics()
    _log.info("vpmm held at most %s bytes, %s live", now.peak_mapped_bytes, now.peak_live_bytes)
    if snapshot:
        safe = "".join(letter if letter.isalnum() else "-" for letter in str(name))
        _snapshot.snapshot(os.path.join(snapshot, f"vpmm-{safe}.pickle"))


class VpmmPlugin(WorkerPlugin):
    """Makes each worker's pool when the worker starts.

    ``limit`` and whatever else :class:`vpmm.Pool` takes; ``cupy`` has CuPy allocate from the pool;
    ``history`` is how many requests are kept; with ``snapshot``, a folder, each worker writes what its pool
    held there when it ends. What a worker's pool holds shows under ``vpmm`` in the worker's metrics, and is
    answered by ``client.run(vpmm.statistics)``.
    """

    name = "vpmm"

    def __init__(self, *, cupy: bool = False, history: int = 0, snapshot: str | None = None, **options: Any):
        # A mistake is told to the client, and not by every worker.
        _pool._options(0, **options)
        self._options, self._cupy = options, cupy
        self._history, self._snapshot = history, snapshot

    def setup(self, worker: Any) -> None:
        """Called by the worker when it starts."""
        _begin(self._options, cupy=self._cupy, history=self._history)
        worker.metrics["vpmm"] = _metric
        self._worker = worker

    def teardown(self, worker: Any) -> None:
        """Called by the worker when it ends."""
        _end(self._snapshot, worker.name)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_worker"}


async def _metric(_: Any) -> dict[str, int]:
    now = _pool.statistics()
    return {"live_bytes": now.live_bytes, "held_bytes": now.mapped_bytes}


@click.command()
@click.option("--vpmm-limit", help="the most that the pool may hold, as in '60 GB'")
@click.option("--vpmm-release-threshold", help="free memory above this goes back to the device")
@click.option("--vpmm-cupy", is_flag=True, help="have CuPy allocate from the pool")
@click.option("--vpmm-history", type=int, default=0, help="requests that are kept")
@click.option("--vpmm-snapshot", help="a folder for what the pool held at the end")
def dask_setup(
    worker: Any,
    vpmm_limit: str | None,
    vpmm_release_threshold: str | None,
    vpmm_cupy: bool,
    vpmm_history: int,
    vpmm_snapshot: str | None,
) -> None:
    """Called by ``--preload vpmm.dask``."""
    given = {"limit": vpmm_limit, "release_threshold": vpmm_release_threshold}
    options = {name: value for name, value in given.items() if value is not None}
    worker._vpmm = VpmmPlugin(cupy=vpmm_cupy, history=vpmm_history, snapshot=vpmm_snapshot, **options)
    worker._vpmm.setup(worker)


def dask_teardown(worker: Any) -> None:
    """Called by ``--preload vpmm.dask``."""
    worker._vpmm.teardown(worker)
