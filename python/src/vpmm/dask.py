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

from typing import Any

import click
from distributed import WorkerPlugin

from . import _pool
from ._typing import Unpack
from ._worker import Settings, Worker


class VpmmPlugin(WorkerPlugin):
    """Makes each worker's pool when the worker starts.

    ``limit`` and whatever else :class:`vpmm.Pool` takes; ``pool_size``, what it holds from the begin;
    ``torch``, ``cupy`` and ``numba`` have these libraries allocate from the pool; ``history`` is how many
    requests are kept; with ``snapshot``, a folder, each worker writes what its pool held there when it ends;
    ``log`` is a file, before whose ending the worker's name goes, for a row for each allocation of buffers,
    CuPy and Numba, in RMM's format, in the folder ``log_directory``, if one is given. What a worker's pool
    holds shows under ``vpmm`` in the worker's metrics, and is answered by ``client.run(vpmm.statistics)``.
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
    return {
        "live_bytes": now.live_bytes + now.small_live_bytes,
        "held_bytes": now.mapped_bytes + now.small_mapped_bytes,
    }


_OF_POOL = {
    "limit": (str, "the most that the pool may hold, as in '60 GB'"),
    "profile": (str, "'default' or 'paged'"),
    "addresses": (str, "addresses to reserve"),
    "release_threshold": (str, "free memory above this goes back to the device"),
    "moves_per_second": (int, "how much driver time goes into holding little"),
    "patience": (float, "seconds that a request looks whether others' freed memory becomes ready"),
    "background": (float, "seconds between two looks of a thread of the pool's own"),
    "ahead": (str, "free memory that this thread keeps mapped"),
    "wait": (float, "seconds that a request waits for memory that is in use"),
    "initial_pages": (int, "of the paged profile: pages mapped when the pool is made"),
    "page_size": (str, "of the paged profile: the bytes of a page"),
    "prefer": (str, "to 'grow', or to 'wait' for what other streams have freed"),
    "sharing": (str, "with other processes, by 'descriptors' or by 'fabric' handles"),
    "gpu_direct_rdma": (bool, "whether network cards may reach the memory"),
}


def _check(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    # While the command line is read: a worker whose preload fails says so in its log, and goes on without.
    if value is not None:
        # The profile is read first, as it says which of the others there are.
        profile: Any = context.params.get("vpmm_profile") or "default"
        try:
            Worker(**{"profile": profile, str(parameter.name).removeprefix("vpmm_"): value})
        except (ValueError, OverflowError) as error:
            raise click.BadParameter(str(error)) from None
    return value


def _with_options_of_pool(command: Any) -> Any:
    for name, (kind, text) in reversed(_OF_POOL.items()):
        flag, first = f"--vpmm-{name.replace('_', '-')}", name == "profile"
        command = click.option(flag, type=kind, callback=_check, is_eager=first, help=text)(command)
    return command


@click.command()
@_with_options_of_pool
@click.option("--vpmm-pool-size", callback=_check, help="what the pool holds from the begin")
@click.option("--vpmm-torch", is_flag=True, help="have PyTorch allocate from the pool")
@click.option("--vpmm-cupy", is_flag=True, help="have CuPy allocate from the pool")
@click.option("--vpmm-numba", is_flag=True, help="have Numba allocate from the pool")
@click.option("--vpmm-history", type=click.IntRange(0), default=0, help="requests that are kept")
@click.option("--vpmm-snapshot", help="a folder for what the pool held at the end")
@click.option("--vpmm-log", help="a file for a row for each allocation")
@click.option("--vpmm-log-directory", help="a folder for that file")
def dask_setup(worker: Any, **given: Any) -> None:
    """Called by ``--preload vpmm.dask``."""
    settings = {name.removeprefix("vpmm_"): value for name, value in given.items() if value is not None}
    worker._vpmm = VpmmPlugin(**settings)
    worker._vpmm.setup(worker)


def dask_teardown(worker: Any) -> None:
    """Called by ``--preload vpmm.dask``."""
    worker._vpmm.teardown(worker)
