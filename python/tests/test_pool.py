"""Pools, what they hold, and what they refuse."""

import decimal
import fractions
import inspect
import math
import os
import pickle
import re
import subprocess
import sys
import threading
import time

import numpy
import pytest

import vpmm
from vpmm import _errors, _pool, _worker
from vpmm._library import ffi, lib
from vpmm._mem_pool import HeapMemPool
from vpmm._pool import bytes_of

MIB = 1 << 20


def test_memory_is_allocated_and_freed():
    pool = vpmm.Pool(limit="64 MiB", addresses="1 GiB")
    pointers = [pool.malloc(size) for size in (1, 512, 3 * MIB)]
    assert len({*pointers}) == 3 and all(pointer % 256 == 0 for pointer in pointers)
    now = pool.statistics()
    assert now.live_count == 3 and 3 * MIB < now.live_bytes <= now.mapped_bytes
    assert pool.layout() and "live=" in repr(pool)
    pool.record_stream(pointers[0], 0)
    for pointer in pointers:
        pool.free(pointer)
    assert pool.statistics().live_bytes == 0
    pool.reset_peaks()
    assert pool.statistics().peak_live_bytes == 0
    assert pool.malloc(0) == 0
    pool.free(0)
    pool.validate()


@pytest.mark.parametrize("profile", ["default", "paged"])
def test_too_much_is_a_memory_error_with_a_map(profile):
    pool = vpmm.Pool(limit=16 * MIB, profile=profile)
    pointer = pool.malloc(10 * MIB)
    with pytest.raises(MemoryError) as caught:
        pool.malloc(10 * MIB)
    assert isinstance(caught.value, vpmm.OutOfMemoryError)
    assert caught.value.status == "VPMM_OUT_OF_MEMORY"
    assert "at most 16 MiB" in str(caught.value)
    pool.free(pointer)
    pool.free(pool.malloc(10 * MIB))


def test_each_status_that_somebody_can_act_on_is_an_exception():
    names = {ffi.string(lib.vpmm_status_name(number)).decode() for number in range(100)} - {"?"}
    # Done; a child of a fork; what is tried again by itself; defects; and what has no name.
    without = {"VPMM_OK", "VPMM_FORKED", "VPMM_INTERRUPTED", "VPMM_CORRUPT", "VPMM_PANIC", "VPMM_OTHER"}
    assert names == {*_errors._OF_STATUS} | without
    for status, kind in _errors._OF_STATUS.items():
        assert getattr(vpmm, kind.__name__) is kind and kind.__name__ in vpmm.__all__
        assert type(_errors.error_of(status, "why")) is kind


def test_mistakes_are_errors_of_their_own():
    pool = vpmm.Pool()
    pointer = pool.malloc(MIB)
    pool.free(pointer)
    for mistake in (pointer, 0x1000):
        with pytest.raises(vpmm.PointerError):
            pool.free(mistake)
    with pytest.raises(ValueError, match="profile"):
        vpmm.Pool(profile="best")
    with pytest.raises(ValueError, match="prefer"):
        vpmm.Pool(prefer="luck")
    with pytest.raises(vpmm.DriverError, match="no device 99"):
        vpmm.Pool(99)


def test_a_number_that_the_library_has_no_room_for_is_refused_by_name():
    pool = vpmm.Pool()
    for wrong in (-1, 1 << 64):
        for ask in (pool.malloc, vpmm.DeviceBuffer, vpmm.mr.CudaMemoryResource().allocate):
            with pytest.raises(ValueError, match=f"an allocation of {wrong} bytes|a buffer of {wrong} bytes"):
                ask(wrong)
        with pytest.raises(ValueError, match=f"{wrong} is no size"):
            pool.trim(wrong)
    for make in (vpmm.Pool, vpmm.configure, vpmm.Pool.of_process):
        for wrong in (-1, 1 << 32):
            with pytest.raises(ValueError, match=f"^device cannot be {wrong}$"):
                make(wrong)
    of_default, of_paged = ("moves_per_second", 1 << 32, "default"), ("initial_pages", 1 << 64, "paged")
    for name, wrong, profile in (of_default, of_paged):
        with pytest.raises(ValueError, match=f"^{name} cannot be {wrong}$"):
            vpmm.Pool(profile=profile, **{name: wrong})


@pytest.mark.parametrize("wrong", [-1, 1 << 64])
def test_a_number_is_refused_by_its_name_wherever_it_is_given(wrong):
    pool, resource = vpmm.Pool(sharing="descriptors"), vpmm.mr.CudaMemoryResource()

    def with_device(make):
        return "device", lambda: make(device=wrong)

    def with_stream(make):
        return "stream", lambda: make(stream=wrong)

    asked = [
        with_device(lambda device: vpmm.keep_stream(0, device)),
        with_device(lambda device: vpmm.forget_stream(0, device)),
        with_device(vpmm.device_memory),
        with_device(vpmm.reset_peaks),
        with_device(lambda device: vpmm.DeviceBuffer(1, device=device)),
        with_device(vpmm.mr.CudaMemoryResource),
        with_device(vpmm.mr.reset_current_device_resource),
        with_device(lambda device: vpmm.mr.CallbackMemoryResource(print, print, device=device)),
        with_device(HeapMemPool),
        with_device(lambda device: vpmm.Imported.receive(0, device=device)),
        with_stream(vpmm.keep_stream),
        with_stream(vpmm.forget_stream),
        with_stream(lambda stream: pool.malloc(1, stream)),
        with_stream(lambda stream: pool.free(0, stream)),
        with_stream(lambda stream: pool.record_stream(0, stream)),
        with_stream(lambda stream: vpmm.DeviceBuffer(1, stream=stream)),
        with_stream(lambda stream: resource.allocate(1, stream)),
        ("pointer", lambda: pool.free(wrong)),
        ("pointer", lambda: pool.record_stream(wrong, 0)),
        ("pointer", lambda: pool.export(wrong, 0)),
        ("pointer", lambda: resource.deallocate(wrong, 1)),
        ("nbytes", lambda: resource.deallocate(0, wrong)),
        ("alignment", lambda: resource.allocate(1, alignment=wrong)),
        ("alignment", lambda: resource.deallocate(0, 1, alignment=wrong)),
    ]
    if wrong > 0:
        asked.append(("socket", lambda: vpmm.Imported.receive(wrong)))
        asked.append(("socket", lambda: pool.export_all().send(wrong)))
    for name, ask in asked:
        with pytest.raises(ValueError, match=f"^{name} cannot be {wrong}$"):
            ask()
    for ask in (HeapMemPool().trim, lambda most: vpmm.record_history(most)):
        with pytest.raises(ValueError, match=str(wrong)):
            ask(wrong)


@pytest.mark.parametrize("wrong", [4096.5, 4096.0, "4096", None])
def test_what_is_no_integer_is_none_of_an_address(wrong):
    pool, resource = vpmm.Pool(), vpmm.mr.CudaMemoryResource()
    buffer = vpmm.DeviceBuffer(8)
    asked = [
        ("pointer", pool.free),
        ("pointer", lambda pointer: pool.record_stream(pointer, 0)),
        ("pointer", lambda pointer: resource.deallocate(pointer, 1)),
        ("device", vpmm.device_memory),
        ("device", vpmm.Pool),
        ("offset", lambda offset: buffer.copy_from(b"a", offset)),
        ("offset", lambda offset: buffer.copy_to(bytearray(1), offset)),
    ]
    for name, ask in asked:
        with pytest.raises(TypeError, match=f"^{name} cannot be {re.escape(repr(wrong))}: no integer$"):
            ask(wrong)


def test_what_a_paged_pool_cannot_be_is_told_by_its_options():
    for name, wrong in (("initial_pages", 1 << 50), ("page_size", "3 MiB"), ("addresses", "1 MiB")):
        with pytest.raises(vpmm.InvalidArgumentError, match=f"^{name}=[0-9]+: "):
            vpmm.Pool(profile="paged", **{name: wrong})
    with pytest.raises(vpmm.InvalidArgumentError, match="^addresses=1048576: "):
        vpmm.Pool(addresses="1 MiB")
    both = "^initial_pages=1: page_size=[0-9]+ leaves no room"
    with pytest.raises(vpmm.InvalidArgumentError, match=both):
        vpmm.Pool(profile="paged", initial_pages=1, page_size=1 << 62)


def test_what_the_process_s_pool_cannot_be_is_told_by_its_options():
    program = (
        "import vpmm\n"
        "vpmm.configure(addresses='1 MiB')\n"
        "for ask in (vpmm.Pool.of_process, lambda: vpmm.DeviceBuffer(1)):\n"
        "    try: ask()\n"
        "    except vpmm.InvalidArgumentError as error: assert str(error).startswith('addresses=1048576: '), error\n"
        "    else: raise SystemExit('made')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_pool_that_is_dropped_leaves_what_is_allocated():
    pool = vpmm.Pool()
    held = pool.malloc(MIB)
    del pool
    # A further one has addresses of its own.
    pool = vpmm.Pool()
    assert pool.malloc(MIB) != held


def test_sizes_are_numbers_or_text():
    assert bytes_of("20 GB") == 20 * 10**9
    assert bytes_of("1.5GiB") == 3 << 29
    # As the command has them: not a byte less, by the binary fraction of what is said in decimals.
    assert [bytes_of(f"{size} KB") for size in ("2.01", "4.02", "8.03")] == [2010, 4020, 8030]
    assert bytes_of(" 512 ") == bytes_of("512B") == bytes_of(512)
    assert bytes_of("2.0") == bytes_of(2.0) == 2
    # A part of the device's memory, as others have it, is not taken for no byte.
    # Nor is one of Unicode's other letters, which are the same in a comparison without case, a unit's.
    for wrong in ("", "GB", "1 PB", "-1", "1e9", 0.8, "0.8", "0.8 B", -5, "1 \u212aB", "1 M\u0130B"):
        with pytest.raises(ValueError):
            bytes_of(wrong)
    # However the number is written.
    assert bytes_of(decimal.Decimal(2)) == bytes_of(numpy.float32(2)) == 2
    fractional = (decimal.Decimal("1.5"), fractions.Fraction(3, 2), numpy.float32(0.8))
    for wrong in (*fractional, math.inf, math.nan, numpy.float32("inf"), numpy.float32("nan")):
        with pytest.raises(ValueError, match="is no size: bytes are whole"):
            bytes_of(wrong)


def test_the_process_has_one_pool_a_device():
    one, same = vpmm.Pool.of_process(), vpmm.Pool.of_process()
    pointer = one.malloc(MIB)
    assert same.statistics().live_count == vpmm.statistics().live_count >= 1
    same.free(pointer)
    with pytest.raises(vpmm.InUseError):
        vpmm.configure(limit="1 GiB")
    assert vpmm.device_count() >= 1
    free, total = vpmm.device_memory()
    assert 0 < free <= total


def test_the_process_s_pool_takes_options_before_it_is_made():
    program = (
        "import vpmm\n"
        "vpmm.configure(limit='8 MiB')\n"
        "vpmm.configure(0, limit='16 MiB')\n"
        "pool = vpmm.Pool.of_process()\n"
        "pool.free(pool.malloc(12 << 20))\n"
        "try: pool.malloc(20 << 20)\n"
        "except MemoryError as error: assert '16 MiB' in str(error), error\n"
        "else: raise SystemExit('no limit')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_same_options_may_be_set_once_more():
    program = (
        "import vpmm\n"
        "vpmm.configure(limit='8 MiB')\n"
        "vpmm.Pool.of_process()\n"
        "vpmm.configure(limit=8 << 20)\n"
        "try: vpmm.configure(limit='9 MiB')\n"
        "except vpmm.InUseError: pass\n"
        "else: raise SystemExit('changed')\n"
        "vpmm.configure(limit='8 MiB')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_device_is_one_that_there_is():
    program = "import vpmm\ntry: print(vpmm.device_count())\nexcept vpmm.Error as error: print(error)"

    def said(device):
        given = [sys.executable, "-c", program]
        done = subprocess.run(given, env=os.environ | {"VPMM_DEVICE": device}, capture_output=True, text=True, check=True)
        return done.stdout

    # The last one of those that are told is there.
    last = re.search(r"\"abacus\"; known: cuda, sim, sim:1 to sim:(\d+)$", said("abacus"))[1]
    assert said(f"sim:{last}") == f"{int(last) + 1}\n"
    assert f'"sim:{int(last) + 1}"; known: ' in said(f"sim:{int(last) + 1}")
    # As where it is not set: a GPU's driver, or that there is none.
    assert "known" not in said("")


def test_free_memory_goes_back():
    pointer = vpmm.Pool.of_process().malloc(50 * MIB)
    vpmm.Pool.of_process().free(pointer)
    assert vpmm.statistics().mapped_bytes >= 50 * MIB
    assert vpmm.trim("10 MiB") > 0
    assert vpmm.statistics().mapped_bytes <= 50 * MIB


def test_threads_share_a_pool():
    pool, wrong = vpmm.Pool(addresses="1 GiB"), []

    def work():
        try:
            for turn in range(200):
                pool.free(pool.malloc(1 + turn * 997 % MIB))
        except vpmm.Error as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and pool.statistics().live_count == 0
    pool.validate()


def test_options_have_the_names_that_checkers_know():
    names = [*inspect.signature(_pool._options).parameters][1:]
    assert [*vpmm.PoolOptions.__annotations__] == names
    settings = inspect.signature(_worker.Worker).parameters
    own = [name for name, parameter in settings.items() if parameter.kind is parameter.KEYWORD_ONLY]
    assert [*_worker.Settings.__annotations__][-len(own) :] == own
    # No more is needed than cffi.
    program = "import sys, vpmm, vpmm._worker, vpmm.torch\nassert 'typing_extensions' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_versions_agree():
    import importlib.metadata

    assert vpmm.__version__ == importlib.metadata.version("vpmm")


def test_a_pool_may_be_patient():
    pool = vpmm.Pool(patience=0.005, limit="64 MiB", addresses="256 MiB")
    pool.free(pool.malloc(1000))


def test_a_thread_maps_ahead_of_requests():
    pool = vpmm.Pool(background=0.001, ahead="32 MiB", addresses="1 GiB")
    pool.free(pool.malloc(4 << 20))
    end = time.monotonic() + 30
    while pool.statistics().mapped_bytes < 32 << 20 and time.monotonic() < end:
        time.sleep(0.001)
    assert pool.statistics().mapped_bytes >= 32 << 20


def test_devices_reach_each_others_pools():
    """The process's from the start, others where they are told. In a process with two devices."""
    program = """
import pytest
import vpmm

first = vpmm.Pool.of_process(0)
kept = first.malloc(8 << 20)
assert (first.access(0), first.access(1)) == ("read_write", "none")
second = vpmm.Pool.of_process(1)
assert first.access(1) == second.access(0) == "read_write"
own = vpmm.mr.PoolMemoryResource(addresses="1 GiB").pool
for access in ("read", "read_write", "none"):
    own.set_access(1, access)
    assert own.access(1) == access
own.set_access(1)
assert own.access(1) == "read_write"
with pytest.raises(ValueError, match="'write'; known: none, read, read_write"):
    own.set_access(1, "write")
with pytest.raises(vpmm.Error):
    own.set_access(0, "none")
with pytest.raises(vpmm.Error):
    own.access(2)
"""
    environment = os.environ | {"VPMM_DEVICE": "sim:1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_limit_may_be_lowered_and_raised_again():
    pool = vpmm.Pool(limit="64 MiB", addresses="1 GiB")
    pool.limit_to("16 MiB")
    with pytest.raises(vpmm.OutOfMemoryError, match="16 MiB"):
        pool.malloc(32 * MIB)
    pool.limit_to("1 TiB")
    with pytest.raises(vpmm.OutOfMemoryError, match="64 MiB"):
        pool.malloc(65 * MIB)
    pool.limit_to(0)
    with pytest.raises(vpmm.OutOfMemoryError):
        pool.malloc(1)
    pool.limit_to(None)
    pool.free(pool.malloc(32 * MIB))


def test_a_pool_s_own_memory_sleeps(tmp_path):
    # Of no other test: those of the process's pool last as long as it does.
    tag, pool = "a pool's own", vpmm.Pool(limit="64 MiB", addresses="1 GiB")
    other, asleep = pool.malloc(3 * MIB), pool.malloc(5 * MIB, tag=tag)
    assert pool.malloc(0, tag=tag) == 0
    for options in ({}, {"contents": "discard"}, {"path": tmp_path / "saved"}):
        held = pool.statistics().mapped_bytes
        returned = pool.suspend(tag, **options)
        assert returned >= 5 * MIB and pool.statistics().mapped_bytes == held - returned
        with pytest.raises(vpmm.StateError):
            pool.malloc(1, tag=tag)
        assert pool.resume(tag, empty=bool(options)) == returned
    with pytest.raises(vpmm.NotFoundError):
        pool.suspend("nobody has this tag")
    with pytest.raises(vpmm.NotFoundError):
        vpmm.suspend(tag)
    with pytest.raises(ValueError, match="contents"):
        pool.suspend(tag, contents="sell")
    pool.free(other)
    pool.free(asleep)


def test_a_pool_s_own_snapshot(tmp_path):
    pool = vpmm.Pool(addresses="1 GiB")
    main, tagged = pool.malloc(3 * MIB), pool.malloc(5 * MIB, tag="cache")
    made = pool.snapshot(tmp_path / "pool.pickle")
    live = {
        block["address"]: (block["size"], segment["heap"])
        for segment in made["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    assert live == {main: (3 * MIB, "main"), tagged: (5 * MIB, "tag cache")}
    assert made["device_traces"] == [[]]
    assert pickle.loads((tmp_path / "pool.pickle").read_bytes()) == made
    pool.free(main)
    pool.free(tagged)


MAKERS = [vpmm.Pool, vpmm.configure, vpmm.mr.PoolMemoryResource, _worker.Worker]


def test_a_second_device():
    program = """
import os
os.environ["VPMM_DEVICE"] = "sim:1"
import copy
import types
import vpmm.torch
from vpmm._library import address, answer, call, handle, lib
from vpmm._mem_pool import HeapMemPool
from vpmm._pool import _driver

pool = vpmm.Pool(1, addresses="1 GiB")
pointer = pool.malloc(1000)
made = pool.snapshot()
assert made["device_traces"] == [[], []] and {part["device"] for part in made["segments"]} == {1}
pool.free(pointer)

resource = vpmm.mr.CudaMemoryResource(device=1)
buffer = vpmm.DeviceBuffer.from_bytes(b"abc", mr=resource)
assert buffer.device == 1 and buffer.__dlpack_device__() == (2, 1) and buffer.to_bytes() == b"abc"
for copied in (copy.copy(buffer), copy.deepcopy([buffer])[0]):
    assert (copied.device, copied.mr) == (1, resource) and copied.ptr != buffer.ptr
    assert copied.to_bytes() == b"abc"
with vpmm.DeviceBuffer.from_bytes(b"abc", device=1) as of_pool, copy.copy(of_pool) as copied:
    assert copied.device == 1 and copied.to_bytes() == b"abc"
capsule = buffer.__dlpack__()
((_, managed, _),) = vpmm._dlpack._LENT.values()
assert (managed.tensor.device.type, managed.tensor.device.id) == (2, 1)

heaps = [HeapMemPool(device=device) for device in range(2)]
with heaps[1].using():
    kept = [vpmm.DeviceBuffer.from_bytes(b"abc", device=device) for device in range(2)]
assert [heap.statistics().live_count for heap in heaps] == [0, 1]
assert heaps[1].suspend() > 0 and heaps[1].resume() > 0
assert kept[1].to_bytes() == b"abc"

stream = address(answer("void *", lib.vpmm_stream_create, _driver(), 1))
vpmm.keep_stream(stream, device=1)
of_torch = types.SimpleNamespace(cuda_stream=stream, device=types.SimpleNamespace(index=1))
assert vpmm.torch.forget_stream(of_torch) and not vpmm.forget_stream(stream, device=1)
call(lib.vpmm_stream_destroy, _driver(), handle(stream))

held = [vpmm.statistics(device).mapped_bytes for device in range(2)]
vpmm.DeviceBuffer(64 << 20, device=1).free()
assert vpmm.trim(device=1) > 0 and vpmm.statistics(0).mapped_bytes == held[0]
assert vpmm.device_memory(1)[0] < vpmm.device_memory(1)[1] == vpmm.device_memory(0)[1]

# One that is dropped asleep wakes.
heaps[1].suspend()
heaps.clear()
assert kept[1].to_bytes() == b"abc"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_worker_that_has_ended_logs_no_more(tmp_path):
    program = """
import sys, vpmm
from vpmm._worker import Worker

worker = Worker(log=sys.argv[1], addresses="1 GiB")
worker.begin()
kept = vpmm.DeviceBuffer(1000)
assert type(kept.mr) is vpmm.mr.LoggingResourceAdaptor
worker.end("")
with vpmm.DeviceBuffer(1000) as buffer:
    assert type(buffer.mr) is vpmm.mr.PoolMemoryResource
"""
    log = tmp_path / "log.csv"
    subprocess.run([sys.executable, "-c", program, str(log)], check=True)
    assert (tmp_path / "log.dev0.csv").read_text().count("allocate") == 1


def test_trim_keeps_as_much_as_it_is_told():
    vpmm.trim()
    before = vpmm.statistics().mapped_bytes
    vpmm.DeviceBuffer(64 * MIB).free()
    held = vpmm.statistics().mapped_bytes
    assert held >= before + 64 * MIB
    assert vpmm.trim(f"{held} B") == 0 and vpmm.statistics().mapped_bytes == held
    assert vpmm.trim() > 0


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("name", "value", "profile"),
    [
        ("initial_pages", 1, "paged"),
        ("page_size", "2 MiB", "paged"),
        ("moves_per_second", 0, "default"),
        ("patience", 0, "default"),
        ("background", 0.01, "default"),
        ("ahead", "64 MiB", "default"),
    ],
)
def test_options_of_the_other_profile_are_refused_by_name(make, name, value, profile):
    other = {"paged": "default", "default": "paged"}[profile]
    with pytest.raises(ValueError, match=f"^{name} is of the {profile} profile"):
        make(profile=other, **{name: value})
    # What is not given is not refused.
    assert _pool._options(0, profile=other, **{name: 0 if name == "initial_pages" else None})
    assert _pool._options(0, profile=profile, **{name: value})


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", ["wait", "patience", "background"])
def test_a_time_that_none_can_be_is_refused_by_name(make, name):
    for time in (-1, -1e-9, float("-inf"), float("nan")):
        with pytest.raises(ValueError, match=f"^{name} cannot be {time}"):
            make(**{name: time})
    for count, profile in (("moves_per_second", "default"), ("initial_pages", "paged")):
        with pytest.raises(ValueError, match=f"^{count} cannot be -1"):
            make(profile=profile, **{count: -1})


def test_settings_of_a_job_leave_its_actors_profile_open():
    _worker.Worker.check(page_size="2 MiB")
    _worker.Worker.check(ahead="1 MiB", limit="1 GiB")
    for wrong in ({"ahead": 1, "page_size": "2 MiB"}, {"profile": "default", "initial_pages": 1}):
        with pytest.raises(ValueError, match="profile"):
            _worker.Worker.check(**wrong)


def test_each_option_reaches_the_library():
    given = {
        "limit": "1 GiB",
        "addresses": "2 GiB",
        "release_threshold": 5,
        "wait": 2,
        "prefer": "wait",
        "sharing": "fabric",
        "gpu_direct_rdma": True,
    }
    paged = {"profile": "paged", "initial_pages": 13, "page_size": "2 MiB"}
    default = {"profile": "default", "moves_per_second": 7, "patience": 0.5, "background": 0.25, "ahead": 11}
    assert {*given, *paged, *default} == {*vpmm.PoolOptions.__annotations__}

    def numbers(**options):
        made = _pool._options(3, **options)
        return {name: getattr(made, name) for name, _ in ffi.typeof(made[0]).fields if name != "size"}

    initial = {
        **dict.fromkeys(numbers(), 0),
        "device": 3,
        **dict.fromkeys(("release_threshold_bytes", "wait_nanoseconds", "patience_nanoseconds"), 2**64 - 1),
    }
    assert numbers() == initial
    both = {
        **initial,
        "limit_bytes": 1 << 30,
        "va_size_bytes": 2 << 30,
        "release_threshold_bytes": 5,
        "wait_nanoseconds": 2_000_000_000,
        "pending_policy": 2,
        "sharing": 2,
        "flags": 1,
    }
    assert numbers(**given, **paged) == {
        **both,
        "profile": 1,
        "initial_pages": 13,
        "page_size_bytes": 2 << 20,
    }
    assert numbers(**given, **default) == {
        **both,
        "moves_per_second": 7,
        "patience_nanoseconds": 500_000_000,
        "background_period_nanoseconds": 250_000_000,
        "background_ahead_bytes": 11,
    }
    # What stands for itself and not for the pool's own measure.
    least = numbers(limit=0, moves_per_second=0, background=0.0, wait=0, patience=0, release_threshold=0)
    assert (least["limit_bytes"], least["moves_per_second"]) == (1, 1)
    assert least["background_period_nanoseconds"] == 1
    assert least["wait_nanoseconds"] == least["patience_nanoseconds"] == 0
    assert least["release_threshold_bytes"] == 0
    # Longer than any number says.
    for longest in (1e12, float("inf"), 10**400):
        most = numbers(wait=longest, patience=longest, background=longest)
        for name in ("wait_nanoseconds", "patience_nanoseconds", "background_period_nanoseconds"):
            assert most[name] == 2**63
