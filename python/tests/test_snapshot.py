"""Snapshots and history."""

import json
import os
import pickle
import pickletools

import pytest

import vpmm
from vpmm import _snapshot


@pytest.fixture(autouse=True)
def no_history():
    yield
    vpmm.record_history(0)


def test_a_history_that_cannot_be_leaves_the_one_that_is():
    vpmm.record_history(10)
    vpmm.DeviceBuffer(1000).free()
    for wrong, error in ((-1, ValueError), (1 << 80, ValueError), ("10", TypeError)):
        with pytest.raises(error):
            vpmm.record_history(wrong)
    events = vpmm.snapshot()["device_traces"][0]
    assert len(events) == len(_WHOLE) and all(event["frames"] for event in events)
    vpmm.record_history(0)
    with pytest.raises(ValueError, match=str(1 << 80)):
        vpmm.record_history(1 << 80)
    assert not _snapshot.has_places()


_WHOLE = ("alloc", "free_requested", "free_completed")


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


def test_what_waits_for_further_streams_is_pending_free(make_stream):
    buffer = vpmm.DeviceBuffer(3 << 20)
    address = buffer.ptr
    buffer.record_stream(make_stream())
    active = sum(segment["active_size"] for segment in vpmm.snapshot()["segments"])
    buffer.free()
    made = vpmm.snapshot()
    block = blocks_of(made)[address]
    assert (block["state"], block["vpmm_state"]) == ("active_pending_free", "deferred")
    # As PyTorch counts it: active, and allocated no more.
    assert sum(segment["active_size"] for segment in made["segments"]) == active
    assert sum(segment["allocated_size"] for segment in made["segments"]) == active - (3 << 20)
    now = vpmm.statistics()
    assert now.pending_bytes >= now.deferred_bytes == 3 << 20


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
        ("free_requested", address, 5120),
        ("free_completed", address, 5120),
        ("oom", None, 1 << 50),
    ]
    assert events[4]["device_free"] >= 0
    assert [event["time_us"] for event in events] == sorted(event["time_us"] for event in events)
    names = [frame["name"] for frame in events[0]["frames"]]
    assert names[:2] == ["make_and_keep", "test_history_says_what_was_done_and_where"]
    assert events[0]["frames"][0]["filename"] == __file__
    block = blocks_of(made)[kept.ptr]
    assert block["requested_size"] == 100_000 and block["frames"] == events[0]["frames"]
    # Of what is free nothing is told.
    freed = blocks_of(made)[address]
    assert freed["vpmm_state"] != "live" and not freed["frames"]
    kept.free()


def test_a_block_is_of_whoever_made_it_last():
    vpmm.record_history(1000)
    first = vpmm.DeviceBuffer(3 << 20)
    address = first.ptr
    first.free()
    second = make_and_keep((3 << 20) - 100)
    assert second.ptr == address
    block = blocks_of(vpmm.snapshot())[address]
    assert block["requested_size"] == (3 << 20) - 100 and block["frames"][0]["name"] == "make_and_keep"
    second.free()


def test_the_innermost_frames_are_told():
    def down(depth):
        if depth:
            down(depth - 1)
        else:
            vpmm.DeviceBuffer(1).free()

    vpmm.record_history(10)
    down(100)
    (events,) = vpmm.snapshot()["device_traces"]
    assert [frame["name"] for frame in events[0]["frames"]] == ["down"] * 64


def test_what_is_not_mapped_any_more():
    segments = [{"address": address, "total_size": 10} for address in (50, 0, 20)]

    def unmapped(*blocks):
        events = [{"addr": begin, "size": end - begin} for begin, end in blocks]
        return list(_snapshot._unmapped([*events, {"addr": None, "size": 7}, {"size": 7}], segments))

    assert unmapped() == unmapped((1, 9), (20, 30)) == []
    # Beside a segment, around one, behind all of them.
    assert unmapped((10, 20), (30, 35)) == [(10, 20), (30, 35)]
    assert unmapped((5, 55), (60, 70)) == [(10, 20), (30, 50), (60, 70)]
    # Once only, whoever was there.
    assert unmapped((12, 18), (12, 15), (14, 22), (12, 14)) == [(12, 14), (14, 15), (15, 18), (18, 20)]


def test_frames_of_modules_whose_names_begin_like_the_package():
    beside = os.path.dirname(vpmm.__file__) + "_tools.py"
    names = {"vpmm": vpmm}
    exec(compile("def made_beside(): vpmm.DeviceBuffer(1).free()", beside, "exec"), names)
    vpmm.record_history(10)
    names["made_beside"]()
    (events,) = vpmm.snapshot()["device_traces"]
    vpmm.record_history(0)
    assert events[0]["frames"][0]["name"] == "made_beside"


def test_only_the_last_events_are_kept():
    vpmm.record_history(4, frames=False)
    for size in range(1, 11):
        vpmm.DeviceBuffer(size).free()
    (events,) = vpmm.snapshot()["device_traces"]
    assert [event["action"] for event in events] == [*_WHOLE] * 2
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
    # To just behind where those of before are dropped.
    for at in range(4960):
        made = {"vpmm": vpmm}
        exec(compile(f"def made_{at}(): vpmm.DeviceBuffer(1).free()\nmade_{at}()", "made", "exec"), made)
    (events,) = vpmm.snapshot()["device_traces"]
    assert [event["frames"][0]["name"] for event in events[::3]] == [f"made_{at}" for at in range(4910, 4960)]
    assert len(_snapshot._places.by_number()) < 3000


def test_what_is_unmapped_is_told_last():
    vpmm.trim()
    vpmm.record_history(1000)
    kept = [vpmm.DeviceBuffer(4 << 20) for _ in range(8)]
    addresses = [(buffer.ptr, buffer.ptr + buffer.size) for buffer in kept]
    del kept
    vpmm.trim()
    made = vpmm.snapshot()
    (events,) = made["device_traces"]
    told = [event["action"] == "segment_unmap" for event in events]
    assert any(told) and told == sorted(told)
    # The page looks for each block in a segment that there was.
    mapped = [(segment["address"], segment["total_size"]) for segment in made["segments"]]
    mapped += [(event["addr"], event["size"]) for event in events if event["action"] == "segment_unmap"]
    for begin, end in addresses:
        assert sum(max(0, min(end, at + size) - max(begin, at)) for at, size in mapped) == end - begin


#: What PyTorch's page can read of a pickle: torch/utils/viz/MemoryViz.js.
_READ_BY_THE_PAGE = {
    *("PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "LIST", "APPEND", "APPENDS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"),
}


def a_past(tmp_path):
    """A file of what was done with frames, on two heaps, with failures and what is unmapped again."""
    vpmm.record_history(10_000)
    kept = [make_and_keep(size) for size in (100, 5000, 3 << 20, 100 << 20)]
    with vpmm.tag('a tag with a quote " and ünicode'):
        kept.append(make_and_keep(1 << 20))
    for size in range(1, 500):
        make_and_keep(size * 1000)
    with pytest.raises(MemoryError):
        vpmm.DeviceBuffer(1 << 50)
    del kept[1]
    vpmm.trim()
    file = tmp_path / "pool.pickle"
    vpmm.snapshot(file)
    return file, kept


def test_pytorch_s_page_reads_it(tmp_path):
    file, kept = a_past(tmp_path)
    for code, argument, _ in pickletools.genops(file.read_bytes()):
        assert code.name in _READ_BY_THE_PAGE
        # Its numbers are floating-point ones.
        assert not isinstance(argument, int) or abs(argument) < 1 << 53
    del kept


def test_pytorch_s_own_tools_read_it(tmp_path):
    viz = pytest.importorskip("torch.cuda._memory_viz")
    file, kept = a_past(tmp_path)
    made = pickle.loads(file.read_bytes())
    for function in (viz.segments, viz.memory):
        lines = function(made, format_flamegraph=lambda text: text).splitlines()
        assert any("active_allocated;" in line and "make_and_keep" in line for line in lines)
        for line in lines:
            assert line.rsplit(" ", 1)[1].isdecimal()
    live = sum(buffer.size for buffer in kept)
    assert f"total_allocated: {viz.Bytes(live)}" in viz.segsum(made)
    assert "raise OutOfMemoryError" in viz.trace(made)
    same = viz.compare(made["segments"], made["segments"], format_flamegraph=lambda text: text)
    assert same == ""
    for page in (viz.trace_plot(made), viz.trace_plot(made, plot_segments=True), viz.segment_plot(made)):
        assert "MemoryViz.js" in page
    viz.trace_plot(made, filter_freed=True)
    left = [event["action"] for event in made["device_traces"][0]]
    assert left.count("alloc") == len(kept)
    assert {*left} <= {"alloc", "oom", "segment_unmap"}
    del kept
