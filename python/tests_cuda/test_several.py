"""Two GPUs in one process: what PyTorch and CuPy do with memory of another device. Skipped with fewer."""

import pytest

torch = pytest.importorskip("torch")
import vpmm

if torch.cuda.device_count() < 2:
    pytest.skip(f"two GPUs are needed: {torch.cuda.device_count()}", allow_module_level=True)

DIRECTIONS = [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")]


@pytest.fixture(scope="module", autouse=True)
def peers(allocator):
    """Asked once the pool is PyTorch's allocator, since PyTorch starts CUDA for it."""
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("GPUs that reach each other's memory are needed")


@pytest.mark.parametrize("source, target", DIRECTIONS)
@pytest.mark.parametrize("count", [100, 1 << 24])
def test_a_tensor_goes_to_another_device(source, target, count):
    given = torch.arange(count, device=source)
    assert torch.equal(given.to(target).cpu(), given.cpu())
    with torch.cuda.stream(torch.cuda.Stream(target)) as _, torch.cuda.stream(torch.cuda.Stream(source)):
        moved = given.to(target, non_blocking=True)
    torch.cuda.synchronize(source)
    torch.cuda.synchronize(target)
    assert torch.equal(moved.cpu(), given.cpu())


@pytest.mark.parametrize("source, target", DIRECTIONS)
def test_kernels_read_and_write_there(source, target):
    """Which PyTorch has them do where what is copied is not one run of bytes, or of another type."""
    given = torch.randn(1000, 700, device=source)
    assert torch.equal(given.t().to(target).cpu(), given.t().cpu())
    into = torch.empty(700, 1000, device=target)
    into.copy_(given.t())
    assert torch.equal(into.cpu(), given.t().cpu())
    assert torch.equal(given.to(target, torch.float16).cpu(), given.cpu().half())


def test_a_model_on_both():
    model = torch.nn.Linear(32, 8).to("cuda:0")
    inputs = torch.randn(64, 32, device="cuda:0")
    outputs = torch.nn.DataParallel(model, [0, 1])(inputs)
    assert torch.allclose(outputs, model(inputs), atol=1e-5)
    outputs.sum().backward()
    assert torch.allclose(model.weight.grad, inputs.sum(0).expand(8, 32), atol=1e-3)


def test_cupy_reads_another_device_s_arrays():
    cupy = pytest.importorskip("cupy")
    import vpmm.cupy

    cupy.cuda.set_allocator(vpmm.cupy.allocator)
    try:
        with cupy.cuda.Device(0):
            there = cupy.arange(1000)
            cupy.cuda.get_current_stream().synchronize()
        with cupy.cuda.Device(1), pytest.warns(cupy._util.PerformanceWarning):
            assert int((cupy.arange(1000) + there).sum()) == 999_000
        with cupy.cuda.Device(1):
            assert int(cupy.asarray(there).sum()) == 499_500
    finally:
        cupy.cuda.set_allocator()


def test_a_pool_of_ones_own_is_open_when_it_is_told():
    assert vpmm.Pool.of_process(0).access(1) == vpmm.Pool.of_process(1).access(0) == "read_write"
    pool = vpmm.Pool(0)
    assert pool.access(1) == "none"
    pool.set_access(1, "read")
    assert (pool.access(1), pool.access(0)) == ("read", "read_write")
