"""Dask workers with a pool each. Skipped where Dask is not installed."""

import pickle
import time

import pytest

import vpmm

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
