"""The same requests to both servers have the same answers, to the byte but for allocations' names."""

import os
import random
import time

import pytest
from peers import Side, frame

MIB = 1 << 20
LOCKS = ("rw", "ro", "rw_or_ro", "rw_data_or_rw")


def handshake(lock, timeout_ms=None):
    return {"type": "handshake_request", "lock_type": lock, "timeout_ms": timeout_ms}


class Both:
    """Does everything twice and compares."""

    def __init__(self, servers):
        self.sides = [Side(servers.start("theirs"), keeps_open=True), Side(servers.start("ours"))]
        self.frames = 0

    def each(self, do, what):
        theirs, ours = (do(side) for side in self.sides)
        assert ours == theirs, what
        self.frames += len(theirs)
        return theirs

    def open(self, number, lock, timeout_ms=None, quiet=False):
        for side in self.sides:
            side.open(number)
        message = frame(handshake(lock, timeout_ms))
        return self.each(lambda side: side.say_bytes(number, message, quiet), (number, lock))

    def say(self, number, kind, **fields):
        message = {"type": kind, **fields}
        return self.each(lambda side: side.say(number, message), (number, message))

    def say_bytes(self, number, data):
        return self.each(lambda side: side.say_bytes(number, data), (number, data))

    def drop(self, number):
        for side in self.sides:
            side.drop(number)

    def settle(self, what, seconds=0.03):
        return self.each(lambda side: side.settle(seconds), what)

    def probe(self):
        self.each_in_the_end(lambda side: side.probe("get_runtime_state_request"), "runtime state")
        return self.each_in_the_end(lambda side: side.probe("get_event_history_request"), "events")

    def each_in_the_end(self, do, what):
        """A connection's end and a probe on another one after it may be noticed in either order."""
        deadline = time.monotonic() + 2
        while do(self.sides[0]) != do(self.sides[1]) and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.each(do, what)

    def close(self):
        for side in self.sides:
            side.close()


@pytest.fixture
def both(servers):
    sides = Both(servers)
    yield sides
    sides.close()


def test_a_layout_from_beginning_to_end(both):
    both.probe()
    both.open(1, "rw_or_ro")
    for size, tag in ((1, "weights"), (2 * MIB, "weights"), (3 * MIB, "é")):
        both.say(1, "allocate_request", size=size, tag=tag)
    both.say(1, "allocate_request", size=5)  # the tag's default
    for number in (0, 2, 99):
        for kind in ("export_allocation_request", "get_allocation_request"):
            both.say(1, kind, allocation_id=number)
    both.say(1, "list_allocations_request", tag="weights")
    both.say(1, "list_allocations_request")
    put = {"key": "a", "allocation_id": 0, "offset_bytes": 0, "value": b"\x00\xff"}
    for change in (
        {},
        {"offset_bytes": 2 * MIB - 1, "key": "b"},
        {"offset_bytes": 2 * MIB},
        {"offset_bytes": -1},
        {"allocation_id": 99},
        {"key": "é", "value": b""},
        {"key": "", "value": b"x" * 70_000, "allocation_id": 1},
        {"value": b"again"},
    ):
        both.say(1, "metadata_put_request", **{**put, **change})
    for key in ("a", "b", "", "é", "missing"):
        both.say(1, "metadata_get_request", key=key)
    both.say(1, "free_allocation_request", allocation_id=1)
    both.say(1, "free_allocation_request", allocation_id=1)
    both.say(1, "metadata_delete_request", key="b")
    both.say(1, "metadata_delete_request", key="b")
    both.say(1, "metadata_list_request", prefix="")
    both.say(1, "metadata_list_request", prefix="a")
    both.say(1, "get_memory_layout_hash_request")
    both.say(1, "get_allocation_state_request")
    both.say(1, "get_lock_state_request")
    both.probe()
    both.say(1, "commit_request")
    both.settle("the writer is sent away")
    both.drop(1)
    both.probe()
    for number in (2, 3):
        both.open(number, "ro")
    both.say(2, "get_memory_layout_hash_request")
    both.say(2, "list_allocations_request")
    both.say(2, "export_allocation_request", allocation_id=3)
    both.say(3, "metadata_list_request")
    both.say(3, "get_lock_state_request")
    both.probe()
    both.drop(2)
    both.drop(3)
    both.settle("readers leave")
    both.probe()
    both.open(4, "rw")
    both.say(4, "allocate_request", size=9, tag="new")
    both.drop(4)
    both.settle("a writer is void")
    both.probe()


def test_what_is_not_allowed_and_what_cannot_be_done(both):
    both.open(1, "rw")
    for size in (0, -1, -(1 << 62)):
        both.say(1, "allocate_request", size=size, tag="t")
    both.say(1, "allocate_request", size=4 * MIB, tag="t")
    both.say(1, "handshake_request", lock_type="ro", timeout_ms=None)
    both.say(1, "commit_response", success=True)
    both.say(1, "error_response", error="x")
    both.say(1, "get_runtime_state_request")
    both.say(1, "get_event_history_request")
    both.say(1, "commit_request")
    both.drop(1)
    both.open(2, "ro")
    for kind, fields in (
        ("allocate_request", {"size": 1}),
        ("free_allocation_request", {"allocation_id": 0}),
        ("metadata_put_request", {"key": "k", "allocation_id": 0, "offset_bytes": 0, "value": b""}),
        ("metadata_delete_request", {"key": "k"}),
        ("commit_request", {}),
        ("commit_layout_request", {}),
        ("handshake_response", {"success": True, "committed": True}),
        (
            "get_allocation_response",
            {"allocation_id": "x", "size": 1, "aligned_size": 1, "tag": "", "layout_slot": 0},
        ),
    ):
        both.say(2, kind, **fields)
    both.drop(2)
    for number, message in enumerate(
        (
            {"type": "commit_request"},
            {"type": "get_allocation_request", "allocation_id": "x"},
            {"type": "handshake_response", "success": True, "committed": False},
        ),
        start=10,
    ):
        for side in both.sides:
            side.open(number)
        both.say_bytes(number, frame(message))
        both.settle("no handshake")
        both.drop(number)
    both.probe()


def test_messages_that_cannot_be_read_end_the_session(both):
    number = 0
    for data in (
        frame({"type": "no_such_request"}),
        frame({"size": 3}),
        frame({"type": "allocate_request"}),
        frame({"type": "allocate_request", "size": "3"}),
        frame({"type": "allocate_request", "size": 3.5}),
        frame({"type": "allocate_request", "size": 3, "tag": None}),
        frame(
            {
                "type": "metadata_put_request",
                "key": "k",
                "allocation_id": "x",
                "offset_bytes": 0,
                "value": "text",
            }
        ),
        frame({"type": 3}),
        frame([1, 2]),
        b"\x00\x00\x00\x00",
        b"\x00\x00\x00\x01\xc1",
    ):
        number += 1
        both.open(number, "rw")
        both.say(number, "allocate_request", size=1)
        both.say_bytes(number, data)
        both.drop(number)
        both.settle("dropped")
        both.probe()
    # What only looks odd can be read.
    both.open(100, "rw")
    both.say_bytes(100, frame({"size": 7, "further": [1], "type": "allocate_request"}))
    both.say_bytes(
        100,
        frame({"type": "allocate_request", "size": 7.0, "tag": "x"})[:0]
        + frame({"type": "get_lock_state_request", "further": {"a": 1}}),
    )


def test_a_sealed_layout(both):
    both.open(1, "rw_data_or_rw")
    both.say(1, "allocate_request", size=4 * MIB, tag="kv_cache")
    both.say(1, "metadata_put_request", key="k", allocation_id=0, offset_bytes=1, value=b"v")
    both.say(1, "commit_layout_request")
    put = {"key": "k", "allocation_id": 0, "offset_bytes": 0, "value": b""}
    requests = (
        ("allocate_request", {"size": 1}),
        ("free_allocation_request", {"allocation_id": 0}),
        ("metadata_put_request", put),
        ("metadata_delete_request", {"key": "k"}),
        ("commit_layout_request", {}),
        ("commit_request", {}),
        ("export_allocation_request", {"allocation_id": 0}),
        ("metadata_get_request", {"key": "k"}),
        ("get_memory_layout_hash_request", {}),
        ("get_lock_state_request", {}),
    )
    for kind, fields in requests:
        both.say(1, kind, **fields)
    both.probe()
    both.drop(1)
    both.settle("it survives its writer")
    both.probe()
    both.open(2, "rw_data_or_rw")
    for kind, fields in requests:
        both.say(2, kind, **fields)
    both.drop(2)
    both.settle("and the next")
    both.open(3, "ro", timeout_ms=60)
    both.settle("readers have to wait", 0.2)
    both.open(4, "rw_or_ro")
    both.probe()
    both.drop(4)
    both.settle("replaced")
    both.probe()


def test_memory_runs_out(both):
    both.open(1, "rw")
    both.say(1, "allocate_request", size=100 << 30, tag="a")
    both.say(1, "allocate_request", size=(100 << 30) + 1, tag="b")
    both.say(1, "allocate_request", size=1, tag="c")
    both.say(1, "list_allocations_request")
    both.probe()


def test_frames_in_pieces_and_in_a_row(both):
    both.open(1, "rw")
    one = frame({"type": "allocate_request", "size": 1, "tag": "t"})
    for byte in one[:-1]:
        for side in both.sides:
            side.peers[1].send(bytes([byte]))
    both.say_bytes(1, one[-1:])
    row = b"".join([one, one, frame({"type": "list_allocations_request", "tag": None}), one])
    for side in both.sides:
        side.peers[1].send(row)
    both.settle("a row", 0.3)


@pytest.mark.parametrize("seed", range(int(os.environ.get("GMS_SEEDS", "12"))))
def test_random_sessions(both, seed):
    """Up to five connections that ask for anything. None closes while it waits for its lock: the
    Python server may grant it to one that has."""
    chance = random.Random(seed)
    waiting, live, made, next_number = set(), set(), 0, 0

    def took(number, notes):
        """What an answer to a handshake, or its lack, means."""
        texts = b"".join(data for data, _ in notes if data != "end")
        if any(data == "end" for data, _ in notes):
            waiting.discard(number)
            live.discard(number)
        elif b"handshake_response" in texts:
            waiting.discard(number)
            live.add(number)

    def settle(what):
        for number, notes in both.settle(what, 0.02).items():
            took(number, notes)

    for step in range(60):
        kind = chance.choice(["open", "drop"] + ["say"] * 8)
        if kind == "open" and len(waiting | live) < 5:
            next_number += 1
            waiting.add(next_number)
            lock = chance.choice(LOCKS)
            took(next_number, both.open(next_number, lock, quiet=True))
        elif kind == "drop" and live:
            number = chance.choice(sorted(live))
            live.discard(number)
            both.drop(number)
            settle(("drop", step))
        elif kind == "say" and live:
            number = chance.choice(sorted(live))
            which = chance.randrange(max(made, 1) + 1)
            key = chance.choice(["a", "ab", "b", "c/é", ""])
            name, fields = chance.choice(
                [
                    (
                        "allocate_request",
                        {"size": chance.choice([0, 1, 2 * MIB, 5 * MIB + 3]), "tag": chance.choice("xy")},
                    ),
                    ("allocate_request", {"size": chance.randrange(1, 9 * MIB), "tag": "weights"}),
                    ("export_allocation_request", {"allocation_id": which}),
                    ("get_allocation_request", {"allocation_id": which}),
                    ("list_allocations_request", {"tag": chance.choice([None, "x"])}),
                    ("free_allocation_request", {"allocation_id": which}),
                    (
                        "metadata_put_request",
                        {
                            "key": key,
                            "allocation_id": which,
                            "offset_bytes": chance.choice([0, 7, 2 * MIB, -3]),
                            "value": chance.randbytes(chance.randrange(40)),
                        },
                    ),
                    ("metadata_get_request", {"key": key}),
                    ("metadata_delete_request", {"key": key}),
                    ("metadata_list_request", {"prefix": key}),
                    ("get_memory_layout_hash_request", {}),
                    ("get_allocation_state_request", {}),
                    ("get_lock_state_request", {}),
                    ("commit_request", {}),
                    ("commit_layout_request", {}),
                ]
            )
            notes = both.say(number, name, **fields)
            made = len(both.sides[0].names.real)
            took(number, notes)
            if name == "commit_request":
                settle(("commit", step))
        both.probe()
    assert both.frames > 100
