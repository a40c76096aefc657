"""What a part of a program holds at most."""

import asyncio
import subprocess
import sys
import threading
import types

import pytest

import vpmm
from vpmm import _pool

MIB = 1 << 20


@pytest.fixture(autouse=True)
def clean():
    vpmm.forget_records()
    vpmm.reset_peaks()
    yield
    vpmm.forget_records()


def hold(size):
    vpmm.DeviceBuffer(size).free()


def found(name):
    (record,) = [record for record in vpmm.records() if record.name == name]
    return record


def test_blocks_inside_each_other():
    kept = vpmm.DeviceBuffer(2 * MIB)
    with vpmm.profile("outer"):
        hold(5 * MIB)
        with vpmm.profile("inner"):
            hold(3 * MIB)
        with vpmm.profile("inner"):
            hold(1 * MIB)
    assert found("outer").peak_bytes == 5 * MIB and found("outer").calls == 1
    assert found("inner").peak_bytes == 3 * MIB and found("inner").calls == 2
    assert found("inner").kept_bytes == 0
    assert found("outer").peak_held_bytes >= 7 * MIB
    # The pool's own peak is of the whole time.
    assert vpmm.statistics().peak_live_bytes == 7 * MIB
    vpmm.reset_peaks()
    assert vpmm.statistics().peak_live_bytes == 2 * MIB
    del kept
    assert "inner" in vpmm.report() and "outer" in vpmm.report()


def test_the_most_that_was_held_is_of_all_calls():
    for size in (40 * MIB, MIB):
        vpmm.trim()
        with vpmm.profile("calls"):
            hold(size)
    assert found("calls").peak_held_bytes >= 40 * MIB


def test_blocks_that_have_ended_are_forgotten():
    for _ in range(3):
        with vpmm.profile("again"):
            pass
    # That of all time.
    assert len(_pool.Peaks._open[0]) == 1


def test_functions_that_call_themselves():
    @vpmm.profile("down")
    def down(depth):
        """Goes down."""
        buffer = vpmm.DeviceBuffer(MIB)
        if depth:
            down(depth - 1)
        return buffer.size

    assert down(3) == MIB and down.__doc__ == "Goes down."
    assert found("down").calls == 4 and found("down").peak_bytes == 4 * MIB
    assert found("down").kept_bytes == 0


def test_what_is_kept_and_what_fails_counts():
    kept = []

    @vpmm.profile()
    def keep():
        kept.append(vpmm.DeviceBuffer(MIB))
        if len(kept) == 3:
            raise KeyError

    keep()
    keep()
    with pytest.raises(KeyError):
        keep()
    (record,) = vpmm.records()
    assert record.name.endswith("keep") and record.calls == 3 and record.kept_bytes == 3 * MIB
    kept.clear()


def test_resetting_inside_a_block():
    with vpmm.profile("block"):
        hold(4 * MIB)
        vpmm.reset_peaks()
        assert vpmm.statistics().peak_live_bytes < 4 * MIB
        hold(1 * MIB)
    assert found("block").peak_bytes == 4 * MIB


def test_threads():
    def work():
        for _ in range(20):
            with vpmm.profile("threads"):
                hold(MIB)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # What each thread's front held least counts at its own time, so the sum may be more than 4 MiB.
    assert found("threads").calls == 80 and MIB <= found("threads").peak_bytes <= 80 * MIB
    assert found("threads").kept_bytes <= 80 * 4 * MIB


def test_small_requests_of_the_paged_profile():
    program = """
import vpmm
vpmm.configure(profile="paged", addresses="1 GiB")
pool = vpmm.Pool.of_process()
for pointer in [pool.malloc(1000) for _ in range(3000)]:
    pool.free(pointer)
pool.trim()
peak = vpmm.statistics().peak_small_mapped_bytes
assert peak >= 3_000_000
# A GPU's driver may keep a piece of its pool.
stays = vpmm.statistics().small_mapped_bytes
with vpmm.profile("nothing"):
    pass
# As of the whole time.
assert vpmm.statistics().peak_small_mapped_bytes == peak
with vpmm.profile("kept"):
    kept = [pool.malloc(1000) for _ in range(3000)]
nothing, kept = vpmm.records()
assert (nothing.peak_bytes, nothing.kept_bytes, nothing.peak_held_bytes) == (0, 0, stays), nothing
assert kept.peak_bytes == kept.kept_bytes >= 3_000_000 and kept.peak_held_bytes >= 3_000_000, kept
vpmm.reset_peaks()
assert vpmm.statistics().peak_small_mapped_bytes == vpmm.statistics().small_mapped_bytes
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_coroutines_and_generators():
    @vpmm.profile("coroutine")
    async def coroutine():
        buffer = vpmm.DeviceBuffer(3 * MIB)
        await asyncio.sleep(0)
        return buffer.size

    @vpmm.profile("generator")
    def generator():
        buffer = vpmm.DeviceBuffer(5 * MIB)
        got = yield buffer.size
        return got

    @vpmm.profile("awaitable")
    @types.coroutine
    def awaitable():
        buffer = vpmm.DeviceBuffer(2 * MIB)
        yield
        return buffer.size

    async def awaits():
        return await awaitable()

    assert asyncio.run(coroutine()) == 3 * MIB
    assert asyncio.run(awaits()) == 2 * MIB and found("awaitable").peak_bytes == 2 * MIB
    assert found("coroutine").peak_bytes == 3 * MIB and found("coroutine").kept_bytes == 0
    assert list(generator()) == [5 * MIB]
    assert found("generator").peak_bytes == 5 * MIB and found("generator").calls == 1
    with pytest.raises(TypeError, match="asynchronous generator"):

        @vpmm.profile()
        async def refused():
            yield
