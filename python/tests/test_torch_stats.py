"""What PyTorch's questions are answered with, as far as it can be seen without a GPU."""

import dataclasses
import subprocess
import sys

import pytest

import vpmm
import vpmm.torch
from vpmm import _pool

MIB = 1 << 20

#: PyTorch's `memory_stats`, in its 2.11: of three kinds of memory, of all together, and numbers.
_OF_KINDS = {
    *("allocation", "segment", "active", "inactive_split"),
    *("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes"),
}
_OF_ALL = {"oversize_allocations", "oversize_segments"}
_NUMBERS = {
    *("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free"),
    "max_split_size",
}
_KINDS = {"all", "large_pool", "small_pool"}


def check(stats):
    assert stats.keys() == _OF_KINDS | _OF_ALL | _NUMBERS
    assert all(isinstance(stats[name], int) for name in _NUMBERS)
    for name in _OF_KINDS:
        assert stats[name].keys() == _KINDS
    for figures in [stats[name] for name in _OF_ALL] + [
        stats[name][kind] for name in _OF_KINDS for kind in _KINDS
    ]:
        assert figures.keys() == {"current", "peak", "allocated", "freed"}
        assert figures["allocated"] - figures["freed"] == figures["current"] >= 0
        assert figures["allocated"] >= figures["peak"] >= figures["current"]
    for name in _OF_KINDS:
        both = [stats[name][kind]["current"] for kind in ("large_pool", "small_pool")]
        assert stats[name]["all"]["current"] == sum(both)


def test_all_that_pytorch_has_is_there():
    pool = vpmm.Pool(addresses="1 GiB")
    first, second = pool.malloc(3 * MIB), pool.malloc(5 * MIB)
    pool.free(second)
    stats = vpmm.torch._nested(pool.statistics())
    check(stats)
    bytes_now = stats["allocated_bytes"]["all"]
    assert (bytes_now["current"], bytes_now["peak"]) == (3 * MIB, 8 * MIB)
    assert stats["allocation"]["all"]["current"] == 1
    assert stats["reserved_bytes"]["all"]["current"] == pool.statistics().mapped_bytes
    assert stats["segment"]["all"]["allocated"] == stats["num_device_alloc"] > 0
    pool.free(first)
    pool.trim()
    stats = vpmm.torch._nested(pool.statistics())
    check(stats)
    assert stats["num_device_free"] == stats["num_device_alloc"]


def test_what_is_made_of_the_pool_s_numbers():
    now = dataclasses.replace(
        _pool.NOTHING,
        live_bytes=3,
        pending_bytes=5,
        deferred_bytes=1,
        idle_bytes=7,
        cached_bytes=11,
        extent_count=2,
    )
    stats = vpmm.torch._nested(dataclasses.replace(now, extents_created=6))
    check(stats)
    assert stats["active_bytes"]["all"]["current"] == 4
    assert stats["inactive_split_bytes"]["all"]["current"] == 22
    assert (stats["num_device_alloc"], stats["num_device_free"]) == (6, 4)
    held = dict(mapped_bytes=10, peak_mapped_bytes=20, small_mapped_bytes=5, peak_small_mapped_bytes=6)
    stats = vpmm.torch._nested(dataclasses.replace(now, **held))
    check(stats)
    assert (stats["reserved_bytes"]["all"]["current"], stats["reserved_bytes"]["all"]["peak"]) == (15, 26)


@pytest.mark.parametrize("profile", ["default", "paged"])
def test_what_is_active_is_what_snapshots_have_so(make_stream, profile):
    pool = vpmm.Pool(profile=profile, addresses="1 GiB")
    own, further = make_stream(), make_stream()
    kept, used, freed = (pool.malloc(size * MIB, own) for size in (4, 6, 8))
    pool.record_stream(used, further)
    pool.free(used, own)
    pool.free(freed, own)
    now = pool.statistics()
    assert now.pending_bytes + now.cached_bytes > now.deferred_bytes == 6 * MIB
    active = sum(segment["active_size"] for segment in pool.snapshot()["segments"])
    stats = vpmm.torch._nested(now)
    check(stats)
    assert stats["active_bytes"]["all"]["current"] == active == 10 * MIB
    assert stats["inactive_split_bytes"]["all"]["current"] >= 8 * MIB
    pool.free(kept, own)


def test_small_requests_of_the_paged_profile_are_in_the_peak():
    pool = vpmm.Pool(profile="paged", addresses="1 GiB")
    small = [pool.malloc(1000) for _ in range(10)]
    assert pool.statistics().small_live_count == 10
    stats = vpmm.torch._nested(pool.statistics())
    check(stats)
    assert stats["allocated_bytes"]["small_pool"]["current"] >= 10_000
    assert stats["allocation"]["small_pool"]["current"] == 10
    for pointer in small:
        pool.free(pointer)
    check(vpmm.torch._nested(pool.statistics()))


def test_pytorch_s_own_functions_find_what_they_ask_for():
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C, "_cuda_customAllocator"):
        pytest.skip("a PyTorch without CUDA")
    program = """
import torch, vpmm, vpmm.torch
vpmm.torch.use(limit="1 GiB", addresses="4 GiB")
# As if there were a GPU: the pool is the simulated device's.
torch.cuda.is_initialized = torch.cuda.memory.is_initialized = lambda: True
kept = vpmm.DeviceBuffer(3 << 20)
gone = vpmm.DeviceBuffer(5 << 20)
gone.free()
stats = torch.cuda.memory_stats(0)
assert stats["allocated_bytes.all.current"] == torch.cuda.memory_allocated(0) == 3 << 20
assert torch.cuda.max_memory_allocated(0) == 8 << 20
assert torch.cuda.memory_reserved(0) == vpmm.statistics().mapped_bytes
for is_abbreviated in (False, True):
    text = torch.cuda.memory_summary(0, abbreviated=is_abbreviated)
    assert "| Allocated memory      |   3072 KiB |   8192 KiB |" in text, text
torch.cuda.reset_peak_memory_stats(0)
torch.cuda.reset_accumulated_memory_stats(0)
assert torch.cuda.max_memory_allocated(0) == 3 << 20
if hasattr(torch, "accelerator") and hasattr(torch.accelerator, "memory_allocated"):
    assert torch.accelerator.memory_allocated(0) == 3 << 20
    assert torch.accelerator.max_memory_reserved(0) == torch.cuda.max_memory_reserved(0)
    torch.accelerator.reset_peak_memory_stats(0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_no_pool_is_made_for_a_question():
    """Programs that watch all devices ask each process about each."""
    torch_s = """
import os
os.environ["VPMM_DEVICE"] = "sim:1"
import sys, types
cuda, torch = types.ModuleType("torch.cuda"), types.ModuleType("torch")
torch.cuda, cuda.memory = cuda, types.ModuleType("torch.cuda.memory")
cuda.is_initialized, cuda.memory_stats = lambda: True, len
sys.modules.update({"torch": torch, "torch.cuda": cuda, "torch.cuda.memory": cuda.memory})
import vpmm, vpmm.torch
"""
    program = """
vpmm.torch._answer_questions()
with vpmm.DeviceBuffer(1000, device=1):
    now = [cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"] for device in range(2)]
    assert now[0] == {"current": 0, "peak": 0, "allocated": 0, "freed": 0} and now[1]["current"] == 1024, now
cuda.reset_peak_memory_stats(0)
cuda.reset_peak_memory_stats(1)
assert cuda.memory_stats_as_nested_dict(1)["allocated_bytes"]["all"]["peak"] == 0
# As PyTorch counts what it throws.
assert cuda.memory_stats_as_nested_dict(1)["num_ooms"] == 0
failed = {0: 2, 1: 3}
vpmm.torch._failed_requests = failed.get
assert cuda.memory_stats_as_nested_dict(1)["num_ooms"] == 3
cuda.reset_accumulated_memory_stats(1)
failed[1] += 1
assert [cuda.memory_stats_as_nested_dict(device)["num_ooms"] for device in range(2)] == [2, 1]
vpmm.configure(0, limit="1 GiB")   # refused where the pool was made
"""
    subprocess.run([sys.executable, "-c", torch_s + program], check=True)
