"""A `vpmm serve --all` on a machine with two GPUs: a server for each, of which one is killed. Skipped with
fewer. Run with VPMM_COMMAND naming the program. With VPMM_DEVICE=sim:1 on two simulated devices.
"""

import contextlib
import ctypes
import multiprocessing
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid

import pytest

SIMULATED = os.environ.get("VPMM_DEVICE", "").startswith("sim")
MIB = 1 << 20
SIZES = [6 * MIB, 2 * MIB, 64 * MIB]
TAGS = ("kv_cache", "weights")
DEVICES = (0, 1)


@pytest.fixture(scope="module", autouse=True)
def two_gpus():
    """They are counted in a process of its own, so that this one starts no driver for it."""
    program = "import vpmm; print(vpmm.device_count())"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    # What went wrong, or the number and no more.
    said = ran.stdout.strip() if ran.returncode == 0 else ran.stderr.strip()
    if not said.isdigit() or int(said) < 2:
        pytest.skip(f"two GPUs are needed: {said.splitlines()[-1] if said else ran.returncode}")


def _sure(status):
    assert status == 0, f"the driver answered {status}"


def _name(device):
    """What sockets are named after."""
    if SIMULATED:
        return f"GPU-{uuid.UUID(bytes=b'cuda-sim device' + bytes([device]))}"
    driver, number, raw = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    _sure(driver.cuInit(0))
    _sure(driver.cuDeviceGet(ctypes.byref(number), device))
    _sure(driver.cuDeviceGetUuid_v2(raw, number))
    return f"GPU-{uuid.UUID(bytes=bytes(raw))}"


def _write(device, address, content):
    """Through a stream of the process's pool on that device, which has its context."""
    from vpmm._library import NULL, call, ffi, handle, lib

    call(lib.vpmm_process_upload, device, handle(address), ffi.from_buffer(content), len(content), NULL)


def _read(device, address, length):
    from vpmm._library import NULL, call, ffi, handle, lib

    out = bytearray(length)
    call(lib.vpmm_process_download, device, ffi.from_buffer(out), handle(address), length, NULL)
    return bytes(out)


def _content(device, seed, size):
    """Differs between devices, layouts and allocations, at the begin and the end."""
    return b"%d %d %d " % (device, seed, size) * 99


def _publish(device, path, seed):
    """Writes a layout and publishes it, in a process of its own."""
    from vpmm.gms import GMSClientMemoryManager, GrantedLockType, RequestedLockType

    with GMSClientMemoryManager(path, device=device) as manager:
        manager.connect(RequestedLockType.RW, timeout_ms=60_000)
        assert manager.granted_lock_type is GrantedLockType.RW
        for size in SIZES:
            address = manager.create_mapping(size=size, tag="test")
            content = _content(device, seed, size)
            _write(device, address, content)
            _write(device, address + size - len(content), content)
        manager.commit()


def _check(device, manager, addresses, seed):
    sizes = {handle.allocation_id: handle.size for handle in manager.list_handles()}
    assert sorted(sizes.values()) == sorted(SIZES)
    for allocation, address in addresses.items():
        size = sizes[allocation]
        content = _content(device, seed, size)
        assert _read(device, address, len(content)) == content
        assert _read(device, address + size - len(content), len(content)) == content


def _attach(device, path, seed, pipe):
    """Reads a layout, says so, and reads what it has mapped again when it is told to."""
    from vpmm.gms import GMSClientMemoryManager, RequestedLockType

    with GMSClientMemoryManager(path, device=device) as manager:
        manager.connect(RequestedLockType.RO, timeout_ms=60_000)
        addresses = manager.import_all()
        _check(device, manager, addresses, seed)
        pipe.send("read")
        first = next(iter(addresses.values()))
        start = _read(device, first, 64)
        pipe.recv()
        # Whether or not its server lives: memory that is mapped stays.
        assert _read(device, first, 64) == start
        pipe.send("read again")


class _Reader:
    def __init__(self, device, path, seed):
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_attach, args=(device, path, seed, theirs))
        self.process.start()
        theirs.close()

    def said(self, what):
        assert self.pipe.poll(120), "a reader says nothing"
        assert self.pipe.recv() == what

    def end(self):
        self.pipe.send("again")
        self.said("read again")
        self.process.join(60)
        assert self.process.exitcode == 0


def _run(function, *arguments):
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join(120)
    assert process.exitcode == 0


def _servers(supervisor):
    """The servers' processes, by their devices."""
    children = pathlib.Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    found = {}
    for child in children:
        # One that has just ended has none.
        with contextlib.suppress(FileNotFoundError):
            arguments = pathlib.Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
            if "--device" in arguments:
                device = arguments[arguments.index("--device") + 1]
                found[0 if device == "sim" else int(device.removeprefix("sim:"))] = int(child)
    return found


def _eventually(what, is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@pytest.fixture
def folder():
    """One whose name leaves room for that of a socket: a path has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="gms") as path:
        yield pathlib.Path(path)


@pytest.fixture
def fleet(folder):
    """The supervisor and its sockets, by device and tag."""
    command = os.environ.get("VPMM_COMMAND") or shutil.which("vpmm")
    if not command:
        pytest.skip("no `vpmm` program: name it in VPMM_COMMAND")
    arguments = [command, "serve", "--all"]
    if SIMULATED:
        arguments += ["--device", "sim:1"]
    names = {device: _name(device) for device in DEVICES}
    paths = {(device, tag): folder / f"gms_{names[device]}_{tag}.sock" for device in DEVICES for tag in TAGS}
    process = subprocess.Popen(arguments, env=os.environ | {"GMS_SOCKET_DIR": str(folder)})
    try:
        while not all(path.exists() for path in paths.values()):
            assert process.poll() is None, "the servers have ended"
            time.sleep(0.01)
        yield process, {key: str(path) for key, path in paths.items()}
    finally:
        process.terminate()
        try:
            code = process.wait(60)
        except subprocess.TimeoutExpired:
            # Its servers end with it.
            process.kill()
            raise
    assert code == 0
    assert list(folder.iterdir()) == [], "sockets are left"


def test_a_gpus_server_is_killed_and_the_other_ones_goes_on(fleet):
    supervisor, paths = fleet
    assert set(DEVICES) <= set(before := _servers(supervisor.pid))
    for (device, tag), path in paths.items():
        _run(_publish, device, path, TAGS.index(tag))
    readers = {}
    for (device, tag), path in paths.items():
        readers[device, tag] = _Reader(device, path, TAGS.index(tag))
    for reader in readers.values():
        reader.said("read")

    os.kill(before[0], signal.SIGKILL)

    def is_there_again():
        now = _servers(supervisor.pid)
        return now.get(0, before[0]) != before[0]

    _eventually("another server for the first GPU", is_there_again)
    # The second GPU's layouts are as they were, for new readers, too.
    for tag in TAGS:
        late = _Reader(1, paths[1, tag], TAGS.index(tag))
        late.said("read")
        late.end()
    # Who had mapped the first GPU's has it still.
    for reader in readers.values():
        reader.end()
    # And that one serves again, from nothing.
    for tag in TAGS:
        _run(_publish, 0, paths[0, tag], 7)
        again = _Reader(0, paths[0, tag], 7)
        again.said("read")
        again.end()
    assert _servers(supervisor.pid)[1] == before[1], "the same process"
