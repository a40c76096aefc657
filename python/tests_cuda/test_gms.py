"""PyTorch's tensors in the memory of a `vpmm serve` on a GPU. Run with VPMM_COMMAND naming the program."""

import multiprocessing
import os
import pathlib
import shutil
import subprocess
import time

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from vpmm.gms import GMSClientMemoryManager, GrantedLockType, RequestedLockType
from vpmm.gms.torch import attach, publish, tensor_at

MIB = 1 << 20


@pytest.fixture
def servers(tmp_path):
    command = os.environ.get("VPMM_COMMAND") or shutil.which("vpmm")
    if not command:
        pytest.skip("no `vpmm` program: name it in VPMM_COMMAND")
    paths, processes = {}, []
    try:
        for tag in ("weights", "kv_cache"):
            path = tmp_path / f"{tag}.sock"
            arguments = [command, "serve", "--device", "0", "--tag", tag, "--socket-path", str(path)]
            processes.append(subprocess.Popen(arguments))
            paths[tag] = str(path)
        deadline = time.monotonic() + 60
        while not all(pathlib.Path(path).exists() for path in paths.values()):
            assert all(process.poll() is None for process in processes)
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield paths
    finally:
        for process in processes:
            process.terminate()
            process.wait(30)


def _model():
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Embedding(1000, 256),
        torch.nn.Linear(256, 512),
        torch.nn.BatchNorm1d(512),
        torch.nn.Linear(512, 256, dtype=torch.float32),
    )
    model[0].weight = torch.nn.Parameter(model[0].weight.to(torch.bfloat16).float())
    model.register_parameter("tied", model[0].weight)
    model.register_parameter("narrow", torch.nn.Parameter(torch.randn(77, 3).to(torch.bfloat16).t()))
    return model.cuda().eval()


def _answers(model):
    text = torch.arange(64, device="cuda") * 7
    with torch.no_grad():
        return model(text).cpu(), model.narrow.float().cpu()


def _attach(path, queue):
    torch.manual_seed(99)
    with GMSClientMemoryManager(path) as manager:
        manager.connect(RequestedLockType.RW_OR_RO)
        assert manager.granted_lock_type is GrantedLockType.RO
        model = _model()
        for parameter in model.parameters():
            parameter.data.zero_()
        attach(model, manager)
        held = [mapping for mapping in manager.mappings.values() if mapping.is_mapped]
        inside = any(
            mapping.va <= model[1].weight.data_ptr() < mapping.va + mapping.aligned_size
            for mapping in held
        )
        out, half = _answers(model)
        queue.put((inside, out.numpy(), half.numpy()))
        del model


def test_weights_are_published_and_attached_elsewhere(servers):
    model = _model()
    expected = _answers(model)
    with GMSClientMemoryManager(servers["weights"]) as manager:
        manager.connect(RequestedLockType.RW_OR_RO)
        assert manager.granted_lock_type is GrantedLockType.RW
        publish(model, manager)
        assert manager.granted_lock_type is GrantedLockType.RO
        pointer = model[1].weight.data_ptr()
        assert any(
            mapping.va <= pointer < mapping.va + mapping.aligned_size
            for mapping in manager.mappings.values()
        )
        assert all(torch.equal(a, b) for a, b in zip(_answers(model), expected))
        spawn = multiprocessing.get_context("spawn")
        queue = spawn.Queue()
        process = spawn.Process(target=_attach, args=(servers["weights"], queue))
        process.start()
        inside, out, half = queue.get(timeout=120)
        process.join(60)
        assert process.exitcode == 0 and inside
        assert torch.equal(torch.from_numpy(out), expected[0])
        assert torch.equal(torch.from_numpy(half), expected[1])
        # Asleep and awake at the same addresses.
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        manager.unmap_all_vas()
        manager.abort()
        manager.connect(RequestedLockType.RO)
        manager.remap_all_vas()
        assert model[1].weight.data_ptr() == pointer
        assert all(torch.equal(a, b) for a, b in zip(_answers(model), expected))
        assert torch.cuda.mem_get_info()[0] <= free + 64 * MIB
        del model


def test_a_cache_sleeps_and_wakes(servers):
    size = 1024 * MIB
    torch.cuda.synchronize()
    manager = GMSClientMemoryManager(servers["kv_cache"])
    manager.connect(RequestedLockType.RW)
    address = manager.create_mapping(size=size, tag="kv_cache")
    cache = tensor_at(manager, address, (size // 2,), torch.bfloat16)
    cache.fill_(3)
    assert cache[-1].item() == 3 and cache.data_ptr() == address
    before = torch.cuda.mem_get_info()[0]
    manager.unmap_all_vas()
    manager.abort()
    deadline = time.monotonic() + 10
    while torch.cuda.mem_get_info()[0] < before + size:
        assert time.monotonic() < deadline, "the memory did not go back"
        time.sleep(0.005)
    manager.connect(RequestedLockType.RW)
    manager.reallocate_all_handles("kv_cache")
    manager.remap_all_vas()
    assert cache.data_ptr() == address
    cache.fill_(5)
    assert cache.float().mean().item() == 5
    del cache
    manager.close()
