"""Streams that come and go, and those that last."""

import concurrent.futures
import copy
import threading
import types

import pytest

import vpmm
from vpmm import _buffer, mr
from vpmm._library import address, call, handle, lib


def test_buffers_on_streams_of_their_own(make_stream):
    one, other = make_stream(), make_stream()
    first = vpmm.DeviceBuffer.from_bytes(b"abc" * 1000, stream=one)
    second = vpmm.DeviceBuffer(first.size, stream=other)
    assert (first.stream, second.stream) == (one, other)
    call(lib.vpmm_process_wait_for, 0, handle(other), handle(one))
    second.copy_from_device(first)
    assert second.to_bytes() == b"abc" * 1000
    first.record_stream(other)
    for buffer in (first, second):
        assert buffer.__cuda_array_interface__["stream"] == buffer.stream
        buffer.free()


def test_a_borrower_s_stream_comes_after(make_stream):
    own, borrowers = make_stream(), make_stream()
    buffer = vpmm.DeviceBuffer.from_bytes(bytes(100), stream=own)
    for stream in (None, own, borrowers, -1, 1):
        capsule = buffer.__dlpack__(stream=stream, max_version=(1, 0))
        assert "dltensor" in repr(capsule)
        del capsule


@pytest.fixture
def waits(monkeypatch):
    """Who was made to wait for whom."""
    seen = []

    def noted(function, *arguments):
        if function is lib.vpmm_process_wait_for:
            seen.append(tuple(map(address, arguments[1:])))
        call(function, *arguments)

    monkeypatch.setattr(_buffer, "call", noted)
    return seen


def test_what_a_buffer_does_is_on_its_stream(make_stream, monkeypatch):
    own, done = make_stream(), []

    def noted(function, *arguments):
        is_free = function is lib.vpmm_python_free_memory
        done.append((function, address(arguments[-1].stream if is_free else arguments[-1])))
        call(function, *arguments)

    source = vpmm.DeviceBuffer(4, stream=own)
    buffer = vpmm.DeviceBuffer(4, stream=own)
    monkeypatch.setattr(_buffer, "call", noted)
    buffer.copy_from(b"abcd")
    buffer.fill(7)
    buffer.copy_from_device(source)
    buffer.copy_to(bytearray(4))
    buffer.free()
    names = [f"process_{name}" for name in ("upload", "fill", "copy", "download")]
    assert done == [(getattr(lib, f"vpmm_{name}"), own) for name in (*names, "python_free_memory")]


def test_a_borrower_waits_for_what_was_written(make_stream, waits):
    own, borrowers = make_stream(), make_stream()
    buffer = vpmm.DeviceBuffer.from_bytes(bytes(100), stream=own)
    for stream in (None, own, borrowers, -1):
        buffer.__dlpack__(stream=stream)
    # None stands for the legacy default stream, -1 for no order at all.
    assert waits == [(1, own), (borrowers, own)]


@pytest.mark.parametrize("resource", [mr.PinnedHostMemoryResource, mr.ManagedMemoryResource])
def test_the_host_borrows_what_has_been_written(make_stream, monkeypatch, resource):
    """NumPy names no stream, and reads at once."""
    own, borrowers, ended = make_stream(), make_stream(), []

    def noted(function, *arguments):
        if function is lib.vpmm_process_synchronize:
            ended.append(address(arguments[-1]))
        call(function, *arguments)

    buffer = vpmm.DeviceBuffer(100, stream=own, mr=resource())
    monkeypatch.setattr(_buffer, "call", noted)
    for stream in (borrowers, -1, own):
        buffer.__dlpack__(stream=stream)
    assert not ended
    buffer.__dlpack__()
    assert ended == [own]


def test_a_buffer_waits_for_streams_that_its_resource_takes_no_notes_of(make_stream, waits):
    own, other = make_stream(), make_stream()
    buffer = vpmm.DeviceBuffer(1000, stream=own, mr=of_counted()[0])
    buffer.record_stream(other)
    assert waits == []
    buffer.free()
    assert waits == [(own, other)]


def test_a_borrower_s_work_is_waited_for(make_stream):
    """By whoever gets the memory next."""
    own, borrowers = make_stream(), make_stream()
    for stream in (own, -1, borrowers):
        buffer = vpmm.DeviceBuffer(3 << 20, stream=own)
        address = buffer.ptr
        capsule = buffer.__dlpack__(stream=stream)
        # The last reference is the borrower's.
        del buffer
        assert state_of(address) == "live"
        del capsule
        assert (state_of(address) == "deferred") == (stream == borrowers)


def test_a_stream_that_lasts_is_known_until_it_is_forgotten(make_stream):
    stream = make_stream()
    assert not vpmm.forget_stream(stream)
    vpmm.DeviceBuffer(1000, stream=stream).free()
    assert not vpmm.forget_stream(stream)
    vpmm.keep_stream(stream)
    vpmm.keep_stream(stream)
    vpmm.DeviceBuffer(1000, stream=stream).free()
    assert vpmm.forget_stream(stream)
    assert not vpmm.forget_stream(stream)
    # The default streams do not end.
    vpmm.keep_stream(0)
    assert not vpmm.forget_stream(0)


def test_a_pool_s_calls_take_streams_as_buffers_do(make_stream):
    raw, other, pool = make_stream(), make_stream(), vpmm.Pool(addresses="1 GiB")
    same = [
        types.SimpleNamespace(__cuda_stream__=lambda: (0, raw)),
        types.SimpleNamespace(cuda_stream=raw),
        types.SimpleNamespace(ptr=raw),
        types.SimpleNamespace(handle=types.SimpleNamespace(value=raw)),
        raw,
    ]

    def blocks():
        """The numbers of blocks' streams, and what they are, by address."""
        segments = pool.snapshot()["segments"]
        made = (block for segment in segments for block in segment["blocks"])
        return {block["address"]: (block.get("stream_number"), block["vpmm_state"]) for block in made}

    for tag in (None, "cache"):
        pointers = [pool.malloc(3 << 20, stream, tag=tag) for stream in (*same, None, 0)]
        seen = [blocks()[pointer][0] for pointer in pointers]
        assert len({*seen[:5]}) == 1 and seen[0] != 0 and seen[5:] == [0, 0]
        for pointer, stream in zip(pointers, (*same, None, 0), strict=True):
            pool.free(pointer, stream)
    for stream in (same[0], types.SimpleNamespace(ptr=other)):
        pointer = pool.malloc(5 << 20, raw)
        pool.record_stream(pointer, stream)
        pool.free(pointer, same[1])
        # It waits for a stream that is not its own.
        assert (blocks()[pointer][1] == "deferred") == (stream is not same[0])
    for wrong in (lambda: pool.malloc(1, "0"), lambda: pool.free(0, object()), lambda: vpmm.keep_stream([])):
        with pytest.raises(TypeError, match="no stream"):
            wrong()
    vpmm.keep_stream(same[0])
    assert vpmm.forget_stream(same[1]) and not vpmm.forget_stream(same[2])


def state_of(address):
    """What a snapshot says of a block, with whatever free memory it may be one by now: deferred if it waits
    for a stream that is not its own."""
    segments = vpmm.snapshot()["segments"]
    (state,) = (
        block["vpmm_state"]
        for segment in segments
        for block in segment["blocks"]
        if block["address"] <= address < block["address"] + block["size"]
    )
    return state


def test_a_source_s_memory_lasts_until_it_is_copied(make_stream):
    one, other = make_stream(), make_stream()
    for stream in (one, other):
        source, copy = vpmm.DeviceBuffer(3 << 20, stream=one), vpmm.DeviceBuffer(3 << 20, stream=stream)
        copy.copy_from_device(source)
        address = source.ptr
        source.free()
        assert (state_of(address) == "deferred") == (stream == other)
        copy.free()


class Stream:
    """Notes what is live when it ends."""

    def __init__(self, ptr, ends, live_count):
        self.ptr, self._ends, self._live_count = ptr, ends, live_count

    def __del__(self):
        self._ends.append(self._live_count())


def of_process():
    return None, lambda: vpmm.statistics().live_count


def of_pool():
    resource = vpmm.mr.PoolMemoryResource(addresses="1 GiB")
    assert resource.facts.records_streams
    return resource, lambda: resource.pool.statistics().live_count


def of_counted():
    """Takes no notes of further streams."""
    resource = vpmm.mr.StatisticsResourceAdaptor(vpmm.mr.CudaMemoryResource())
    assert not resource.facts.records_streams
    return resource, lambda: resource.allocation_counts.current_count


@pytest.mark.parametrize("make", [of_process, of_pool, of_counted])
def test_a_buffer_keeps_the_streams_that_it_is_used_on(make_stream, make):
    resource, live_count = make()
    ends, before = [], live_count()
    for end in (vpmm.DeviceBuffer.free, lambda buffer: None):
        buffer = vpmm.DeviceBuffer(1000, stream=Stream(make_stream(), ends, live_count), mr=resource)
        for _ in range(2):
            buffer.record_stream(Stream(make_stream(), ends, live_count))
        assert ends == [] and buffer.size == 1000
        end(buffer)
        if end is vpmm.DeviceBuffer.free:
            assert ends == [before] * 3
        del buffer
        # The memory was freed before its streams went.
        assert ends == [before] * 3
        ends.clear()


@pytest.mark.parametrize("make", [of_process, of_pool, of_counted])
def test_to_note_the_same_stream_again_keeps_no_more(make_stream, make):
    class OfTorch:
        def __init__(self):
            self.cuda_stream = raw

    raw, resource = make_stream(), make()[0]
    with vpmm.DeviceBuffer(1000, mr=resource) as buffer:
        for _ in range(100):
            buffer.record_stream(OfTorch())
            buffer.record_stream(int(str(raw)))
        assert len(buffer._streams) == 1 and len(buffer._unnoted) <= 1


def test_another_thread_s_default_stream():
    """Its number means another stream there; the legacy one is ordered with both."""
    freed = []
    resource = vpmm.mr.CallbackMemoryResource(lambda *_: 1 << 20, lambda *given: freed.append(given[2]))
    made = [vpmm.DeviceBuffer(10, stream=2, mr=resource) for _ in range(2)]
    seen = []

    def work():
        buffer = made.pop()
        seen.append(buffer.__cuda_array_interface__["stream"])
        del buffer

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert (seen, freed) == ([1], [1])
    assert made[0].__cuda_array_interface__["stream"] == made[0].stream == 2
    made.pop()
    assert freed == [1, 2]


def test_another_thread_frees_what_is_on_a_default_stream():
    vpmm.record_history(10, frames=False)
    try:
        made = [vpmm.DeviceBuffer(10, stream=2) for _ in range(2)]
        thread = threading.Thread(target=made.pop)
        thread.start()
        thread.join()
        made.pop()
        events = vpmm.snapshot()["device_traces"][0]
        assert [event["stream"] for event in events if event["action"] == "free_completed"] == [1, 2]
    finally:
        vpmm.record_history(0)


def test_another_thread_reads_what_is_on_a_default_stream():
    buffer = vpmm.DeviceBuffer.from_bytes(b"abc" * 1000, stream=2)
    read = []
    thread = threading.Thread(target=lambda: read.append(buffer.to_bytes()))
    thread.start()
    thread.join()
    assert read == [b"abc" * 1000]
    buffer.record_stream(2)
    buffer.free()


def test_a_borrower_in_another_thread_waits_on_the_legacy_stream(make_stream, waits):
    borrowers = make_stream()
    buffer = vpmm.DeviceBuffer.from_bytes(bytes(100), stream=2)
    thread = threading.Thread(target=lambda: buffer.__dlpack__(stream=borrowers))
    thread.start()
    thread.join()
    assert waits == [(borrowers, 1)]


def test_a_use_on_a_default_stream_is_of_the_thread_that_tells_of_it(make_stream, waits):
    own = make_stream()
    buffer = vpmm.DeviceBuffer(1000, stream=own, mr=of_counted()[0])
    buffer.record_stream(2)
    thread = threading.Thread(target=buffer.free)
    thread.start()
    thread.join()
    assert waits == [(own, 1)]


def test_a_buffer_keeps_the_stream_that_it_is_copied_on(make_stream):
    ends, live_count = [], of_process()[1]
    before = live_count()
    source = vpmm.DeviceBuffer(1000, stream=make_stream())
    copy = vpmm.DeviceBuffer(1000, stream=Stream(make_stream(), ends, live_count))
    copy.copy_from_device(source)
    copy.free()
    assert ends == []
    source.free()
    assert ends == [before]


def test_a_copy_is_on_its_stream_and_comes_after(make_stream, waits):
    stream = types.SimpleNamespace(ptr=make_stream())
    buffer = vpmm.DeviceBuffer.from_bytes(b"abcd", stream=stream)
    made = copy.copy(buffer)
    assert made.stream == stream.ptr and made.to_bytes() == b"abcd"
    # It keeps the stream, too.
    assert [*made._streams.values()] == [stream]
    assert copy.copy(vpmm.DeviceBuffer(0, stream=stream)).size == 0
    # Another thread's own default stream is not ours.
    with concurrent.futures.ThreadPoolExecutor() as threads:
        theirs = threads.submit(vpmm.DeviceBuffer.from_bytes, b"theirs", stream=2).result()
    assert not waits
    assert copy.copy(theirs).to_bytes() == b"theirs"
    assert waits == [(2, 1)]
