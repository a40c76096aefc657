"""Heaps that stand apart, through the functions that PyTorch calls."""

import ctypes
import gc
import threading

import pytest

import vpmm
import vpmm.torch
from vpmm._library import path
from vpmm._mem_pool import HeapMemPool

MIB = 1 << 20

_library = ctypes.CDLL(path())
_library.vpmm_torch_alloc.restype = ctypes.c_void_p
_library.vpmm_torch_alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
_library.vpmm_torch_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]


def allocate(size):
    return _library.vpmm_torch_alloc(size, 0, None)


def free(pointer, size):
    _library.vpmm_torch_free(pointer, size, 0, None)


def as_many_as_rest():
    """Each heap that was given up is among them, if it can serve again."""
    return [HeapMemPool() for _ in range(len(HeapMemPool._resting[0]))]


def test_what_a_thread_allocates_comes_from_it():
    pool = HeapMemPool()
    outside = allocate(MIB)
    with vpmm.torch.use_mem_pool(pool):
        inside = [allocate(MIB), allocate(1000)]
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(allocate(MIB)))
        thread.start()
        thread.join()
        # It is nobody's: what is freed outside goes back into it.
        free(outside, MIB)
    assert pool.statistics().live_bytes == MIB + 1024
    assert vpmm.statistics().live_bytes >= 2 * MIB + 1024
    after = allocate(MIB)
    assert pool.statistics().live_count == 2
    free(inside[0], MIB)
    assert pool.statistics().live_count == 1
    with vpmm.torch.use_mem_pool(pool):
        again = allocate(MIB)
    assert again == inside[0], "its own memory serves it again, and nobody else"
    for pointer, size in ((again, MIB), (inside[1], 1000), (after, MIB), (elsewhere[0], MIB)):
        free(pointer, size)
    assert pool.statistics().live_count == 0


def test_pools_inside_each_other_and_names():
    outer, inner = HeapMemPool(), HeapMemPool("named")
    assert outer.id != inner.id and inner.name == "named"
    with outer.using():
        with inner.using():
            first = allocate(MIB)
        second = allocate(2 * MIB)
    assert outer.statistics().live_bytes == 2 * MIB and inner.statistics().live_bytes == MIB
    with vpmm.tag("named"):
        third = allocate(MIB)
    assert inner.statistics().live_bytes == 2 * MIB
    for pointer, size in ((first, MIB), (second, 2 * MIB), (third, MIB)):
        free(pointer, size)
    with pytest.raises(ValueError):
        with vpmm.torch.use_mem_pool(HeapMemPool(), device=1):
            pass


def test_it_sleeps_and_wakes():
    pool = HeapMemPool()
    with pool.using():
        buffer = vpmm.DeviceBuffer.from_bytes(b"abc" * 1000)
    before = vpmm.device_memory()[0]
    assert pool.suspend() > 0
    assert vpmm.device_memory()[0] > before
    pool.resume()
    assert buffer.to_bytes() == b"abc" * 1000
    buffer.free()


def test_its_memory_goes_back_when_it_is_dropped():
    vpmm.trim()
    free_before = vpmm.device_memory()[0]
    pool = HeapMemPool()
    with pool.using():
        pointer = allocate(64 * MIB)
    free(pointer, 64 * MIB)
    assert pool.statistics().mapped_bytes >= 64 * MIB
    heap = pool.name
    del pool
    gc.collect()
    assert abs(vpmm.device_memory()[0] - free_before) < 4 * MIB
    # The next one has its addresses, if nothing of it is allocated.
    pool = HeapMemPool()
    assert pool.name == heap and pool.statistics().mapped_bytes == 0
    with pool.using():
        pointer = allocate(MIB)
    del pool
    other = HeapMemPool()
    assert other.name != heap
    free(pointer, MIB)
    # What was allocated then goes back with the pool's own.
    vpmm.trim()
    assert abs(vpmm.device_memory()[0] - free_before) < 4 * MIB


def test_one_that_is_dropped_asleep():
    pool = HeapMemPool()
    heap = pool.name
    with pool.using():
        pointer = allocate(MIB)
    pool.suspend(contents="discard")
    free(pointer, MIB)
    del pool
    gc.collect()
    pools = [HeapMemPool() for _ in range(4)]
    (pool,) = (pool for pool in pools if pool.name == heap)
    with pool.using():
        pointer = allocate(MIB)
    assert pool.statistics().live_count == 1
    free(pointer, MIB)


def test_one_that_is_dropped_asleep_gives_what_it_held_back():
    """What is left of it is nobody's to resume any more."""
    pool = HeapMemPool()
    with pool.using():
        kept, gone = vpmm.DeviceBuffer.from_bytes(b"abc" * 1000), vpmm.DeviceBuffer(MIB)
    pool.suspend()
    gone.free()
    del pool
    gc.collect()
    assert kept.to_bytes() == b"abc" * 1000
    kept.free()


def test_one_that_cannot_wake_where_it_is_dropped_wakes_later():
    pool = HeapMemPool()
    heap = pool.name
    with pool.using():
        kept = vpmm.DeviceBuffer(600 * MIB)
    pool.suspend(contents="discard")
    # All that there may be.
    other = vpmm.DeviceBuffer(600 * MIB)
    del pool
    gc.collect()
    kept.free()
    assert heap not in {pool.name for pool in as_many_as_rest()}
    other.free()
    vpmm.trim()
    pools = as_many_as_rest()
    (pool,) = (pool for pool in pools if pool.name == heap)
    with pool.using():
        with vpmm.DeviceBuffer.from_bytes(b"abc") as buffer:
            assert pool.statistics().live_count == 1 and buffer.to_bytes() == b"abc"


def test_one_that_is_dropped_with_something_in_it_serves_again():
    pool = HeapMemPool()
    heap = pool.name
    with pool.using():
        pointer = allocate(MIB)
    del pool
    others = [HeapMemPool() for _ in range(4)]
    assert heap not in {other.name for other in others}
    free(pointer, MIB)
    del others
    assert heap in {other.name for other in as_many_as_rest()}


def test_many_pools_one_after_another_take_no_more_addresses():
    def one():
        with HeapMemPool().using():
            free(allocate(MIB), MIB)
        gc.collect()
        return vpmm.statistics().reserved_bytes

    first = one()
    assert all(one() == first for _ in range(50))
