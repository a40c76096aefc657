"""What the plug-in costs PyTorch's host, as the demo measures it. Skipped without a GPU or g++."""

import json
import pathlib
import shutil
import statistics
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU that PyTorch can use", allow_module_level=True)
if not shutil.which("g++"):
    pytest.skip("no g++", allow_module_level=True)

DEMO = pathlib.Path(__file__).parents[1] / "demos" / "host_cost.py"


CASE = "1 MiB"


def measured(way, folder):
    """Nanoseconds of a request or a free, by stream."""
    command = [sys.executable, str(DEMO), way, "--case", CASE, "--folder", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    lines = map(json.loads, ran.stdout.splitlines())
    return {line["stream"]: line["min_ns"] for line in lines}


def test_the_plug_in_is_a_small_part_of_pytorch_s_wrapper(tmp_path):
    """Machines differ in speed, and each from minute to minute, so they take turns, and are compared with
    what came just before or after."""
    by_wrapper, by_pytorch = [], []
    for _ in range(3):
        nothing, vpmm, torch_s = (measured(way, tmp_path) for way in ("nothing", "vpmm", "torch"))
        for stream, ns in vpmm.items():
            print(stream, "vpmm", ns, "nothing", nothing[stream], "torch", torch_s[stream])
        by_wrapper += [vpmm[stream] / nothing[stream] for stream in vpmm]
        by_pytorch += [vpmm[stream] / torch_s[stream] for stream in vpmm]
    # The wrapper alone is 40 ns of 70 on the machine that the aim was set for.
    assert statistics.median(by_wrapper) <= 1.75, by_wrapper
    assert statistics.median(by_pytorch) <= 0.8, by_pytorch
