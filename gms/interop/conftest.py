"""The Python service's own code beside this repository's: scripts/gms-interop.sh runs these tests.

``GMS_PYTHON`` names a folder in which its package ``gpu_memory_service`` is; the package's server and
client run as they are, with NVIDIA's Python bindings, on the simulated driver.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import time
import types

import pytest

HERE = pathlib.Path(__file__).parent
FOLDER = os.environ.get("GMS_PYTHON", "")
COMMAND = os.environ.get("VPMM_COMMAND", "")

if not (pathlib.Path(FOLDER) / "gpu_memory_service").is_dir():
    pytest.exit("skipped: GMS_PYTHON names no folder with the package gpu_memory_service", 0)
if not pathlib.Path(COMMAND).is_file():
    pytest.exit("VPMM_COMMAND names no `vpmm` program", 2)
sys.path.insert(0, FOLDER)


def _lacking(name, **contents):
    """Stands in for a module of the package that a checkout of its core lacks."""
    try:
        __import__(name)
        module = sys.modules[name]
        for key, value in contents.items():
            if not hasattr(module, key):
                setattr(module, key, value)
    except ImportError:
        module = types.ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module


# The manager tells PyTorch's side when it ends; there is no PyTorch here.
_lacking(
    "gpu_memory_service.client.torch.allocator",
    _tag_states={},
    evict_gms_client_memory_manager=lambda manager: None,
)


def _start(arguments, path):
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not path.exists():
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline, "the server has no socket"
        time.sleep(0.005)
    return process


class Servers:
    """Starts either server; ``kind`` is ``ours`` or ``theirs``."""

    RETRY = ("0.05", "0.2")

    def __init__(self, folder):
        self.folder, self.processes = folder, []

    def start(self, kind):
        path = self.folder / f"{kind}-{len(self.processes)}.sock"
        interval, timeout = self.RETRY
        if kind == "ours":
            arguments = [COMMAND, "serve", "--device", "sim", "--tag", "weights"]
            arguments += ["--socket-path", str(path), "--alloc-retry-interval", interval]
            arguments += ["--alloc-retry-timeout", timeout]
        else:
            program = HERE / "their_server.py"
            arguments = [sys.executable, str(program), str(path), interval, timeout]
        self.processes.append(_start(arguments, path))
        return str(path)

    def start_at_the_usual_place(self):
        """`vpmm serve` without a path: GMS_SOCKET_DIR says in which folder."""
        self.processes.append(subprocess.Popen([COMMAND, "serve", "--device", "sim"], stderr=subprocess.PIPE))

    def stop(self):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(30)
            process.stderr.close()


@pytest.fixture
def servers(tmp_path):
    running = Servers(tmp_path)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def short_path():
    """A folder whose name leaves room for that of a socket: a path has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="gms") as path:
        yield path
