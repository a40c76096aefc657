"""Resources on a GPU: their memory as PyTorch, CuPy and Numba see it. Each is skipped where it is missing."""

import subprocess
import sys
import textwrap

import pytest

import vpmm
from vpmm import mr

MIB = 1 << 20
SIZE = 3 * MIB + 4


@pytest.fixture(scope="module", autouse=True)
def gpu():
    try:
        vpmm.device_memory()
    except vpmm.Error as error:
        pytest.skip(f"no GPU: {error}")


@pytest.mark.parametrize(
    "text",
    [
        "default",
        "paged",
        "cuda-malloc",
        "cuda-async(initial=32MiB,threshold=1GiB)",
        "managed",
        "prefetch(managed)",
        "pinned",
        "coalescing(initial=64MiB)",
        "fixed-size(4MiB,blocks=4)",
        "binning(18,22)",
        "arena(256MiB)",
        "caching",
        "limiting(64MiB,statistics(tracking(aligned(4096,thread-safe(default)))))",
    ],
)
def test_contents_in_memory_of_each(text):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU that PyTorch can use")
    resource = mr.open(text)
    pattern = bytes(range(251)) * (SIZE // 251 + 1)
    side = torch.cuda.Stream()
    for stream in (None, side):
        for turn in range(10):
            data = pattern[turn : turn + SIZE]
            buffer = vpmm.DeviceBuffer.from_bytes(data, stream=stream, mr=resource)
            torch.cuda.synchronize()
            if resource.facts.host_accessible and not resource.facts.managed:
                assert buffer.to_bytes() == data
                continue
            tensor = torch.as_tensor(buffer, device="cuda")
            expected = torch.frombuffer(bytearray(data), dtype=torch.uint8).sum(dtype=torch.int64)
            with torch.cuda.stream(side):
                # Work of another stream that is still queued when the buffer goes.
                torch.cuda._sleep(10_000_000)
                total = tensor.sum(dtype=torch.int64)
            buffer.record_stream(side)
            del tensor, buffer
            # Written at once by what gets the same memory.
            vpmm.DeviceBuffer(SIZE, stream=stream, mr=resource).fill(255)
            side.synchronize()
            assert int(total) == int(expected)
    # The driver promises managed memory that a device does not have.
    if not resource.facts.managed:
        with pytest.raises(MemoryError):
            resource.allocate(1 << 50)


def test_cupy_s_arrays_from_a_resource():
    cupy = pytest.importorskip("cupy")
    import vpmm.cupy

    counted = mr.StatisticsResourceAdaptor(mr.PoolMemoryResource())
    former = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(vpmm.cupy.allocator_of(counted))
    try:
        array = cupy.arange(MIB, dtype="int32")
        assert int((array * 2).sum()) == MIB * (MIB - 1)
        assert counted.allocation_counts.current_bytes >= 4 * MIB
        del array
    finally:
        cupy.cuda.set_allocator(former)


@pytest.mark.parametrize("resource", [mr.PinnedHostMemoryResource, mr.ManagedMemoryResource])
def test_numpy_reads_what_was_written_before(resource):
    numpy = pytest.importorskip("numpy")
    buffer = vpmm.DeviceBuffer(512 * MIB, mr=resource())
    for value in (1, 2, 3):
        buffer.fill(value)
        assert numpy.from_dlpack(buffer)[-1] == value
    # Before the resource, whose memory it is.
    buffer.free()


def test_numba_s_arrays_from_a_resource():
    pytest.importorskip("numba.cuda")
    program = textwrap.dedent(
        """
        import gc, numpy, vpmm.numba
        from numba import cuda
        from vpmm import mr
        counted = mr.StatisticsResourceAdaptor(mr.PoolMemoryResource())
        cuda.set_memory_manager(vpmm.numba.manager_of(counted))
        array = cuda.to_device(numpy.arange(1000))
        assert counted.allocation_counts.current_bytes == 8000, counted.allocation_counts
        assert array.copy_to_host()[999] == 999
        del array
        gc.collect()
        assert counted.allocation_counts.current_count == 0
        """
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
