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

from typing import TYPE_CHECKING, Any

import click
from distributed import WorkerPlugin

from . import _pool
from ._worker import Settings, Worker

if TYPE_CHECKING:
    from typing_extensions import Unpack


class VpmmPlugin(WorkerPlugin):
    """Makes each worker's pool when the worker starts.

    ``limit`` and whatever else :class:`vpmm.Pool` takes; ``pool_size``, what it holds from the begin;
    ``torch``, ``cupy`` and ``numba`` have these libraries allocate from the pool; ``history`` is how many
    requests are kept; with ``snapshot``, a folder, each worker writes what its pool held there when it ends;
    ``log`` is a file, before whose ending the worker's name goes, for a row for each allocation of buffers,
    CuPy and Numba, in RMM's format. What a worker's pool holds shows under ``vpmm`` in the worker's metrics,
    and is answered by ``client.run(vpmm.statistics)``.
    """

    name = "vpmm"

    def __init__(self, **settings: Unpack[Settings]):
        self._settings = Worker(**settings)

    def setup(self, worker: Any) -> None:
        """Called by the worker when it starts."""
        self._settings.begin(worker.name)
        worker.metrics["vpmm"] = _metric

    def teardown(self, worker: Any) -> None:
        """Called by the worker when it ends."""
        self._settings.end(worker.name)


async def _metric(_: Any) -> dict[str, int]:
    now = _pool.statistics()
    return {"live_bytes": now.live_bytes, "held_bytes": now.mapped_bytes}


@click.command()
@click.option("--vpmm-limit", help="the most that the pool may hold, as in '60 GB'")
@click.option("--vpmm-pool-size", help="what the pool holds from the begin")
@click.option("--vpmm-release-threshold", help="free memory above this goes back to the device")
@click.option("--vpmm-torch", is_flag=True, help="have PyTorch allocate from the pool")
@click.option("--vpmm-cupy", is_flag=True, help="have CuPy allocate from the pool")
@click.option("--vpmm-numba", is_flag=True, help="have Numba allocate from the pool")
@click.option("--vpmm-history", type=int, default=0, help="requests that are kept")
@click.option("--vpmm-snapshot", help="a folder for what the pool held at the end")
@click.option("--vpmm-log", help="a file for a row for each allocation")
def dask_setup(worker: Any, **given: Any) -> None:
    """Called by ``--preload vpmm.dask``."""
    names = {name.removeprefix("vpmm_"): value for name, value in given.items()}
    worker._vpmm = VpmmPlugin(**{name: value for name, value in names.items() if value})
    worker._vpmm.setup(worker)


def dask_teardown(worker: Any) -> None:
    """Called by ``--preload vpmm.dask``."""
    worker._vpmm.teardown(worker)
