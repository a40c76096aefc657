"""A worker for each of two GPUs, with a pool each, by the plug-in and by options of a command line. Skipped
without two GPUs or without Dask. With VPMM_DEVICE=sim each worker has a simulated device in its GPU's place,
which shows what is wrong in here.
"""

import functools
import os
import subprocess
import sys

import pytest

import vpmm

distributed = pytest.importorskip("distributed", reason="Dask's distributed is not installed")

MIB = 1 << 20

#: What the workers' GPUs go by: those that this process was given, or else all.
GPUS = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]


# Not where the module is read: workers, which see one GPU each, read it too, for the functions below.
@pytest.fixture(scope="module", autouse=True)
def two_gpus():
    """They are counted in a process of its own, so that this one starts no driver for it."""
    if os.environ.get("VPMM_DEVICE") == "sim":
        return
    program = "import vpmm; print(vpmm.device_count())"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    # What went wrong, or the number and no more.
    said = ran.stdout.strip() if ran.returncode == 0 else ran.stderr.strip()
    if not said.isdigit() or int(said) < 2:
        pytest.skip(f"two GPUs are needed: {said.splitlines()[-1] if said else ran.returncode}")


def specification(number, **options):
    """One worker of a cluster, that sees one GPU."""
    return {
        "cls": distributed.Nanny,
        "options": {
            "nthreads": 1,
            "name": f"gpu-{number}",
            "host": "127.0.0.1",
            "env": {"CUDA_VISIBLE_DEVICES": GPUS[number]},
            # By default a thread's part of the machine's memory, of which some show little at first: less
            # than a process with CUDA in it takes.
            "memory_limit": None,
            **options,
        },
    }


def two_workers(**options):
    workers = {number: specification(number, **options) for number in range(2)}
    scheduler = {
        "cls": distributed.Scheduler,
        "options": {"dashboard": False, "dashboard_address": ":0", "host": "127.0.0.1", "port": 0},
    }
    return distributed.SpecCluster(workers=workers, scheduler=scheduler)


def which_gpu():
    """Runs on a worker: the GPU by its address on the bus."""
    import ctypes

    if os.environ.get("VPMM_DEVICE") == "sim":
        return os.environ["CUDA_VISIBLE_DEVICES"]
    driver, text = ctypes.CDLL("libcuda.so.1"), ctypes.create_string_buffer(64)
    status = driver.cuInit(0) or driver.cuDeviceGetPCIBusId(text, 64, 0)
    if status:
        raise RuntimeError(f"the driver does not say which GPU it is: {status}")
    return text.value.decode()


def work(size):
    """Runs on a worker."""
    pattern = bytes([size % 251 + 1])
    buffer = vpmm.DeviceBuffer.from_bytes(pattern * size)
    return buffer.to_bytes() == pattern * size, vpmm.device_count()


def ask_too_much(size):
    """Runs on a worker."""
    try:
        vpmm.DeviceBuffer(size)
    except MemoryError as error:
        return str(error)


def check(client, limit):
    gpus = client.run(which_gpu)
    assert len(gpus) == 2 and len({*gpus.values()}) == 2, gpus
    for worker in gpus:
        on = functools.partial(client.map, workers=[worker], pure=False)
        answers = client.gather(on(work, [MIB + 1000 * turn for turn in range(40)]))
        assert answers == [(True, 1)] * 40
        (text,) = client.gather(on(ask_too_much, [4096 * MIB]))
        assert f"at most {limit}" in text
    held = client.run(lambda: vpmm.statistics().peak_live_bytes)
    assert all(peak >= MIB for peak in held.values())


def test_a_worker_for_each_gpu_by_the_plug_in(tmp_path):
    from vpmm.dask import VpmmPlugin

    with two_workers() as made, distributed.Client(made) as client:
        client.wait_for_workers(2, timeout=120)
        plugin = VpmmPlugin(limit="2 GiB", pool_size="1 GiB", history=100, snapshot=str(tmp_path))
        client.register_plugin(plugin)
        check(client, "2 GiB")
        held = client.run(lambda: vpmm.statistics().mapped_bytes)
        assert all(size >= 1024 * MIB for size in held.values())
        client.unregister_worker_plugin("vpmm")
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["vpmm-gpu-0.pickle", "vpmm-gpu-1.pickle"]


def test_a_worker_for_each_gpu_by_a_command_line():
    options = {"preload": ["vpmm.dask"], "preload_argv": [["--vpmm-limit", "3 GiB"]]}
    with two_workers(**options) as made, distributed.Client(made) as client:
        client.wait_for_workers(2, timeout=120)
        check(client, "3 GiB")
