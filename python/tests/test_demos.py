"""What the demos are measured by, with a workload that needs neither PyTorch nor a GPU."""

import collections
import gzip
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import types

import pytest

import vpmm

DEMOS = pathlib.Path(__file__).parents[1] / "demos"
sys.path.insert(0, str(DEMOS))

import busy
import held
import ratios
import record
import rounds
import workload

STAND_IN = str(pathlib.Path(__file__).with_name("stand_in.py"))
MIB = 1 << 20


def compare(tmp_path, *arguments):
    """What it prints, what it writes, and how it ends."""
    output = tmp_path / "out.jsonl"
    command = [sys.executable, str(DEMOS / "compare.py"), "--output", str(output), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert not ran.stderr, ran.stderr
    return ran.stdout, list(map(json.loads, output.read_text().splitlines())), ran.returncode


@pytest.mark.parametrize(
    ("allocator", "expected"), [("torch", None), ("expandable", "expandable_segments:True"), ("vpmm", None)]
)
def test_settings_of_pytorch_s_allocator_are_those_that_are_named(monkeypatch, allocator, expected):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "backend:cudaMallocAsync")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # Whether PyTorch is there or not.
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError):
        workload.choose(types.SimpleNamespace(allocator=allocator))
    assert os.environ.get("PYTORCH_ALLOC_CONF") is None
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == expected


# Without what needs PyTorch, whether it is there or not.
IN_ROUNDS = ["--rounds", "6", "--turn-seconds", "0.01", "--profile", "0", "--where", "0", STAND_IN]


def test_turns_come_one_after_another(tmp_path):
    log = tmp_path / "log"
    text, lines, status = compare(tmp_path, "--moves-per-second", "600", *IN_ROUNDS, "--", "--log", str(log))
    assert status == 0, text
    *results, summary = lines
    assert [result["allocator"] for result in results] == ["torch", "expandable", "vpmm"]
    assert len({(result["losses"], result["steps"]) for result in results}) == 1
    steps = summary["turn_steps"]
    assert steps >= 1 and all(result["steps"] == 2 + 6 * steps for result in results)
    # Of three that take turns each has a third of the time.
    assert results[2]["moves_per_second"] == 200
    assert len(summary["rounds_s"]) == 6
    for peer in ("torch", "expandable"):
        summed = summary["ratios"]["vpmm"][peer]
        assert summed["count"] == 6 and 0.2 < summed["median"] < 0.95, text
    assert "losses are the same to the bit" in text
    assert "the best of the others" in text
    assert summary["busy"] is None and summary["where"] is None

    stretches = sorted(
        (float(begin), float(end), name, int(number))
        for name, number, begin, end in map(str.split, log.read_text().splitlines())
    )
    assert all(one[1] <= next_[0] for one, next_ in itertools.pairwise(stretches))
    turns = [
        (name, [number for *_, number in group])
        for name, group in itertools.groupby(stretches, lambda stretch: stretch[2])
    ]
    # Turns of one side by side, at the end of a round and the begin of the next, are one here.
    done = {name: [] for name in ("torch", "expandable", "vpmm")}
    for name, numbers in turns:
        done[name] += numbers
    assert all(numbers == list(range(2 + 6 * steps)) for numbers in done.values())


def test_the_same_steps_again_and_again(tmp_path):
    # Of a cycle of three the second takes long, of which nobody knows but the numbers that are drawn.
    log = tmp_path / "log"
    text, lines, status = compare(
        tmp_path, "--cycle", "3", *IN_ROUNDS, "--", "--draw", "4", "--log", str(log)
    )
    assert status == 0, text
    summary = lines[-1]
    assert summary["turn_steps"] == 3
    told = summary["undisturbed"]
    assert told["rounds"] == 6 and set(told["ratios"]) == {"torch", "expandable"}
    for peer in told["ratios"].values():
        assert 0.2 < peer["ratio"] < 0.95 and len(peer["quarters"]) == 4, text
    assert "each step at its fastest of 6 rounds" in text
    assert set(summary["processor"]) == {"torch", "expandable"}
    assert "time of the processor: vpmm / torch = " in text
    # Every turn drew the same.
    ours = [line.split() for line in log.read_text().splitlines() if line.startswith("vpmm")]
    drawn = [number for *_, number in ours]
    assert len(drawn) == 6 + 6 * 3 and drawn == drawn[:3] * 8 and len(set(drawn[:3])) > 1


def test_each_step_at_its_fastest():
    made = [{"vpmm": {"gaps_ms": [3, 1]}, "torch": {"gaps_ms": [2, 4]}}] * 3
    made += [{"vpmm": {"gaps_ms": [1, 9]}, "torch": {"gaps_ms": [7, 2]}}]
    told = rounds.undisturbed(made, "vpmm")
    assert told["ratios"] == {"torch": {"ratio": 2 / 4, "quarters": [4 / 6, 4 / 6, 4 / 6, 10 / 9]}}
    assert told["step_ms"] == {"vpmm": 1, "torch": 2}


def test_one_that_is_measured_twice_says_what_is_noise(tmp_path):
    text, lines, status = compare(tmp_path, "--allocators", "torch,torch,vpmm", *IN_ROUNDS)
    assert status == 0, text
    assert list(lines[-1]["ratios"]) == ["vpmm", "torch#2"]
    assert list(lines[-1]["ratios"]["torch#2"]) == ["torch"]
    assert [line["label"] for line in lines[:-1]] == ["torch", "torch#2", "vpmm"]


def test_settings_of_the_pool_are_compared_with_none(tmp_path):
    names = "torch,vpmm,vpmm:patience=0;wait=0.5;prefer=grow"
    text, lines, status = compare(tmp_path, "--allocators", names, *IN_ROUNDS)
    assert status == 0, text
    *results, summary = lines
    assert [line["label"] for line in results] == names.split(",")
    told = [line.get("settings") for line in results]
    assert told == [None, None, {"patience": 0, "wait": 0.5, "prefer": "grow"}]
    assert set(summary["ratios"]["vpmm"]) == {"torch", names.split(",")[2]}
    assert "the best of the others, torch, =" in text
    text, lines, status = compare(tmp_path, "--allocators", "torch,vpmm:wait=1", STAND_IN)
    assert status == 0 and "held by vpmm:wait=1 / allocated" in text


@pytest.mark.parametrize(
    "what, said",
    [
        ("end", "vpmm: it ended\nthis one has had enough"),
        ("no memory", "vpmm: at step 5: no memory for this one"),
        ("differ", "losses differ"),
    ],
)
def test_what_goes_wrong_is_told(tmp_path, what, said):
    text, lines, status = compare(tmp_path, *IN_ROUNDS, "--", "--at", "5", "--what", what)
    assert status == 1
    assert said in text
    assert lines


def test_one_run_after_another(tmp_path):
    text, lines, status = compare(tmp_path, "--repeat", "2", STAND_IN)
    assert status == 0, text
    names = [line["allocator"] for line in lines]
    assert names == ["torch", "expandable", "vpmm", "expandable", "vpmm", "torch"]
    assert all(line["steps"] == 6 and 1 < line["step_ms"] < 1000 for line in lines)
    # The GPU of the stand-in has done its work when the host has.
    assert all(line["caught_up"] == 1 for line in lines)
    text, lines, status = compare(tmp_path, STAND_IN, "--", "--at", "3", "--what", "no memory")
    assert status == 1 and "out of memory at step 3" in text


@pytest.mark.parametrize(
    "command, said",
    [
        (["compare.py", "--output", "{folder}/missing/out", STAND_IN], "No such file"),
        (["compare.py", "--output", "{folder}", STAND_IN], "Is a directory"),
        ([STAND_IN, "--record", "{folder}/missing/log.csv.gz"], "No such file"),
        ([STAND_IN, "--settings", "patience"], "'patience' is no NAME=VALUE"),
        ([STAND_IN, "--settings", "patience=0;"], "is no NAME=VALUE"),
        (["host_cost.py", "raw", "--folder", "{folder}/file/built"], "Not a directory"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_measured(tmp_path, command, said):
    (tmp_path / "file").touch()
    words = [word.format(folder=tmp_path) for word in command]
    given = [sys.executable, str(DEMOS / words[0]), *words[1:]]
    ran = subprocess.run(given, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 2 and not ran.stdout, (ran.stdout, ran.stderr)
    assert "usage: " in ran.stderr and said in ran.stderr and "Traceback" not in ran.stderr


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")
def test_what_measures_the_host_is_built_where_it_is_told(tmp_path):
    folder = tmp_path / "a folder" / "in it"
    for there, told in ((tmp_path, folder), (folder, ".")):
        words = [str(DEMOS / "host_cost.py"), "raw", "--case", "512 B", "--folder", str(told)]
        ran = subprocess.run([sys.executable, *words], cwd=there, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0 and json.loads(ran.stdout)["case"] == "512 B", ran.stderr
    assert (folder / "host_cost.so").exists()
    # Without a compiler, where nothing is built yet.
    words[-1] = str(tmp_path / "new")
    environment = {**os.environ, "PATH": str(tmp_path)}
    given = {"capture_output": True, "text": True, "timeout": 300, "env": environment}
    ran = subprocess.run([sys.executable, *words], **given)
    assert ran.returncode == 1 and ran.stderr == "there is no g++, which builds what measures\n"


def test_whose_turn_it_is():
    names = ["a", "b", "c"]
    made = [rounds.order(names, number) for number in range(6)]
    assert made[0] == names
    for place in range(3):
        assert collections.Counter(one[place] for one in made) == {"a": 2, "b": 2, "c": 2}
    before = collections.Counter(pair for one in made for pair in itertools.pairwise(one))
    assert set(before.values()) == {2} and len(before) == 6


def test_where_a_median_lies():
    # The ranks that tables of the sign test have.
    for count, rank in ((6, 1), (8, 1), (9, 2), (12, 3), (15, 4), (20, 6), (25, 8), (30, 10)):
        summed = ratios.summary(range(count, 0, -1))
        assert summed["interval"] == [rank, count + 1 - rank], count
        assert summed["median"] == (count + 1) / 2
    assert ratios.summary([3])["quartiles"] == [3, 3]
    assert ratios.summary([1, 2])["interval"] == [1, 2]
    assert "95" not in ratios.told(ratios.summary(range(5)))


def test_how_long_at_least_one_works():
    assert busy.together([]) == 0
    assert busy.together([(5, 6), (0, 2), (1, 3), (1, 2), (3, 4)]) == 5


def test_where_memory_is():
    def block(address, size, state):
        return {"address": address * MIB, "size": size * MIB, "vpmm_state": state}

    blocks = [
        block(0, 3, "live"),
        block(3, 2, "cached"),
        block(5, 3, "pending"),
        block(8, 1, "deferred"),
        block(9, 1, "live"),
        # Two that nobody has.
        block(12, 28, "idle"),
    ]
    awake = {"address": 0, "total_size": 40 * MIB, "is_asleep": False, "blocks": blocks}
    found = held.where([awake, {**awake, "is_asleep": True}])
    assert (found["live_bytes"], found["held_bytes"]) == (4 * MIB, 40 * MIB)
    # 4 to 8, and 10 to 40.
    assert found["whole_granule_bytes"] == 34 * MIB
    sizes = list(held.SIZES)
    for kind, size, count in (
        ("front", sizes[1], 2),
        ("shards", sizes[1], 3),
        ("deferred", sizes[0], 1),
        ("in transit", sizes[1], 2),
        ("common", sizes[2], 28),
        ("between live", sizes[1], 6),
        ("between live", sizes[2], 30),
    ):
        assert found["kinds"][kind][size] == [count * MIB, 1], kind


def test_where_a_pool_s_memory_is():
    sizes = [1000 + 37 * MIB * turn // 5 for turn in range(12)]
    buffers = [vpmm.DeviceBuffer(size) for size in sizes]
    del buffers[1::3]
    found = held.where(vpmm.snapshot()["segments"])
    now = vpmm.statistics()
    assert (found["live_bytes"], found["held_bytes"]) == (now.live_bytes, now.mapped_bytes)
    together = {kind: sum(count for count, _ in kinds.values()) for kind, kinds in found["kinds"].items()}
    free = now.mapped_bytes - now.live_bytes
    assert together.pop("between live") == sum(together.values()) == free
    assert together["front"] == now.cached_bytes


def test_a_log_of_what_pytorch_was_asked_for(tmp_path):
    """Of a run that was out of memory, too."""

    def event(action, time_us, **further):
        return {"action": action, "time_us": time_us, "stream": 7, **further}

    events = [
        event("alloc", 1_000_000, addr=512, size=100),
        event("segment_alloc", 1_000_001, addr=0, size=2 * MIB),
        event("oom", 1_000_002, device_free=5, size=1 << 40),
        event("free_requested", 62_000_003, addr=512, size=100),
        event("free_completed", 62_000_004, addr=512, size=100),
        event("free_requested", 62_000_005, addr=1024, size=100),
        # A day later, and by a clock that was set back behind the first.
        event("alloc", (86_400 + 2) * 1_000_000, addr=512, size=100),
        event("free_requested", 999_999, addr=512, size=100),
    ]
    cuda = types.SimpleNamespace(synchronize=lambda: None, current_device=lambda: 0)
    cuda.memory = types.SimpleNamespace(
        _snapshot=lambda: {"device_traces": [events]}, _record_memory_history=lambda **_: None
    )
    record.end(types.SimpleNamespace(cuda=cuda), tmp_path / "log.csv.gz")
    with gzip.open(tmp_path / "log.csv.gz", "rt") as file:
        assert file.read().splitlines()[1:] == [
            "1,00:00:00.000000,allocate,0x200,100,1",
            "1,00:01:01.000003,free,0x200,100,1",
            "1,00:00:01.000000,allocate,0x200,100,1",
            "1,23:59:59.999999,free,0x200,100,1",
        ]
