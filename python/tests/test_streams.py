"""Streams that come and go, and those that last."""

import pytest

import vpmm
from vpmm._library import address, answer, call, handle, lib
from vpmm._pool import _driver


@pytest.fixture
def make_stream():
    made = []

    def make():
        raw = address(answer("void *", lib.vpmm_stream_create, _driver(), 0))
        made.append(raw)
        return raw

    yield make
    for raw in made:
        call(lib.vpmm_stream_destroy, _driver(), handle(raw))


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


def test_a_buffer_keeps_its_stream(make_stream):
    class Stream:
        def __init__(self, ptr):
            self.ptr = ptr

        def __del__(self):
            ends.append(vpmm.statistics().live_count)

    ends, before = [], vpmm.statistics().live_count
    buffer = vpmm.DeviceBuffer(1000, stream=Stream(make_stream()))
    assert ends == [] and buffer.size == 1000
    del buffer
    # The memory was freed before its stream went.
    assert ends == [before]
