"""Buffers, and how other libraries see them."""

import array
import concurrent.futures
import ctypes
import gc
import pickle
import subprocess
import sys
import types

import numpy
import pytest

import vpmm
from vpmm import _buffer, _dlpack
from vpmm._errors import error_of
from vpmm._stream import raw_stream
from vpmm.mr import _resource


def test_bytes_go_there_and_back():
    data = bytes(range(256)) * 40
    with vpmm.DeviceBuffer.from_bytes(data) as buffer:
        assert len(buffer) == buffer.size == buffer.nbytes == len(data)
        assert buffer.to_bytes() == data
        buffer.copy_from(b"xyz", offset=100)
        assert buffer.to_bytes() == data[:100] + b"xyz" + data[103:]
        part = bytearray(3)
        buffer.copy_to(part, offset=100)
        assert part == b"xyz"
        buffer.fill(7)
        assert set(buffer.to_bytes()) == {7}
    assert buffer.ptr == 0 and buffer.size == 0


def test_arrays_go_there_and_back():
    array = numpy.random.default_rng(1).normal(size=(30, 40))
    buffer = vpmm.DeviceBuffer.from_numpy(array)
    assert buffer.size == array.nbytes
    back = buffer.to_numpy("float64", (30, 40))
    numpy.testing.assert_array_equal(back, array)
    other = vpmm.DeviceBuffer(array.nbytes)
    other.copy_from_device(buffer)
    assert other.to_bytes() == array.tobytes()
    with pytest.raises(ValueError, match="one piece"):
        vpmm.DeviceBuffer.from_bytes(array[:, ::2])


def test_an_empty_buffer_has_no_address():
    buffer = vpmm.DeviceBuffer(0)
    assert buffer.ptr == 0 and buffer.to_bytes() == b"" and len(buffer) == 0
    buffer.fill(1)
    buffer.copy_from(b"")
    buffer.record_stream(2)
    assert "dltensor" in repr(buffer.__dlpack__(stream=2))
    assert vpmm.DeviceBuffer.from_bytes(b"").to_numpy().shape == (0,)


def test_what_does_not_fit_is_refused():
    buffer = vpmm.DeviceBuffer(10)
    for wrong in (
        lambda: buffer.copy_from(bytes(11)),
        lambda: buffer.copy_from(b"a", offset=10),
        lambda: buffer.copy_from(b"a", offset=-1),
        lambda: buffer.copy_to(bytearray(11)),
        lambda: buffer.fill(256),
        lambda: buffer.copy_from_device(vpmm.DeviceBuffer(11)),
        lambda: vpmm.DeviceBuffer(-1),
    ):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises((BufferError, TypeError, ValueError)):
        buffer.copy_to(b"cannot be written"[:10])
    with pytest.raises(TypeError):
        vpmm.DeviceBuffer(1, stream="first")
    with pytest.raises(vpmm.OutOfMemoryError):
        vpmm.DeviceBuffer(1 << 50)


def test_it_is_freed_with_the_last_reference():
    before = vpmm.statistics().live_bytes
    buffer = vpmm.DeviceBuffer(1 << 20)
    assert vpmm.statistics().live_bytes == before + (1 << 20)
    buffer.free()
    buffer.free()
    assert vpmm.statistics().live_bytes == before
    buffer = vpmm.DeviceBuffer(1 << 20)
    del buffer
    gc.collect()
    assert vpmm.statistics().live_bytes == before


def test_a_free_that_fails_is_told():
    buffer = vpmm.DeviceBuffer(1000)
    vpmm.Pool.of_process().free(buffer.ptr)
    with pytest.raises(vpmm.PointerError):
        buffer.free()


def test_threads_that_free_the_same_buffer():
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for _ in range(300):
            buffer = vpmm.DeviceBuffer(1000)
            for freed in [threads.submit(buffer.free) for _ in range(4)]:
                assert freed.result() is None
            assert (buffer.ptr, buffer.size) == (0, 0)


def test_a_free_that_fails_as_the_buffer_goes_is_told():
    program = """
import vpmm
buffer = vpmm.DeviceBuffer(1000)
vpmm.Pool.of_process().free(buffer.ptr)
del buffer
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.count("could not be freed") == 1


@pytest.mark.parametrize("mr", [None, vpmm.mr.StatisticsResourceAdaptor(vpmm.mr.CudaMemoryResource())])
def test_a_buffer_whose_free_was_refused_is_freed_later(monkeypatch, mr):
    def refused(*_):
        raise error_of("VPMM_BAD_STREAM", "the stream captures")

    buffer = vpmm.DeviceBuffer.from_bytes(b"abc", mr=mr)
    pointer = buffer.ptr
    with monkeypatch.context() as patched:
        patched.setattr(_buffer, "call", refused)
        patched.setattr(_resource, "call", refused)
        with pytest.raises(vpmm.StreamError, match="captures"):
            buffer.free()
    assert (buffer.ptr, buffer.size, buffer.to_bytes()) == (pointer, 3, b"abc")
    buffer.free()
    assert buffer.ptr == buffer.size == 0
    buffer.free()
    assert mr is None or mr.allocation_counts.current_count == 0


def test_functions_elsewhere_lose_no_buffer_whose_free_was_refused(monkeypatch):
    other = vpmm.mr.CallbackMemoryResource(lambda *_: 1 << 20, lambda *_: None)
    counted = vpmm.mr.StatisticsResourceAdaptor(vpmm.mr.CudaMemoryResource())
    with vpmm.DeviceBuffer(10, mr=other):
        test_a_buffer_whose_free_was_refused_is_freed_later(monkeypatch, counted)


def test_a_buffer_whose_function_fails_is_not_freed_twice():
    freed = []

    def deallocate(*given):
        freed.append(given)
        raise error_of("VPMM_BAD_STREAM", "a function's")

    for mr in (
        vpmm.mr.CallbackMemoryResource(lambda *_: 1 << 20, deallocate),
        vpmm.mr.StatisticsResourceAdaptor(vpmm.mr.CallbackMemoryResource(lambda *_: 1 << 20, deallocate)),
    ):
        buffer = vpmm.DeviceBuffer(10, mr=mr)
        with pytest.raises(vpmm.StreamError, match="function's"):
            buffer.free()
        assert buffer.ptr == buffer.size == 0
        buffer.free()
        assert len(freed) == 1
        freed.clear()


def test_what_lives_until_the_interpreter_ends_is_not_freed():
    """The driver takes it back; streams may be gone by then."""
    program = """
import vpmm
resource = vpmm.mr.CallbackMemoryResource(lambda *_: 1 << 20, lambda *_: print("freed", flush=True))
vpmm.DeviceBuffer(1, mr=resource).free()
kept = vpmm.DeviceBuffer(1, mr=resource)
import sys
sys.kept = kept
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "freed\n"


def test_the_array_interface():
    buffer = vpmm.DeviceBuffer(100)
    interface = buffer.__cuda_array_interface__
    assert interface["data"] == (buffer.ptr, False) and interface["shape"] == (100,)
    assert interface["typestr"] == "|u1" and interface["version"] == 3
    # 0 is no stream in this protocol: 1 stands for the legacy default one.
    assert interface["stream"] == 1

    class Array:
        """Another library's, of two-byte numbers."""

        __cuda_array_interface__ = {
            "data": (buffer.ptr, True),
            "shape": (5, 10),
            "typestr": "<i2",
            "version": 3,
        }

    buffer.fill(3)
    copy = vpmm.DeviceBuffer(100)
    copy.copy_from_device(Array())
    assert copy.to_bytes() == bytes([3]) * 100
    for strides in ((40, 4), (2, 10), (20, -2), (0, 2), (10, 2)):
        Array.__cuda_array_interface__["strides"] = strides
        with pytest.raises(ValueError, match="one piece"):
            copy.copy_from_device(Array())
    # Told though they are what they are without: where there is one of something, anything is.
    for shape, strides in (((5, 10), (20, 2)), ((5, 1, 10), (20, 7, 2)), ((0, 10), (3, 3)), ((50,), (2,))):
        Array.__cuda_array_interface__ |= {"shape": shape, "strides": strides}
        buffer.fill(copy.to_bytes()[0] + 1)
        copy.copy_from_device(Array())
        assert copy.to_bytes() == bytes([copy.to_bytes()[0]]) * 100
        assert (copy.to_bytes() == buffer.to_bytes()[:100]) == (0 not in shape)


def test_dlpack_keeps_the_memory_until_the_borrower_is_done():
    before = vpmm.statistics().live_count
    buffer = vpmm.DeviceBuffer.from_bytes(b"abcd")
    assert buffer.__dlpack_device__() == (2, 0)
    capsule = buffer.__dlpack__()
    assert "dltensor" in repr(capsule)
    del buffer
    gc.collect()
    assert vpmm.statistics().live_count == before + 1
    del capsule  # nobody took it
    gc.collect()
    assert vpmm.statistics().live_count == before
    buffer = vpmm.DeviceBuffer(4)
    with pytest.raises(BufferError):
        buffer.__dlpack__(copy=True)
    with pytest.raises(BufferError):
        buffer.__dlpack__(dl_device=(1, 0))


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (2, 3)])
def test_dlpack_is_what_a_borrower_reads(version):
    is_versioned = version is not None and version[0] >= 1
    name = b"dltensor_versioned" if is_versioned else b"dltensor"
    before = vpmm.statistics().live_count
    buffer = vpmm.DeviceBuffer.from_bytes(b"abcd")
    capsule, pointer = buffer.__dlpack__(stream=-1, max_version=version), buffer.ptr
    del buffer
    pointer_of, rename = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_SetName
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
    kind = _dlpack._Versioned if is_versioned else _dlpack._Managed
    managed = kind.from_address(pointer_of(capsule, name))
    used = ctypes.c_char_p(b"used_" + name)
    rename(capsule, used)
    if is_versioned:
        # Of the version that it has, and neither read-only nor a copy.
        assert (managed.version.major, managed.version.minor, managed.flags) == (1, 0, 0)
    tensor = managed.tensor
    assert (tensor.data, tensor.byte_offset, bool(tensor.strides)) == (pointer, 0, False)
    assert (tensor.ndim, tensor.shape[0], tensor.device.type, tensor.device.id) == (1, 4, 2, 0)
    assert (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (1, 8, 1)
    del capsule
    gc.collect()
    assert vpmm.statistics().live_count == before + 1
    managed.deleter(ctypes.addressof(managed))
    gc.collect()
    assert vpmm.statistics().live_count == before


def test_it_is_pickled_with_its_contents():
    copy = pickle.loads(pickle.dumps(vpmm.DeviceBuffer.from_bytes(b"abcd")))
    assert copy.to_bytes() == b"abcd"


def test_streams_of_other_libraries():
    class OfCuPy:
        ptr = 0

    class OfTorch:
        cuda_stream = 0

    class OfNumba:
        class handle:
            value = None

    class OfAny:
        def __cuda_stream__(self):
            return (0, 0)

    for stream in (None, 0, 1, OfCuPy(), OfTorch(), OfNumba(), OfAny()):
        assert vpmm.DeviceBuffer.from_bytes(b"a", stream=stream).to_bytes() == b"a"


def test_the_number_of_a_stream():
    made = types.SimpleNamespace
    for stream in (
        7,
        numpy.uint64(7),
        made(__cuda_stream__=lambda: (3, 7), cuda_stream=4, ptr=4, handle=4),
        made(cuda_stream=7),
        made(ptr=7),
        made(handle=7),
        # As ctypes and NVIDIA's bindings have it.
        made(handle=made(value=7)),
    ):
        assert raw_stream(stream) == 7
    assert raw_stream(None) == raw_stream(made(handle=made(value=None))) == 0
    for wrong in (made(pointer=7), "7", 7.0):
        with pytest.raises(TypeError, match="no stream"):
            raw_stream(wrong)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2), (2, 0)])
def test_arrays_without_elements(shape):
    for data in (numpy.empty(shape), numpy.empty(shape, "int16", order="F"), numpy.empty((4, *shape))[::2]):
        buffer = vpmm.DeviceBuffer.from_numpy(data)
        assert (buffer.size, buffer.ptr) == (0, 0)
        buffer.copy_from(data)
        buffer.copy_to(numpy.empty(shape))
        back = buffer.to_numpy(data.dtype, data.shape)
        assert back.shape == data.shape and back.dtype == data.dtype
        assert buffer.to_numpy("float64").shape == (0,)
        assert buffer.to_bytes() == b""


def test_arrays_of_every_kind_of_number():
    for kind in ("complex64", ">f8", "?", "e", "S3", [("a", "i4"), ("b", "f8", 2)]):
        data = numpy.ones((2, 3), kind)
        back = vpmm.DeviceBuffer.from_numpy(data).to_numpy(data.dtype, data.shape)
        assert (back == data).all()


def test_empties_of_other_kinds():
    for data in (b"", bytearray(), array.array("d"), memoryview(b"")[::1]):
        assert vpmm.DeviceBuffer.from_bytes(data).size == 0


def test_a_child_of_the_process_frees_nothing_and_says_nothing():
    program = """
import os, sys, vpmm
resource = vpmm.mr.StatisticsResourceAdaptor(vpmm.mr.CudaMemoryResource())
kept = [vpmm.DeviceBuffer(1000), vpmm.DeviceBuffer(1000, mr=resource)]
kept[1].record_stream(2)
child = os.fork()
if child == 0:
    kept.clear()
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
assert kept[0].to_bytes() and resource.allocation_counts.current_count == 1
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    # Newer Pythons warn of a fork beside threads.
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
