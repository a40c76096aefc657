"""What the plug-in costs PyTorch's host, as the demo measures it. Skipped without a GPU or g++."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU that PyTorch can use", allow_module_level=True)
if not shutil.which("g++"):
    pytest.skip("no g++", allow_module_level=True)

DEMO = pathlib.Path(__file__).parents[1] / "demos" / "host_cost.py"


def measured(way):
    ran = subprocess.run([sys.executable, str(DEMO), way], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    lines = map(json.loads, ran.stdout.splitlines())
    return {(line["stream"], line["case"]): line["min_ns"] for line in lines}


def test_the_plug_in_is_a_small_part_of_pytorch_s_wrapper():
    vpmm, nothing, torch_s = measured("vpmm"), measured("nothing"), measured("torch")
    for case, ns in vpmm.items():
        print(case, "vpmm", ns, "nothing", nothing[case], "torch", torch_s[case])
    own = [vpmm[case] - nothing[case] for case in vpmm if case[1] == "1 MiB"]
    # Generous: machines differ, and share their cores.
    assert all(ns <= 60 for ns in own), own
