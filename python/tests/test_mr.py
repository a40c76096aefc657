"""Resources and adaptors, by their names and on each other."""

import contextlib
import ctypes
import gc
import os
import pathlib
import pickle
import subprocess
import sys
import types

import numpy
import pytest

import vpmm
from vpmm import _dlpack, mr
from vpmm._library import answer, lib
from vpmm._pool import _driver
from vpmm.mr._functions import Functions
from vpmm.mr._names import of_handle

MIB = 1 << 20


def every_kind(tmp_path):
    cuda = mr.CudaMemoryResource
    return [
        mr.PoolMemoryResource(initial_pool_size="4 MiB", maximum_pool_size="64 MiB"),
        mr.PoolMemoryResource(cuda(), profile="paged"),
        cuda(),
        mr.ManagedMemoryResource(),
        mr.PinnedHostMemoryResource(),
        mr.HostMemoryResource(),
        mr.CudaAsyncMemoryResource("2 MiB", release_threshold="1 GiB", maximum_pool_size="1 GiB"),
        mr.CoalescingMemoryResource(cuda(), "2 MiB", "64 MiB"),
        mr.FixedSizeMemoryResource(cuda(), "2 MiB", 4),
        mr.BinningMemoryResource(cuda(), 18, 22),
        mr.ArenaMemoryResource(cuda(), "64 MiB"),
        mr.CachingMemoryResource(max_split_size_mb=64),
        mr.LimitingResourceAdaptor(cuda(), "64 MiB"),
        mr.StatisticsResourceAdaptor(mr.PinnedHostMemoryResource()),
        mr.TrackingResourceAdaptor(cuda(), capture_stacks=True),
        mr.LoggingResourceAdaptor(cuda(), tmp_path / "every, kind.csv", format="full"),
        mr.AlignedResourceAdaptor(cuda(), 4096),
        mr.ThreadSafeResourceAdaptor(cuda()),
        mr.PrefetchResourceAdaptor(mr.ManagedMemoryResource()),
        mr.FailureCallbackResourceAdaptor(cuda(), lambda size: False),
        mr.open("limiting(64MiB,statistics(default))"),
    ]


def test_each_gives_memory_and_takes_it_back(tmp_path):
    for resource in every_kind(tmp_path):
        facts = resource.facts
        for size in (1, 1000, MIB + 1):
            pointer = resource.allocate(size, 0)
            assert pointer and pointer % facts.min_align == 0, resource
            resource.deallocate(pointer, size, 0)
        assert resource.allocate(0) == 0
        resource.deallocate(0, 0)
        with pytest.raises(MemoryError):
            resource.allocate(1 << 50)
        with pytest.raises(ValueError):
            resource.allocate(-1)
        with vpmm.DeviceBuffer(3000, mr=resource) as buffer:
            assert buffer.mr is resource and buffer.ptr
            if facts.device_accessible:
                buffer.copy_from(b"abc" * 1000)
                assert buffer.to_bytes() == b"abc" * 1000
        assert type(resource).__name__ in repr(resource)


def test_str_is_the_tree():
    pool = mr.PoolMemoryResource()
    counted = mr.StatisticsResourceAdaptor(mr.LimitingResourceAdaptor(pool, "8 GiB"))
    assert str(counted) == ("statistics\n└─ limiting(limit=8 GiB)\n   └─ vpmm(profile=default device=0)")
    assert "statistics on limiting(limit=8 GiB) on vpmm" in repr(counted)
    assert counted.upstream_mr.get_upstream() is pool
    by_name = mr.open("statistics(limiting(8GiB,default))")
    assert str(by_name) == str(counted)
    assert type(by_name) is mr.StatisticsResourceAdaptor
    limiting = by_name.upstream_mr
    assert type(limiting) is mr.LimitingResourceAdaptor and limiting is by_name.upstream_mr
    assert limiting.get_allocation_limit() == 8 << 30
    assert type(limiting.upstream_mr) is mr.PoolMemoryResource
    assert limiting.upstream_mr.pool.statistics().live_bytes == 0
    assert type(mr.open("thread-safe", pool)) is mr.ThreadSafeResourceAdaptor


def test_arguments_have_rmms_names(tmp_path):
    cuda = mr.CudaMemoryResource()
    for kind, named in (
        (mr.PoolMemoryResource, {"initial_pool_size": MIB, "maximum_pool_size": 4 * MIB}),
        (mr.ArenaMemoryResource, {"arena_size": MIB}),
        (mr.FixedSizeMemoryResource, {"block_size": MIB, "blocks_to_preallocate": 2}),
        (mr.BinningMemoryResource, {"min_size_exponent": 18, "max_size_exponent": 20}),
        (mr.LimitingResourceAdaptor, {"allocation_limit": MIB}),
        (mr.LoggingResourceAdaptor, {"log_file_name": tmp_path / "log.csv"}),
        (mr.StatisticsResourceAdaptor, {}),
        (mr.TrackingResourceAdaptor, {"capture_stacks": True}),
        (mr.FailureCallbackResourceAdaptor, {"callback": lambda size: False}),
        (mr.PrefetchResourceAdaptor, {}),
    ):
        assert kind(upstream_mr=cuda, **named).device == 0
    try:
        mr.set_current_device_resource(mr=cuda)
        assert mr.get_current_device_resource() is cuda
    finally:
        mr.reset_current_device_resource()


def test_settings_reach_the_library(tmp_path):
    cuda = mr.CudaMemoryResource()
    for resource, first in (
        (mr.AlignedResourceAdaptor(cuda, 4096, "1 MiB"), "aligned(alignment=4 KiB from=1 MiB)"),
        (
            mr.CudaAsyncMemoryResource("2 MiB", "1 GiB", maximum_pool_size="4 MiB"),
            "cuda-async(device=0 initial=2 MiB keeps=1 GiB max=4 MiB)",
        ),
    ):
        assert str(resource).splitlines()[0] == first
    pool = mr.PoolMemoryResource(initial_pool_size="4 MiB", maximum_pool_size="16 MiB")
    assert pool.pool_size() == 4 * MIB
    with pytest.raises(vpmm.OutOfMemoryError, match="16 MiB"):
        pool.allocate(17 * MIB)
    log = mr.LoggingResourceAdaptor(cuda, tmp_path / "full.csv", format="full")
    log.flush()
    with open(log.get_file_name()) as file:
        assert file.readline().startswith("Thread,Time,Action,Pointer,Size,Stream,")


def test_what_is_wrong_is_said():
    pool = mr.PoolMemoryResource()
    for wrong, error, text in (
        (lambda: mr.open("arenas"), ValueError, "no allocator"),
        (lambda: mr.open("limiting(1GiB)"), ValueError, "lacks its upstream"),
        (lambda: mr.open("statistics(default)", pool), ValueError, "stands on nothing"),
        (lambda: mr.LimitingResourceAdaptor("a text", 5), TypeError, "no memory resource"),
        (lambda: mr.PoolMemoryResource(pool), TypeError, "CoalescingMemoryResource"),
        (lambda: mr.PoolMemoryResource(colour="red"), TypeError, "colour"),
        (lambda: mr.BinningMemoryResource(pool, 5), TypeError, "exponents"),
        (lambda: mr.CoalescingMemoryResource(pool, 100), ValueError, "multiple of 256"),
        (lambda: mr.LoggingResourceAdaptor(pool, "/nowhere/x.csv"), OSError, "log"),
        (lambda: mr.LoggingResourceAdaptor(pool), ValueError, "RMM_LOG_FILE"),
        (lambda: mr.CachingMemoryResource(pool, colour="red"), ValueError, "colour"),
        (lambda: mr.AlignedResourceAdaptor(pool, 3), ValueError, "3"),
        (lambda: pool.deallocate(4096, 1), vpmm.PointerError, "0x1000"),
        (lambda: mr.CudaMemoryResource(device=77), vpmm.DriverError, "no device 77"),
        (lambda: vpmm.DeviceBuffer(1, mr=pool, device=1), ValueError, "device 0"),
        (lambda: mr.CachingMemoryResource(pool, device=1), ValueError, "device 0"),
        (lambda: mr.PoolMemoryResource(mr.CudaMemoryResource(), device=1), ValueError, "device 0"),
        (lambda: mr.open("statistics", pool, device=1), ValueError, "device 0"),
    ):
        with pytest.raises(error, match=text):
            wrong()

    class Ours(mr.LimitingResourceAdaptor):
        def __init__(self):
            pass

    with pytest.raises(TypeError, match="__init__"):
        mr.StatisticsResourceAdaptor(Ours())


def test_the_host_s_memory_goes_back_through_bins_beside_a_device_s():
    for below, of_bin in (
        (mr.CudaMemoryResource(), mr.PinnedHostMemoryResource()),
        (mr.PinnedHostMemoryResource(), mr.CudaMemoryResource()),
    ):
        binning = mr.BinningMemoryResource(below)
        binning.add_bin(4096, of_bin)
        for size in (4096, 8192):
            binning.deallocate(binning.allocate(size), size)


def test_a_limit():
    limiting = mr.LimitingResourceAdaptor(mr.CudaMemoryResource(), "1 MiB")
    first = limiting.allocate(1000)
    assert limiting.get_allocated_bytes() == 1024
    with pytest.raises(vpmm.OutOfMemoryError, match="1 MiB"):
        limiting.allocate(MIB)
    limiting.deallocate(first, 1000)
    assert limiting.get_allocated_bytes() == 0


def test_counters_are_nested():
    counted = mr.StatisticsResourceAdaptor(mr.CudaMemoryResource())
    first = counted.allocate(1000)
    assert counted.push_counters() == mr.Counters(1000, 1, 1000, 1, 1000, 1)
    second = counted.allocate(3000)
    counted.deallocate(first, 1000)
    assert counted.allocation_counts == mr.Counters(2000, 0, 3000, 1, 3000, 1)
    assert counted.pop_counters().peak_bytes == 3000
    assert counted.allocation_counts == mr.Counters(3000, 1, 4000, 2, 4000, 2)
    with pytest.raises(vpmm.StateError):
        counted.pop_counters()
    counted.deallocate(second, 3000)


def test_what_was_never_freed_is_told():
    program = """
import vpmm
tracking = vpmm.mr.TrackingResourceAdaptor(vpmm.mr.CudaMemoryResource())
pointer = tracking.allocate(1000)
assert tracking.get_outstanding_allocations_count() == 1 and tracking.get_allocated_bytes() == 1000
assert "1000 B" in tracking.get_outstanding_allocations_str()
try:
    tracking.deallocate(pointer, 999)
    raise SystemExit("a wrong size was taken")
except vpmm.PointerError:
    pass
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "a wrong free" in ran.stderr and "never freed: 1 allocation, 1000 B" in ran.stderr


def test_a_child_does_not_tell_of_its_parents_memory():
    program = """
import os, sys, vpmm
kept = vpmm.DeviceBuffer(1000, mr=vpmm.mr.TrackingResourceAdaptor(vpmm.mr.CudaMemoryResource()))
child = os.fork()
if child == 0:
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
kept.free()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "never freed" not in ran.stderr


def test_a_log_that_rmm_s_tools_read(tmp_path, monkeypatch):
    log = mr.LoggingResourceAdaptor(mr.CudaMemoryResource(), tmp_path / 'a=b,(c) "d".csv')
    name = log.get_file_name()
    assert name.endswith('/a=b,(c) "d".dev0.csv') and log.lost_rows() == 0
    log.deallocate(log.allocate(1000), 1000)
    log.flush()
    del log
    gc.collect()
    with open(name) as file:
        header, allocate, free = file.read().splitlines()
    assert header == "Thread,Time,Action,Pointer,Size,Stream"
    assert ",allocate,0x" in allocate and allocate.endswith(",1000,0x1") and ",free,0x" in free
    monkeypatch.setenv("RMM_LOG_FILE", str(tmp_path / "named.txt"))
    assert mr.LoggingResourceAdaptor(mr.CudaMemoryResource()).get_file_name().endswith("named.dev0.txt")


def test_a_log_s_name_is_any_that_is_utf_8(tmp_path):
    cuda = mr.CudaMemoryResource()
    log = mr.LoggingResourceAdaptor(cuda, os.fsencode(tmp_path / "grün.csv"))
    assert log.get_file_name() == str(tmp_path / "grün.dev0.csv")
    for name in (b"gr\xfcn.csv", "gr\udcfcn.csv", pathlib.Path("gr\udcfcn.csv")):
        with pytest.raises(ValueError, match=r"'gr\\udcfcn.csv' is not UTF-8"):
            mr.LoggingResourceAdaptor(cuda, name)


def test_bins():
    binning = mr.BinningMemoryResource(mr.CudaMemoryResource(), -1, -1)
    counted = mr.StatisticsResourceAdaptor(mr.CudaMemoryResource())
    binning.add_bin("64 KiB")
    binning.add_bin(MIB, counted)
    small, middle, large = (binning.allocate(size) for size in (1000, 100_000, 2 * MIB))
    assert counted.allocation_counts.current_bytes == 100_000
    for pointer, size in ((small, 1000), (middle, 100_000), (large, 2 * MIB)):
        binning.deallocate(pointer, size)
    assert counted.allocation_counts.current_count == 0
    for itself in (binning, mr.StatisticsResourceAdaptor(binning)):
        with pytest.raises(ValueError, match="the bin is the resource itself, or stands on it"):
            binning.add_bin(4 * MIB, itself)


def test_functions_of_python_as_a_resource():
    calls, below = [], mr.CudaMemoryResource()

    def allocate(size, stream):
        # What stands on it may hold a lock that a buffer's end would take.
        assert not gc.isenabled()
        calls.append(("allocate", size, stream))
        return below.allocate(size, stream) if size < MIB else 0

    def deallocate(pointer, size, stream):
        calls.append(("deallocate", size, stream))
        below.deallocate(pointer, size, stream)

    counted = mr.StatisticsResourceAdaptor(mr.CallbackMemoryResource(allocate, deallocate))
    assert str(counted) == "statistics\n└─ callback"
    pointer = counted.allocate(1000)
    assert gc.isenabled()
    counted.deallocate(pointer, 1000)
    # The legacy default stream has the number 1, too.
    assert calls == [("allocate", 1000, 1), ("deallocate", 1000, 1)]
    with pytest.raises(MemoryError):
        counted.allocate(MIB)
    # As the caller has it.
    gc.disable()
    try:
        counted.deallocate(counted.allocate(1000), 1000)
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert len(Functions._live) == 1
    with pytest.raises(vpmm.DriverError):
        mr.CallbackMemoryResource(allocate, deallocate, device=77)
    assert len(Functions._live) == 1
    del counted
    gc.collect()
    assert not Functions._live


def test_what_python_s_functions_raise_comes_out():
    def raises(*_):
        raise KeyError("ours")

    resource = mr.LimitingResourceAdaptor(mr.CallbackMemoryResource(raises, raises), MIB)
    with pytest.raises(KeyError, match="ours"):
        resource.allocate(1)
    assert resource.get_allocated_bytes() == 0
    resource = mr.CallbackMemoryResource(lambda *_: 0x10000, raises)
    pointer = resource.allocate(1)
    with pytest.raises(KeyError, match="ours"):
        resource.deallocate(pointer, 1)


def test_a_function_that_makes_room():
    limiting = mr.LimitingResourceAdaptor(mr.CudaMemoryResource(), MIB)
    kept, asked = [limiting.allocate(MIB // 2), limiting.allocate(MIB // 2)], []

    def make_room(size):
        asked.append(size)
        if not kept:
            return False
        limiting.deallocate(kept.pop(), MIB // 2)
        return True

    resource = mr.FailureCallbackResourceAdaptor(limiting, make_room)
    pointer = resource.allocate(MIB)
    assert asked == [MIB, MIB] and not kept
    with pytest.raises(MemoryError):
        resource.allocate(1)
    assert asked == [MIB, MIB, 1]
    resource.deallocate(pointer, MIB)


def test_the_current_resource():
    process = mr.get_current_device_resource()
    assert process.is_equal(mr.PoolMemoryResource.of_process())
    assert not process.is_equal(mr.PoolMemoryResource())
    counted = mr.StatisticsResourceAdaptor(mr.CudaMemoryResource())
    inner = mr.LimitingResourceAdaptor(counted, MIB)
    before = vpmm.statistics().live_count
    with mr.using(counted) as current:
        assert current is counted is mr.get_current_device_resource()
        outer = vpmm.DeviceBuffer.from_bytes(b"outer")
        with mr.using(inner):
            assert mr.get_current_device_resource() is inner
            with pytest.raises(MemoryError):
                vpmm.DeviceBuffer(2 * MIB)
        assert mr.get_current_device_resource() is counted
        assert vpmm.statistics().live_count == before
    assert mr.get_current_device_resource().is_equal(process)
    # It goes back to where it is from.
    assert counted.allocation_counts.current_count == 1 and outer.to_bytes() == b"outer"
    outer.free()
    assert counted.allocation_counts.current_count == 0
    with vpmm.DeviceBuffer(1):
        assert vpmm.statistics().live_count == before + 1
    mr.set_current_device_resource(counted)
    try:
        assert mr.get_current_device_resource() is counted
    finally:
        mr.reset_current_device_resource()
    with pytest.raises(TypeError):
        mr.set_current_device_resource("counted")


def test_the_library_s_current_resource_is_the_same():
    def of_library():
        return of_handle(answer("vpmm_resource *", lib.vpmm_resource_current, _driver(), 0), 0)

    process, counted = of_library(), mr.StatisticsResourceAdaptor(mr.CudaMemoryResource())
    with mr.using(counted):
        assert of_library().is_equal(counted)
        # One that is set while another is: the last one stays.
        with mr.using(mr.HostMemoryResource()) as other:
            assert of_library().is_equal(other)
        assert of_library().is_equal(counted)
    assert of_library().is_equal(process) and not process.is_equal(counted)


def test_the_process_s_pool_has_its_tags_and_its_history_as_a_resource():
    limited = mr.LimitingResourceAdaptor(mr.PoolMemoryResource.of_process(), MIB)
    vpmm.record_history(10)
    try:
        with vpmm.tag("by a resource"):
            buffer = vpmm.DeviceBuffer.from_bytes(b"abc", mr=limited)
        assert vpmm.suspend("by a resource") > 0
        vpmm.resume("by a resource")
        assert buffer.to_bytes() == b"abc"
        buffer.free()
        actions = [event["action"] for event in vpmm.snapshot()["device_traces"][0]]
        assert actions == ["alloc", "free_requested", "free_completed"]
    finally:
        vpmm.record_history(0)


def test_a_buffer_keeps_its_resource():
    counted = mr.StatisticsResourceAdaptor(mr.PoolMemoryResource())
    buffer = vpmm.DeviceBuffer.from_numpy(numpy.arange(1000), mr=counted)
    total = counted.allocation_counts.total_bytes
    assert total == 8000 and buffer.device == 0
    del counted
    gc.collect()
    assert buffer.to_numpy("int64")[999] == 999
    buffer.record_stream(1)
    capsule = buffer.__dlpack__(stream=-1)
    del buffer, capsule
    gc.collect()


def test_what_dlpack_says_of_memory():
    for resource, device in (
        (mr.PoolMemoryResource(), (2, 0)),
        (mr.ManagedMemoryResource(), (13, 0)),
        (mr.LimitingResourceAdaptor(mr.PinnedHostMemoryResource(), MIB), (3, 0)),
        (mr.HostMemoryResource(), (1, 0)),
    ):
        buffer = vpmm.DeviceBuffer(10, mr=resource)
        assert buffer.__dlpack_device__() == device
        assert "dltensor" in repr(buffer.__dlpack__(stream=-1, dl_device=device))
        assert hasattr(buffer, "__cuda_array_interface__") == (device[0] != 1)
    # The host's own memory is NumPy's to read, and no kernel's.
    ctypes.memmove(buffer.ptr, b"abcdefghij", 10)
    assert numpy.from_dlpack(buffer).tobytes() == b"abcdefghij"
    with pytest.raises(AttributeError, match="does not reach"):
        _ = buffer.__cuda_array_interface__


@pytest.mark.parametrize(
    "make", [mr.PinnedHostMemoryResource, mr.ManagedMemoryResource, mr.HostMemoryResource]
)
def test_numpy_writes_to_what_the_host_reaches(make):
    buffer = vpmm.DeviceBuffer.from_bytes(b"abcd", mr=make())
    array = numpy.from_dlpack(buffer)
    array[1] = ord("x")
    assert buffer.to_bytes() == b"axcd"
    # It is the host's memory for who asks for that.
    capsule = buffer.__dlpack__(dl_device=(1, 0))
    (_, managed, _), *_ = reversed(_dlpack._LENT.values())
    assert (managed.tensor.device.type, managed.tensor.device.id) == (1, 0)
    del buffer, capsule
    gc.collect()
    assert len(_dlpack._LENT) == 1 and array.tobytes() == b"axcd"
    del array
    assert not _dlpack._LENT


def test_streams_that_a_resource_takes_no_notes_of():
    resource = mr.CudaAsyncMemoryResource()
    assert not resource.facts.records_streams
    with pytest.raises(vpmm.UnsupportedError):
        resource.record_stream(4096, 0)
    with vpmm.DeviceBuffer(1000, mr=resource) as buffer:
        buffer.record_stream(2)


def test_cupy_and_numba_on_a_resource(monkeypatch):
    counted = mr.StatisticsResourceAdaptor(mr.CudaMemoryResource())

    def live():
        return counted.allocation_counts.current_count

    cupy = pytest.importorskip("cupy")
    import vpmm.cupy

    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: types.SimpleNamespace(ptr=0))
    monkeypatch.setattr(cupy.cuda.device, "get_device_id", lambda: 0)
    memory = vpmm.cupy.allocator_of(counted)(1000)
    assert live() == 1
    with mr.using(counted):
        other = vpmm.cupy.allocator(1000)
    assert live() == 2
    del memory, other
    assert live() == 0

    pytest.importorskip("numba")
    import vpmm.numba

    context = types.SimpleNamespace(device=types.SimpleNamespace(id=0))
    manager = vpmm.numba.manager_of(counted)(context=context)
    memory = manager.memalloc(1000)
    assert live() == 1 and manager.get_memory_info().free > 0
    memory.free()
    assert live() == 0


def test_what_is_raised_where_a_resource_begins_and_ends(monkeypatch):
    def raises(*_):
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        mr.CoalescingMemoryResource(mr.CallbackMemoryResource(raises, raises), MIB)
    with pytest.raises(KeyError, match="ours"):
        mr.open(f"coalescing(initial={MIB})", mr.CallbackMemoryResource(raises, raises))
    # Nobody has called where the garbage collector ends it: it is told as from destructors.
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: told.append(raised.exc_type))
    resource = mr.CoalescingMemoryResource(mr.CallbackMemoryResource(lambda *_: 1 << 20, raises), MIB)
    del resource
    gc.collect()
    assert told == [KeyError]


def test_a_request_that_is_served_after_all():
    """What the function raised at first counts no more."""
    tries, freed = [], []

    def allocate(size, stream):
        tries.append(size)
        if len(tries) == 1:
            raise MemoryError("not yet")
        return 1 << 20

    below = mr.CallbackMemoryResource(allocate, lambda *given: freed.append(given))
    resource = mr.FailureCallbackResourceAdaptor(below, lambda size: True)
    assert resource.allocate(1000) == 1 << 20
    assert tries == [1000, 1000] and not freed
    resource.deallocate(1 << 20, 1000)
    assert freed == [(1 << 20, 1000, 1)]


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_resource_that_begins_after_all(error, by_name):
    """Its first memory was there at the second try: so it is made, or where that cannot be, gives it back."""
    tries, freed = [], []

    def allocate(size, stream):
        tries.append(size)
        if len(tries) == 1:
            raise error
        return 1 << 20

    below = mr.CallbackMemoryResource(allocate, lambda *given: freed.append(given[:2]))
    room = mr.FailureCallbackResourceAdaptor(below, lambda size: True)
    raised = contextlib.nullcontext() if error is MemoryError else pytest.raises(error)
    with raised:
        if by_name:
            made = mr.open(f"coalescing(initial={MIB})", room)
        else:
            made = mr.CoalescingMemoryResource(room, MIB)
        assert not freed
        del made
    gc.collect()
    assert tries == [MIB, MIB] and freed == [(1 << 20, MIB)]


def test_a_request_that_is_served_while_something_else_is_raised():
    """It comes out, and the memory goes back."""
    tries, freed = [], []

    def allocate(size, stream):
        tries.append(size)
        if len(tries) == 1:
            raise KeyboardInterrupt
        return 1 << 20

    below = mr.CallbackMemoryResource(allocate, lambda *given: freed.append(given))
    resource = mr.FailureCallbackResourceAdaptor(below, lambda size: True)
    with pytest.raises(KeyboardInterrupt):
        resource.allocate(1000)
    assert tries == [1000, 1000] and freed == [(1 << 20, 1000, 1)]


@pytest.mark.parametrize("second", ["no memory", "another resource's"])
def test_what_was_raised_is_not_forgotten_meanwhile(second):
    """Not by a lack of memory after it, nor by what the function itself asks for."""
    tries, freed = [], []
    other = mr.CallbackMemoryResource(lambda *_: 1 << 30, lambda *_: None)

    def allocate(size, stream):
        tries.append(size)
        if len(tries) == 1:
            raise KeyboardInterrupt
        if len(tries) == 2 and second == "no memory":
            raise MemoryError
        other.deallocate(other.allocate(1), 1)
        return 1 << 20

    below = mr.CallbackMemoryResource(allocate, lambda *given: freed.append(given))
    resource = mr.FailureCallbackResourceAdaptor(below, lambda size: True)
    with pytest.raises(KeyboardInterrupt):
        resource.allocate(1000)
    assert freed == [(1 << 20, 1000, 1)]


def test_a_buffer_of_the_host_s_memory_has_contents():
    # A device does not reach it, so its copies are none of the driver's.
    for resource in (mr.HostMemoryResource(), mr.StatisticsResourceAdaptor(mr.HostMemoryResource())):
        buffer = vpmm.DeviceBuffer.from_bytes(b"abcdef", mr=resource)
        assert buffer.to_bytes() == b"abcdef" == numpy.from_dlpack(buffer).tobytes()
        buffer.copy_from(b"xy", 2)
        out = bytearray(3)
        buffer.copy_to(out, 1)
        assert out == b"bxy" and buffer.to_numpy().tobytes() == b"abxyef"
        # From the host to the device, from there to the host, and on the host.
        with vpmm.DeviceBuffer(6) as other:
            other.copy_from_device(buffer)
            assert other.to_bytes() == b"abxyef"
            other.fill(ord("d"))
            buffer.copy_from_device(other)
            assert buffer.to_bytes() == b"dddddd"
        another = vpmm.DeviceBuffer.from_bytes(b"host", mr=resource)
        buffer.copy_from_device(another)
        assert buffer.to_bytes() == b"hostdd"
        buffer.fill(7)
        assert buffer.to_bytes() == bytes([7] * 6)
        with pytest.raises(ValueError):
            buffer.copy_from(b"too long", 1)
        with pytest.raises(ValueError):
            another.copy_from_device(buffer)
        with pytest.raises((BufferError, ValueError, TypeError)):
            buffer.copy_to(b"123456")
        assert pickle.loads(pickle.dumps(buffer)).to_bytes() == bytes([7] * 6)


def test_what_is_wrong_is_named_as_it_was_given():
    cuda = mr.CudaMemoryResource()
    for make, text in [
        (lambda: mr.CoalescingMemoryResource(cuda, 100), "initial_pool_size=100: "),
        (
            lambda: mr.CoalescingMemoryResource(cuda, "2MiB", "1MiB"),
            "maximum_pool_size=1048576: it must be at least initial_pool_size$",
        ),
        (lambda: mr.CudaAsyncMemoryResource(maximum_pool_size=0), "maximum_pool_size=0: "),
        (lambda: mr.ArenaMemoryResource(cuda, 5), "arena_size=5: "),
        (lambda: mr.FixedSizeMemoryResource(cuda, 0), "block_size=0: "),
        (lambda: mr.FixedSizeMemoryResource(cuda, 256, 0), "blocks_to_preallocate=0: "),
        (lambda: mr.BinningMemoryResource(cuda, 48, 50), "max_size_exponent=48: "),
    ]:
        with pytest.raises(vpmm.InvalidArgumentError, match=f"^{text}"):
            make()
