"""Snapshots and history."""

import json
import pickle
import pickletools

import pytest

import vpmm
from vpmm import _snapshot


@pytest.fixture(autouse=True)
def no_history():
    yield
    vpmm.record_history(0)


def blocks_of(made):
    return {block["address"]: block for segment in made["segments"] for block in segment["blocks"]}


def make_and_keep(size):
    return vpmm.DeviceBuffer(size)


def test_it_has_what_pytorch_s_has():
    kept = vpmm.DeviceBuffer(3 << 20)
    made = vpmm.snapshot()
    assert set(made) >= {"segments", "device_traces", "allocator_settings", "external_annotations"}
    block = blocks_of(made)[kept.ptr]
    assert block["state"] == "active_allocated" and block["size"] == 3 << 20
    now = vpmm.statistics()
    assert sum(segment["total_size"] for segment in made["segments"]) == now.mapped_bytes
    assert sum(segment["allocated_size"] for segment in made["segments"]) == now.live_bytes
    for segment in made["segments"]:
        assert segment["segment_type"] in ("small", "large")
        assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    assert made["device_traces"] == [[]]
    kept.free()
    # It may be one with what was free beside it.
    around = [
        other["state"]
        for other in blocks_of(vpmm.snapshot()).values()
        if other["address"] <= block["address"] < other["address"] + other["size"]
    ]
    assert around == ["inactive"]


def test_history_says_what_was_done_and_where():
    vpmm.record_history(1000)
    kept, gone = make_and_keep(100_000), vpmm.DeviceBuffer(5000)
    address = gone.ptr
    gone.free()
    with pytest.raises(MemoryError):
        vpmm.DeviceBuffer(1 << 50)
    made = vpmm.snapshot()
    (events,) = made["device_traces"]
    seen = [(event["action"], event.get("addr"), event["size"]) for event in events]
    assert seen == [
        ("alloc", kept.ptr, 100_000),
        ("alloc", address, 5000),
        ("free_completed", address, 5120),
        ("oom", None, 1 << 50),
    ]
    assert events[3]["device_free"] >= 0
    assert [event["time_us"] for event in events] == sorted(event["time_us"] for event in events)
    names = [frame["name"] for frame in events[0]["frames"]]
    assert names[:2] == ["make_and_keep", "test_history_says_what_was_done_and_where"]
    assert events[0]["frames"][0]["filename"] == __file__
    block = blocks_of(made)[kept.ptr]
    assert block["requested_size"] == 100_000 and block["frames"] == events[0]["frames"]
    kept.free()


def test_only_the_last_events_are_kept():
    vpmm.record_history(4, frames=False)
    for size in range(1, 11):
        vpmm.DeviceBuffer(size).free()
    (events,) = vpmm.snapshot()["device_traces"]
    assert [event["action"] for event in events] == ["alloc", "free_completed"] * 2
    assert [event["size"] for event in events if event["action"] == "alloc"] == [9, 10]
    assert all(event["frames"] == [] for event in events)
    vpmm.record_history(0)
    vpmm.DeviceBuffer(1).free()
    assert vpmm.snapshot()["device_traces"] == [[]]


def test_files(tmp_path):
    kept = vpmm.DeviceBuffer(1 << 20)
    vpmm.snapshot(tmp_path / "pool.json")
    made = vpmm.snapshot(tmp_path / "pool.pickle")
    data = (tmp_path / "pool.pickle").read_bytes()
    assert pickle.loads(data) == made
    protocols = [argument for code, argument, _ in pickletools.genops(data) if code.name == "PROTO"]
    assert protocols == [4]
    written = json.loads((tmp_path / "pool.json").read_text())
    assert blocks_of(written) == blocks_of(made)
    kept.free()


def test_stacks_of_calls_are_kept_as_long_as_their_events():
    vpmm.record_history(100)
    for at in range(5000):
        made = {"vpmm": vpmm}
        exec(compile(f"def made_{at}(): vpmm.DeviceBuffer(1).free()\nmade_{at}()", "made", "exec"), made)
    (events,) = vpmm.snapshot()["device_traces"]
    assert [event["frames"][0]["name"] for event in events[::2]] == [f"made_{at}" for at in range(4950, 5000)]
    assert len(_snapshot._places.by_number()) < 3000
