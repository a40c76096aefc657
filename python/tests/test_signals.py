"""What signals' handlers raise, as Ctrl-C's does, while the library calls functions of the package's."""

import contextlib
import gc

import pytest

import vpmm
from vpmm import mr
from vpmm._library import ffi, lib


def allocates():
    resource = mr.CallbackMemoryResource(lambda size, stream: 4096, lambda pointer, size, stream: None)
    return lambda: resource.allocate(256)


def deallocates():
    resource = mr.CallbackMemoryResource(lambda size, stream: 4096, lambda pointer, size, stream: None)
    return lambda: resource.deallocate(4096, 256)


def finds_none():
    resource = mr.FailureCallbackResourceAdaptor(mr.CudaMemoryResource(), lambda size: False)

    def work():
        with contextlib.suppress(MemoryError):
            resource.allocate(1 << 50)

    return work


@pytest.mark.parametrize("make", [allocates, deallocates, finds_none])
def test_it_comes_out_of_calls_with_functions(stopped, make):
    stopped(make(), 300, 1e-3)
    # It rests for these.
    assert gc.isenabled()


def drops():
    vpmm.DeviceBuffer(1000)


def frees():
    with vpmm.DeviceBuffer(1000):
        pass


@pytest.mark.parametrize("work", [drops, frees])
def test_a_buffer_is_freed_whatever_comes(stopped, work):
    """That nothing is left is seen behind each test."""
    stopped(work, 300, 1e-3)
    gc.collect()


def test_it_comes_out_of_snapshots(stopped):
    pool = vpmm.Pool.of_process()
    kept = [pool.malloc(512) for _ in range(10_000)]
    try:
        stopped(vpmm.snapshot, 30, 0.1)
    finally:
        for pointer in kept:
            pool.free(pointer)


def test_it_comes_out_behind_a_request_that_is_noted(stopped):
    """Where it was, be it PyTorch, nobody could be told."""
    pointer = ffi.new("void **")

    def work():
        # What the last turn has left; where that freed it, it is refused.
        lib.vpmm_process_free(0, pointer[0], ffi.NULL)
        lib.vpmm_process_malloc(0, 1000, ffi.NULL, pointer)

    vpmm.record_history(100)
    try:
        stopped(work, 300, 1e-3)
    finally:
        vpmm.record_history(0)
    lib.vpmm_process_free(0, pointer[0], ffi.NULL)
