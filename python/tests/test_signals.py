"""What signals' handlers raise, as Ctrl-C's does, while the library calls functions of the package's."""

import contextlib
import gc

import pytest

import vpmm
from vpmm import mr
from vpmm._library import call, ffi, lib
from vpmm._mem_pool import HeapMemPool


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


def opens_a_tag():
    def work():
        with vpmm.tag("weights"):
            pass

    return work


def uses_a_heap():
    heap = HeapMemPool("weights")

    def work():
        with heap.using():
            pass

    return work


@pytest.mark.parametrize("make", [opens_a_tag, uses_a_heap])
def test_a_block_s_tag_is_closed_whatever_comes(stopped, make):
    stopped(make(), 300, 1e-3)
    gc.collect()
    with pytest.raises(vpmm.InvalidArgumentError, match="this thread has no tag"):
        call(lib.vpmm_process_pop_tag)


def test_a_block_s_resource_is_current_no_more_whatever_comes(stopped):
    resource, others = mr.CudaMemoryResource(), mr.HostMemoryResource()

    def work():
        with mr.using(resource):
            pass

    stopped(work, 300, 1e-3)
    gc.collect()
    assert type(mr.get_current_device_resource()) is mr.PoolMemoryResource
    with mr.using(others):
        stopped(work, 300, 1e-3)
        gc.collect()
        assert mr.get_current_device_resource() is others


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
