"""PyTorch's tensors in the memory of a `vpmm serve` on a GPU. Run with VPMM_COMMAND naming the program, once
as it is, on the process's pool, and once with --own-allocator."""

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
from vpmm.gms.torch import (
    attach,
    create_scratch_manager,
    evict_gms_client_memory_manager,
    get_or_create_gms_client_memory_manager,
    publish,
    release_unused,
    tensor_at,
    use_pool,
)

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
    model.cuda().eval()
    # Neither a parameter nor a buffer, as quantised layers have them.
    model.scale = torch.full((256,), 3.0, device="cuda")
    model.offsets = [torch.arange(256.0, device="cuda"), torch.ones(1, device="cuda")]
    return model


def _answers(model):
    text = torch.arange(64, device="cuda") * 7
    with torch.no_grad():
        out = model(text) * model.scale + model.offsets[0] + model.offsets[1]
        return out.cpu(), model.narrow.float().cpu()


def _attach(path, queue):
    torch.manual_seed(99)
    with GMSClientMemoryManager(path) as manager:
        manager.connect(RequestedLockType.RW_OR_RO)
        assert manager.granted_lock_type is GrantedLockType.RO
        model = _model()
        for parameter in model.parameters():
            parameter.data.zero_()
        scale = model.scale
        for attribute in (scale, *model.offsets):
            attribute.zero_()
        attach(model, manager)
        held = [mapping for mapping in manager.mappings.values() if mapping.is_mapped]
        inside = any(
            mapping.va <= model[1].weight.data_ptr() < mapping.va + mapping.aligned_size for mapping in held
        )
        # A copy, at which whoever knew the tensor looks, too.
        assert model.scale is scale and not _inside(manager, scale)
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
            mapping.va <= pointer < mapping.va + mapping.aligned_size for mapping in manager.mappings.values()
        )
        assert all(torch.equal(a, b) for a, b in zip(_answers(model), expected, strict=True))
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
        assert all(torch.equal(a, b) for a, b in zip(_answers(model), expected, strict=True))
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


def _inside(manager, tensor):
    pointer = tensor.data_ptr()
    return any(
        mapping.va <= pointer < mapping.va + mapping.aligned_size for mapping in manager.mappings.values()
    )


def _captured(cache):
    """A graph that adds 1 to a cache."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        cache.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.add_(1)
    return graph


def test_a_module_that_is_made_in_a_pool_is_published_without_a_copy(servers):
    manager = get_or_create_gms_client_memory_manager(servers["weights"], 0, RequestedLockType.RW)
    try:
        with use_pool("weights"):
            model = _model()
            # What is needed only for a moment is not published.
            del_me = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
        del del_me
        expected = _answers(model)
        tensors = [*model.parameters(), *model.buffers(), model.scale, *model.offsets]
        assert all(_inside(manager, tensor) for tensor in tensors)
        pointers = [parameter.data_ptr() for parameter in model.parameters()]
        publish(model, manager)
        assert pointers == [parameter.data_ptr() for parameter in model.parameters()]
        assert manager.total_bytes < 128 * MIB, "the temporary's memory went back"
        copied = [*model.buffers(), model.scale, *model.offsets]
        assert not any(_inside(manager, tensor) for tensor in copied)
        assert all(torch.equal(a, b) for a, b in zip(_answers(model), expected, strict=True))
        for tensor in copied:
            tensor.add_(0)
        spawn = multiprocessing.get_context("spawn")
        queue = spawn.Queue()
        process = spawn.Process(target=_attach, args=(servers["weights"], queue))
        process.start()
        inside, out, half = queue.get(timeout=120)
        process.join(60)
        assert process.exitcode == 0 and inside
        assert torch.equal(torch.from_numpy(out), expected[0])
        assert torch.equal(torch.from_numpy(half), expected[1])
        del model, tensors, copied
        torch.cuda.empty_cache()
        assert all(mapping.is_mapped for mapping in manager.mappings.values())
    finally:
        evict_gms_client_memory_manager(manager)
        manager.close()


def test_what_is_made_in_a_pool_is_the_services_and_nothing_else(servers):
    manager = get_or_create_gms_client_memory_manager(servers["weights"], 0, RequestedLockType.RW)
    try:
        outside = torch.ones(MIB, device="cuda")
        side = torch.cuda.Stream()
        with use_pool("weights"):
            first = torch.full((MIB,), 2.0, device="cuda")
            tiny = [torch.full((3,), float(n), device="cuda") for n in range(50)]
            with torch.cuda.stream(side):
                other = torch.full((MIB,), 3.0, device="cuda")
        late = torch.ones(MIB, device="cuda")
        assert all(_inside(manager, tensor) for tensor in (first, other, *tiny))
        assert not _inside(manager, outside) and not _inside(manager, late)
        assert len({tensor.data_ptr() >> 21 for tensor in tiny}) == 1, "they share a granule"
        # Used on a further stream, freed while that is busy, and handed out again only behind it. What is
        # launched for the first time waits for what runs, so that is done before.
        outside.sum().item()
        pointer = first.data_ptr()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            total = first.sum()
            first.record_stream(side)
        del first
        with use_pool("weights"):
            again = [torch.full((MIB,), 9.0, device="cuda") for _ in range(8)]
        torch.cuda.synchronize()
        assert total.item() == 2 * MIB and other.sum().item() == 3 * MIB
        assert all(tensor.sum().item() == 9 * MIB for tensor in again)
        assert all(tensor.data_ptr() != pointer for tensor in again)
        assert [tensor[0].item() for tensor in tiny] == list(range(50))
        del other, tiny, again, late, outside, total
        held = manager.total_bytes
        torch.cuda.empty_cache()
        assert manager.total_bytes == held, "the pool keeps its memory while it is one"
        release_unused(manager)
        assert manager.total_bytes == 0
    finally:
        evict_gms_client_memory_manager(manager)
        manager.close()


def test_a_pools_cache_sleeps_and_wakes_under_a_graph(servers):
    manager = get_or_create_gms_client_memory_manager(
        servers["kv_cache"], 0, RequestedLockType.RW, tag="kv_cache"
    )
    try:
        with use_pool("kv_cache"):
            layers = [torch.zeros(128 * MIB, device="cuda") for _ in range(2)]
        assert all(_inside(manager, layer) for layer in layers)
        graph = _captured(layers[0])
        pointers = [layer.data_ptr() for layer in layers]
        torch.cuda.synchronize()
        before = torch.cuda.mem_get_info()[0]
        manager.unmap_all_vas()
        manager.abort()
        deadline = time.monotonic() + 10
        while torch.cuda.mem_get_info()[0] < before + 1024 * MIB:
            assert time.monotonic() < deadline, "the memory did not go back"
            time.sleep(0.005)
        manager.connect(RequestedLockType.RW)
        manager.reallocate_all_handles("kv_cache")
        manager.remap_all_vas()
        assert pointers == [layer.data_ptr() for layer in layers]
        layers[0].zero_()
        layers[1].fill_(7)
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        assert layers[0].min().item() == layers[0].max().item() == 2
        assert layers[1].sum().item() == 7 * layers[1].numel()
        with pytest.raises(torch.OutOfMemoryError, match="GPU memory service"):
            with use_pool("kv_cache"):
                torch.empty(1 << 42, dtype=torch.uint8, device="cuda")
        del layers, graph
    finally:
        evict_gms_client_memory_manager(manager)
        manager.close()


def test_a_standbys_cache_stands_on_scratch_until_it_takes_over(servers):
    manager = create_scratch_manager(servers["kv_cache"], 0, scratch_size=64 * MIB)
    try:
        before = torch.cuda.mem_get_info()[0]
        with use_pool("kv_cache"):
            cache = torch.zeros(1024 * MIB, dtype=torch.uint8, device="cuda")
        assert manager.scratch_summary() == (1, 1024 * MIB, 64 * MIB)
        assert before - torch.cuda.mem_get_info()[0] < 256 * MIB
        graph = _captured(cache)
        pointer = cache.data_ptr()
        manager.unmap_all_vas()
        manager.connect(RequestedLockType.RW)
        manager.prepare_scratch_for_reallocation()
        manager.reallocate_all_handles("kv_cache")
        manager.remap_all_vas()
        assert cache.data_ptr() == pointer
        cache.fill_(4)
        graph.replay()
        torch.cuda.synchronize()
        assert cache.min().item() == cache.max().item() == 5
        del cache, graph
    finally:
        evict_gms_client_memory_manager(manager)
        manager.close()
