"""PyTorch on a GPU, with the process's pool as its allocator. Skipped where there is neither."""

import copy
import dataclasses
import subprocess
import sys
import textwrap
import threading

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU that PyTorch can use", allow_module_level=True)

import vpmm
import vpmm.torch

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def valid(allocator):
    yield
    vpmm.Pool.of_process().validate()


@pytest.fixture(autouse=True)
def clean():
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert vpmm.torch.failed_frees() == 0


def spin(milliseconds=50):
    """Work that keeps the current stream busy."""
    torch.cuda._sleep(int(milliseconds * 1e6))


def test_tensors_come_from_the_pool():
    before = vpmm.statistics()
    x = torch.arange(10 * MIB, device="cuda", dtype=torch.int32)
    after = vpmm.statistics()
    assert after.live_bytes - before.live_bytes == 40 * MIB
    assert torch.cuda.memory_allocated() == after.live_bytes
    assert torch.cuda.memory_reserved() == after.mapped_bytes
    assert int(x.sum(dtype=torch.int64)) == sum(range(10 * MIB))
    assert torch.empty(0, device="cuda").data_ptr() == 0
    del x
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    assert "allocated_bytes.all.peak" in torch.cuda.memory_stats()
    assert "Allocated memory" in torch.cuda.memory_summary()


def test_out_of_memory_is_pytorchs_error_with_a_map():
    total = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(total * 2, dtype=torch.uint8, device="cuda")
    text = str(caught.value)
    assert text.startswith("CUDA out of memory. Tried to allocate") and "memory held" in text
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.empty(total * 2, dtype=torch.uint8, device="cuda")
    # In backward it comes through another thread of PyTorch's own.
    x = torch.ones(4, device="cuda", requires_grad=True)

    class Big(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return value.clone()

        @staticmethod
        def backward(context, gradient):
            return gradient + torch.empty(total * 2, dtype=torch.uint8, device="cuda")[:4]

    with pytest.raises(torch.OutOfMemoryError):
        Big.apply(x).sum().backward()
    assert float(torch.ones(10, device="cuda").sum()) == 10


def test_empty_cache_gives_memory_back():
    x = torch.empty(2048 * MIB, dtype=torch.uint8, device="cuda")
    del x
    free = torch.cuda.mem_get_info()[0]
    assert vpmm.statistics().mapped_bytes >= 2048 * MIB
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] - free >= 2048 * MIB


def test_a_fraction_of_the_memory_is_a_limit():
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(int(total * 0.03), dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    del_me = torch.empty(int(total * 0.03), dtype=torch.uint8, device="cuda")
    assert del_me.numel()


def test_a_recorded_stream_is_waited_for():
    """Without a record the memory would be written while the side stream still has to read it."""
    side = torch.cuda.Stream()
    results = []
    for turn in range(20):
        x = torch.full((MIB,), turn, dtype=torch.int32, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            spin(5)
            results.append(x.max())
        x.record_stream(side)
        del x
        # Takes the place of `x` at once, if the pool lets it.
        torch.full((MIB,), -1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    assert [int(result) for result in results] == list(range(20))


def test_memory_goes_from_stream_to_stream_in_order():
    streams = [torch.cuda.Stream() for _ in range(4)]
    totals = []
    for turn in range(200):
        with torch.cuda.stream(streams[turn % 4]):
            x = torch.full((MIB,), turn, dtype=torch.int64, device="cuda")
            if turn % 10 == 0:
                spin(2)
            totals.append((x + 1).sum())
    torch.cuda.synchronize()
    assert [int(total) for total in totals] == [(turn + 1) * MIB for turn in range(200)]


# With workers there are processes, which are forks where that is the system's way, and a thread that pins.
@pytest.mark.parametrize("workers", [0, 2])
def test_pinned_copies_on_a_side_stream(workers):
    data = torch.utils.data.TensorDataset(torch.arange(4096).repeat(256, 1).t().contiguous())
    loader = torch.utils.data.DataLoader(data, batch_size=64, pin_memory=True, num_workers=workers)
    # A fork has the tensor, too, and ends without a free of its own.
    kept = torch.full((MIB,), 7, device="cuda")
    side, seen = torch.cuda.Stream(), 0
    for _ in range(2):
        for (batch,) in loader:
            assert batch.is_pinned()
            with torch.cuda.stream(side):
                on_device = batch.to("cuda", non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)
            on_device.record_stream(torch.cuda.current_stream())
            seen += int(on_device.sum())
    assert seen == 2 * 256 * sum(range(4096))
    assert int(kept.min()) == int(kept.max()) == 7


def test_threads_on_streams_of_their_own():
    wrong = []

    def work(seed):
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(200):
                x = torch.full((1 + (seed * 7919 + turn * 104729) % MIB,), seed, device="cuda")
                if turn % 50 == 49 and not int(x.min()) == int(x.max()) == seed:
                    wrong.append((seed, turn))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_graph_keeps_its_memory_beside_other_work():
    weights = torch.randn(512, 512, device="cuda")
    inside = torch.zeros(64, 512, device="cuda")

    def forward():
        return torch.relu(inside @ weights).sum(1)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            forward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outside = forward()
    for turn in range(1000):
        inside.fill_(turn % 17)
        graph.replay()
        noise = torch.full((1 + turn * 37 % MIB,), -1.0, device="cuda")
        if turn % 100 == 0:
            torch.testing.assert_close(outside, forward())
        del noise
    del graph, outside


def test_graphs_that_share_a_pool():
    x = torch.ones(MIB, device="cuda")
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(first):
        y = x * 2
    with torch.cuda.graph(second, pool=first.pool()):
        z = y + 1
    for value in range(1, 20):
        x.fill_(value)
        first.replay()
        second.replay()
        torch.empty(value * MIB, device="cuda").fill_(-1)
        assert float(z.max()) == float(z.min()) == value * 2 + 1
    first.reset()
    second.reset()
    del y, z


def test_a_module_of_its_own_is_compiled():
    pytest.importorskip("triton")

    @torch.compile
    def step(x):
        return torch.sin(x) * 2 + x.cumsum(0)

    for length in (100, 1000, 5000):
        x = torch.randn(length, device="cuda", dtype=torch.float64)
        torch.testing.assert_close(step(x), torch.sin(x) * 2 + x.cumsum(0))


def test_a_module_is_compiled_with_its_gradients():
    pytest.importorskip("triton")
    module = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 16)
    )
    module = module.to("cuda", torch.float64)
    expected_module = copy.deepcopy(module)
    compiled = torch.compile(module)
    for batch in (32, 32, 48, 100):
        x = torch.randn(batch, 64, device="cuda", dtype=torch.float64, requires_grad=True)
        expected_x = x.detach().clone().requires_grad_()
        compiled(x).square().mean().backward()
        expected_module(expected_x).square().mean().backward()
        torch.testing.assert_close(x.grad, expected_x.grad)
        for own, expected in zip(module.parameters(), expected_module.parameters(), strict=True):
            torch.testing.assert_close(own.grad, expected.grad)
        module.zero_grad(set_to_none=True)
        expected_module.zero_grad(set_to_none=True)


def test_callables_made_into_graphs():
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).cuda()
    expected_module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).cuda()
    expected_module.load_state_dict(module.state_dict())
    graphed = torch.cuda.make_graphed_callables(module, (torch.randn(8, 64, device="cuda"),))
    for _ in range(5):
        x = torch.randn(8, 64, device="cuda")
        y, expected = graphed(x), expected_module(x)
        torch.testing.assert_close(y, expected)
        y.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close(module[0].weight.grad, expected_module[0].weight.grad)
        # A first gradient is the graph's own memory, which the next replay overwrites.
        module.zero_grad(set_to_none=True)
        expected_module.zero_grad(set_to_none=True)


def test_cudnn_searches_for_algorithms():
    """It asks PyTorch's allocator for the longest block, which PyTorch hands on to no plug-in."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Conv2d(16, 64, 3, padding=1), torch.nn.Conv2d(64, 32, 5, stride=2)
    ).cuda()
    results = []
    for searches in (False, True):
        for bytes_held in (0, 6 << 30):
            held = torch.empty(bytes_held, dtype=torch.uint8, device="cuda")
            with torch.backends.cudnn.flags(enabled=True, benchmark=searches, allow_tf32=False):
                for size in (48, 96):
                    given = torch.ones(4, 16, size, size, device="cuda", requires_grad=True)
                    layers(given).square().sum().backward()
                    results.append((searches, size, given.grad, layers[0].weight.grad))
                    layers.zero_grad(set_to_none=True)
            del held
    plain = {size: grads for searches, size, *grads in results if not searches}
    for _, size, *grads in results:
        torch.testing.assert_close(grads, plain[size], rtol=1e-3, atol=1e-2)
    vpmm.Pool.of_process(torch.cuda.current_device()).validate()


def test_what_pytorch_does_not_hand_on_says_so():
    """As docs/python.md has it. In a process of its own, which PyTorch may leave in the middle of it."""
    pytest.importorskip("triton")
    program = """
import torch, vpmm.torch
vpmm.torch.use()
x = torch.randn(2, 3, 32, 32, device="cuda")
try:
    f = torch.compile(lambda x: x * 2, mode="reduce-overhead")
    [f(x) for _ in range(3)]
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "does not yet support" in done.stdout, (done.stdout, done.stderr)


def test_it_trains_as_on_pytorchs_own_allocator():
    program = textwrap.dedent("""
        import os, sys, random
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        import torch
        if sys.argv[1] == "vpmm":
            import vpmm.torch
            vpmm.torch.use()
        torch.manual_seed(0); torch.use_deterministic_algorithms(True)
        model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1))
        model.cuda(); optimizer = torch.optim.AdamW(model.parameters())
        sizes = random.Random(0)
        for _ in range(30):
            x = torch.randn(sizes.randint(1, 5000), 256).cuda()
            loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            print(loss.item().hex())
        """)

    def losses(name):
        command = [sys.executable, "-c", program, name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    assert losses("vpmm") == losses("torch")


def test_a_region_backed_by_the_pool():
    program = textwrap.dedent("""
        import torch, vpmm, vpmm.torch
        pool = vpmm.torch.MemPool()
        outside = torch.ones(1 << 20, device="cuda")
        with torch.cuda.use_mem_pool(pool):
            inside = torch.ones(64 << 20, device="cuda")
        live = vpmm.statistics().live_bytes
        assert live >= 256 << 20, live
        assert float((inside * 2).sum()) == 128 << 20
        assert torch.cuda.memory_allocated() >= 260 << 20
        del inside, pool
        torch.cuda.empty_cache()
        assert vpmm.statistics().live_bytes == 0, vpmm.statistics()
        """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_heap_of_its_own_beside_the_pool():
    pool = vpmm.torch.MemPool()
    assert isinstance(pool, vpmm.torch.HeapMemPool)
    outside = torch.ones(MIB, device="cuda")
    with vpmm.torch.use_mem_pool(pool):
        inside = torch.arange(16 * MIB, device="cuda")
        # Backward runs in a thread of PyTorch's own.
        weight = torch.ones(1024, 1024, device="cuda", requires_grad=True)
        (weight * 2).sum().backward()
    live = pool.statistics().live_bytes
    assert 132 * MIB <= live <= 160 * MIB
    assert torch.cuda.memory_allocated() >= live + 4 * MIB
    beside = torch.ones(MIB, device="cuda")
    assert pool.statistics().live_bytes == live
    torch.cuda.synchronize()
    free, pointer = torch.cuda.mem_get_info()[0], inside.data_ptr()
    assert pool.suspend() >= live
    assert torch.cuda.mem_get_info()[0] >= free + 128 * MIB
    assert float(beside.sum() + outside.sum()) == 2 * MIB
    pool.resume()
    assert inside.data_ptr() == pointer and int(inside[-1]) == 16 * MIB - 1
    del inside, weight
    torch.cuda.synchronize()
    assert pool.statistics().live_bytes == 0
    held = torch.cuda.memory_reserved()
    del pool
    assert torch.cuda.memory_reserved() <= held - 128 * MIB


def test_a_heap_of_its_own_in_a_capture():
    pool, graph = vpmm.torch.MemPool(), torch.cuda.CUDAGraph()
    with vpmm.torch.use_mem_pool(pool):
        x = torch.arange(MIB, device="cuda", dtype=torch.float32)
    (x * 2 + 1).sum()
    torch.cuda.synchronize()
    live = pool.statistics().live_bytes
    with vpmm.torch.use_mem_pool(pool), torch.cuda.graph(graph):
        y = x * 2 + 1
    assert pool.statistics().live_bytes == live, "a graph's memory is the graph's"
    x.copy_(x + 1)
    for _ in range(3):
        graph.replay()
    torch.testing.assert_close(y, x * 2 + 1)
    del graph, y, x


def test_what_the_pool_says_fits_together():
    x = [torch.empty((turn + 1) * MIB, dtype=torch.uint8, device="cuda") for turn in range(10)]
    now = dataclasses.asdict(vpmm.statistics())
    assert now["mapped_bytes"] >= now["live_bytes"] >= 55 * MIB
    assert len(x) == 10


def test_weights_sleep_and_wake_at_their_addresses():
    with vpmm.tag("weights"):
        model = torch.nn.Linear(4096, 4096).cuda()
        kept = torch.arange(64 * MIB, device="cuda")
    x = torch.randn(8, 4096, device="cuda")
    expected, pointer = model(x), kept.data_ptr()
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info()[0]
    asleep = vpmm.suspend("weights", stream=torch.cuda.current_stream())
    assert torch.cuda.mem_get_info()[0] - free == asleep >= 576 * MIB
    other = torch.full((64 * MIB,), -1, device="cuda")
    vpmm.resume("weights", stream=torch.cuda.current_stream())
    assert kept.data_ptr() == pointer and int(kept[12345]) == 12345
    torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    del other


def test_buffers_are_tensors_without_a_copy():
    buffer = vpmm.DeviceBuffer.from_bytes(bytes(range(200)))
    for tensor in (torch.from_dlpack(buffer), torch.as_tensor(buffer, device="cuda")):
        assert tensor.data_ptr() == buffer.ptr and tensor.tolist() == list(range(200))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor = torch.from_dlpack(buffer)
        tensor.add_(1)
    side.synchronize()
    assert buffer.to_bytes() == bytes(range(1, 201))
    copy = vpmm.DeviceBuffer(200)
    copy.copy_from_device(tensor)
    assert copy.to_bytes() == bytes(range(1, 201))
    del tensor


def test_a_snapshot_has_pytorch_s_tensors_and_frames(tmp_path):
    vpmm.record_history(1000)
    try:
        kept = torch.zeros(3 * MIB, dtype=torch.uint8, device="cuda")
        made = vpmm.snapshot(tmp_path / "pool.pickle")
    finally:
        vpmm.record_history(0)
    blocks = [block for segment in made["segments"] for block in segment["blocks"]]
    (block,) = [block for block in blocks if block["address"] == kept.data_ptr()]
    assert block["state"] == "active_allocated" and block["requested_size"] == 3 * MIB
    assert block["frames"][0]["name"] == "test_a_snapshot_has_pytorch_s_tensors_and_frames"


def test_an_error_ends_tensors_while_calls_are_kept():
    """The interpreter clears the first one from its stack with the error set."""
    total = torch.cuda.get_device_properties(0).total_memory
    vpmm.record_history(1000)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            _ = [torch.ones(MIB, device="cuda"), torch.empty(total * 2, dtype=torch.uint8, device="cuda")]
        assert [event["action"] for event in vpmm.snapshot()["device_traces"][0]][-3:] == [
            "oom",
            "free_requested",
            "free_completed",
        ]
    finally:
        vpmm.record_history(0)


def test_one_pool_for_pytorch_cupy_and_numba():
    cupy = pytest.importorskip("cupy")
    numba_cuda = pytest.importorskip("numba.cuda")
    numpy = pytest.importorskip("numpy")
    import vpmm.cupy
    import vpmm.numba

    numba_cuda.set_memory_manager(vpmm.numba.VpmmNumbaManager)
    cupy.cuda.set_allocator(vpmm.cupy.allocator)
    try:
        before = vpmm.statistics().live_bytes
        arrays = [
            torch.full((MIB,), 3, dtype=torch.uint8, device="cuda"),
            cupy.full(MIB, 3, dtype=cupy.uint8),
            numba_cuda.to_device(numpy.full(MIB, 3, numpy.uint8)),
        ]
        assert vpmm.statistics().live_bytes == before + 3 * MIB
        total = sum(int(torch.as_tensor(array, device="cuda").sum()) for array in arrays)
        assert total == 9 * MIB
        del arrays
    finally:
        cupy.cuda.set_allocator(None)
