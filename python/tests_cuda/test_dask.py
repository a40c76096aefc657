"""A worker for each of two GPUs, with a pool each, by the plug-in and by options of a command line. Skipped
without two GPUs or without Dask."""

import functools
import os
import subprocess
import sys

import pytest

import vpmm

distributed = pytest.importorskip("distributed", reason="Dask's distributed is not installed")


def _gpus():
    """In a process of its own, so that this one starts no driver for it."""
    program = "import vpmm; print(vpmm.device_count())"
    environment = {**os.environ, "VPMM_DEVICE": "cuda"}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    return int(ran.stdout) if ran.returncode == 0 else 0


GPUS = _gpus()
if GPUS < 2:
    pytest.skip(f"{GPUS} GPUs, where two are needed", allow_module_level=True)

MIB = 1 << 20


def specification(number, **options):
    """One worker of a cluster, that sees one GPU."""
    return {
        "cls": distributed.Nanny,
        "options": {
            "nthreads": 1,
            "name": f"gpu-{number}",
            "env": {"CUDA_VISIBLE_DEVICES": str(number)},
            **options,
        },
    }


def two_workers(**options):
    workers = {number: specification(number, **options) for number in range(2)}
    scheduler = {"cls": distributed.Scheduler, "options": {"dashboard": False, "port": 0}}
    return distributed.SpecCluster(workers=workers, scheduler=scheduler)


def which_gpu():
    """Runs on a worker: the GPU by its address on the bus."""
    import ctypes

    driver, text = ctypes.CDLL("libcuda.so.1"), ctypes.create_string_buffer(64)
    driver.cuInit(0)
    if driver.cuDeviceGetPCIBusId(text, 64, 0):
        raise RuntimeError("the driver does not say which GPU it is")
    return text.value.decode()


def work(size):
    """Runs on a worker."""
    import vpmm

    pattern = bytes([size % 251 + 1])
    buffer = vpmm.DeviceBuffer.from_bytes(pattern * size)
    return buffer.to_bytes() == pattern * size, vpmm.device_count()


def ask_too_much(size):
    """Runs on a worker."""
    import vpmm

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
        client.wait_for_workers(2, timeout=60)
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
        client.wait_for_workers(2, timeout=60)
        check(client, "3 GiB")
