"""Dask workers with a pool each. Skipped where Dask is not installed."""

import contextlib
import csv
import errno
import os
import pathlib
import pickle
import subprocess
import sys
import textwrap
import time

import pytest

import vpmm
from vpmm._worker import Settings

distributed = pytest.importorskip("distributed")


def hold(size):
    """Runs on a worker."""
    buffer = vpmm.DeviceBuffer.from_bytes(bytes([size % 256]) * size)
    return buffer.to_bytes().count(bytes([size % 256]))


def ask_too_much():
    """Runs on a worker."""
    try:
        vpmm.DeviceBuffer(64 << 20)
    except MemoryError as error:
        return str(error)


def log_nowhere():
    """Runs on a worker."""
    vpmm.mr.LoggingResourceAdaptor(vpmm.mr.CudaMemoryResource(), "/nowhere/log.csv")


@pytest.fixture
def client():
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as made,
    ):
        yield made


def test_each_worker_has_a_pool_of_its_own(client, tmp_path):
    from vpmm.dask import VpmmPlugin

    with pytest.raises(TypeError):
        VpmmPlugin(colour="blue")
    plugin = VpmmPlugin(limit="32 MiB", history=100, snapshot=str(tmp_path))
    client.register_plugin(plugin)
    sizes = list(range(1000, 200_000, 9973))
    assert client.gather(client.map(hold, sizes)) == sizes
    answers = client.run(ask_too_much)
    assert len(answers) == 2 and all("at most 32 MiB" in text for text in answers.values())
    peaks = client.run(lambda: vpmm.statistics().peak_live_bytes)
    assert all(peak >= 1000 for peak in peaks.values()) and len(peaks) == 2
    end = time.monotonic() + 30
    while time.monotonic() < end:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        if all("vpmm" in worker["metrics"] for worker in workers):
            break
        time.sleep(0.2)
    assert all(worker["metrics"]["vpmm"]["held_bytes"] > 0 for worker in workers)
    client.unregister_worker_plugin("vpmm")
    written = sorted(tmp_path.iterdir())
    assert len(written) == 2
    for file in written:
        events = pickle.loads(file.read_bytes())["device_traces"][0]
        assert {event["action"] for event in events} >= {"alloc", "free_completed", "oom"}


def test_a_worker_s_errors_come_as_what_they_are(client):
    with pytest.raises(vpmm.InputOutputError, match="/nowhere/log.dev0.csv") as came:
        client.submit(log_nowhere).result()
    assert (came.value.status, came.value.errno) == ("VPMM_IO_ERROR", errno.ENOENT)


def test_options_on_a_worker_s_command_line(tmp_path):
    with (
        distributed.LocalCluster(
            n_workers=1,
            threads_per_worker=1,
            dashboard_address=None,
            preload=["vpmm.dask"],
            preload_argv=[["--vpmm-limit", "48 MiB"]],
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        (text,) = client.run(ask_too_much).values()
        assert "at most 48 MiB" in text


#: PyTorch, CuPy and Numba as far as a worker needs them. They may not be there, and want a GPU.
_STAND_INS = {
    "cupy.py": """
        class cuda:
            allocators = []
            set_allocator = allocators.append
    """,
    # Not a file of its own: numba-cuda, where it is installed, would take its place.
    "numba.py": """
        import sys, types
        cuda = sys.modules["numba.cuda"] = types.ModuleType("numba.cuda")
        cuda.HostOnlyCUDAMemoryManager, cuda.managers = object, []
        cuda.set_memory_manager = cuda.managers.append
    """,
    "torch/__init__.py": """
        from . import cuda
    """,
    "torch/cuda/__init__.py": """
        from . import memory
        memory_stats = len
    """,
    "torch/cuda/memory.py": """
        class CUDAPluggableAllocator:
            def __init__(self, *_): pass
            def allocator(self): return self
            def __getattr__(self, name): return lambda address: None
        allocators = []
        def change_current_allocator(allocator):
            assert not allocators, "Can't swap an already initialized allocator"
            allocators.append(allocator)
    """,
}


def who_allocates():
    """Runs on a worker."""
    import cupy
    import numba.cuda
    import torch

    import vpmm.cupy
    import vpmm.numba
    import vpmm.torch

    return (
        cupy.cuda.allocators == [vpmm.cupy.allocator],
        numba.cuda.managers == [vpmm.numba.VpmmNumbaManager],
        torch.cuda.memory.allocators == [vpmm.torch.allocator()],
    )


def command_of_worker(address, *options):
    own = ["--nthreads", "1", "--no-dashboard", "--host", "127.0.0.1", "--memory-limit", "0"]
    return [sys.executable, "-m", "dask", "worker", address, *own, "--preload", "vpmm.dask", *options]


@contextlib.contextmanager
def a_worker(folder, *options):
    """A worker's own process, and its nanny's, by the command that a person types."""
    for name, text in _STAND_INS.items():
        file = folder / "stand-ins" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    paths = [str(folder / "stand-ins"), str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    with (
        distributed.LocalCluster(n_workers=0, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        command = command_of_worker(cluster.scheduler_address, "--name", "a worker/1", *options)
        log = folder / "worker.txt"
        with log.open("w") as out:
            process = subprocess.Popen(command, env=environment, cwd=folder, stdout=out, stderr=out)
        try:
            client.wait_for_workers(1, timeout=120)
            yield client, log
        finally:
            # As a person ends it: it ends its worker in turn.
            process.terminate()
            process.wait(timeout=60)


def test_a_worker_by_its_command(tmp_path):
    from vpmm.dask import VpmmPlugin

    options = "--vpmm-limit 48MiB --vpmm-pool-size 16MiB --vpmm-release-threshold 1GiB --vpmm-addresses 1GiB"
    options += " --vpmm-history 100 --vpmm-snapshot a/snapshots --vpmm-log-directory a/logs"
    options += " --vpmm-moves-per-second 0 --vpmm-torch --vpmm-cupy --vpmm-numba"
    with a_worker(tmp_path, *options.split()) as (client, log):
        (held,) = client.run(lambda: vpmm.statistics().mapped_bytes).values()
        assert held >= 16 << 20
        (text,) = client.run(ask_too_much).values()
        assert "at most 48 MiB" in text
        assert client.gather(client.map(hold, [1000, 2000])) == [1000, 2000]
        assert [*client.run(who_allocates).values()] == [(True, True, True)]
        # Once more from a client: what is set stays.
        named = {"addresses": "1 GiB", "release_threshold": "1 GiB", "moves_per_second": 0}
        plugin = VpmmPlugin(limit="48 MiB", torch=True, **named)
        client.register_plugin(plugin)
        assert client.gather(client.map(hold, [3000])) == [3000]
    assert "made before" not in log.read_text() and "Failed to" not in log.read_text()
    (snapshot,) = (tmp_path / "a" / "snapshots").iterdir()
    assert snapshot.name == "vpmm-a-worker-1.pickle"
    events = pickle.loads(snapshot.read_bytes())["device_traces"][0]
    assert {event["action"] for event in events} >= {"alloc", "free_completed", "oom"}
    (written,) = (tmp_path / "a" / "logs").iterdir()
    assert written.name == "vpmm-a-worker-1.dev0.csv"
    with written.open() as rows:
        assert [row["Action"] for row in csv.DictReader(rows)].count("allocate") == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--vpmm-colour", "blue"], "No such option"),
        (["--vpmm-limit", "60 GX"], "'60 GX' is no size"),
        (["--vpmm-limit", "0.8"], "0.8 is no size"),
        (["--vpmm-pool-size", "much"], "'much' is no size"),
        (["--vpmm-profile", "large"], "'large' is no profile"),
        (["--vpmm-prefer", "tea"], "prefer cannot be 'tea'"),
        (["--vpmm-moves-per-second", "-1"], "moves_per_second cannot be -1"),
        (["--vpmm-page-size", "2 MiB"], "page_size is of the paged profile"),
        (["--vpmm-ahead", "1 MiB", "--vpmm-profile", "paged"], "ahead is of the default profile"),
        (["--vpmm-history", "many"], "'many' is not a valid integer"),
    ],
)
def test_what_a_command_cannot_say_is_refused_at_once(options, said):
    # No scheduler is there, and none is asked for.
    command = command_of_worker("tcp://127.0.0.1:9", *options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and said in done.stderr, done.stderr


def test_a_command_has_all_options_of_pools():
    from vpmm.dask import dask_setup

    names = {parameter.name.removeprefix("vpmm_") for parameter in dask_setup.params}
    assert names == {*Settings.__annotations__}
