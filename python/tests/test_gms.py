"""The client of the GPU memory service against a server of `vpmm serve`, on the simulator."""

import array
import collections
import contextlib
import ctypes
import gc
import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types

import pytest

import vpmm
from vpmm import _library
from vpmm.gms import (
    GMSClientMemoryManager,
    GrantedLockType,
    LockTimeoutError,
    RequestedLockType,
    StaleMemoryLayoutError,
)

if not os.environ["VPMM_DEVICE"].startswith("sim"):
    pytest.skip("of the simulator's memory; tests_cuda has those of a GPU's", allow_module_level=True)

MIB = 1 << 20


def _command():
    """The `vpmm` program: what VPMM_COMMAND names, else one on the path or built here."""
    root = pathlib.Path(__file__).resolve().parents[2]
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", root / "target"))
    built = [target / kind / "vpmm" for kind in ("release", "debug")]
    # The newest: what is lying there from before may not know of the service.
    built = sorted((path for path in built if path.is_file()), key=lambda path: -path.stat().st_mtime)
    named = [os.environ.get("VPMM_COMMAND"), *map(str, built), shutil.which("vpmm")]
    return next((name for name in named if name and pathlib.Path(name).is_file()), None)


@contextlib.contextmanager
def _served(folder, *arguments):
    """A server, whose socket is in a folder: its path."""
    command = _command()
    if command is None:
        pytest.skip("no `vpmm` program: cargo build -p vpmm-cli, or name it in VPMM_COMMAND")
    arguments = [command, "serve", "--device", "sim", "--tag", "weights", *arguments]
    environment = os.environ | {"GMS_SOCKET_DIR": str(folder)}
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, env=environment)
    try:
        deadline = time.monotonic() + 30
        while not (paths := list(folder.glob("*.sock"))):
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < deadline, "the server has no socket"
            time.sleep(0.01)
        yield str(paths[0])
    finally:
        process.terminate()
        process.wait(30)
        process.stderr.close()


@pytest.fixture
def server(tmp_path):
    with _served(tmp_path, "--socket-path", str(tmp_path / "gms.sock")) as path:
        yield path


@pytest.mark.parametrize("wrong", [-1, 1 << 64])
def test_a_number_is_refused_by_its_name(server, wrong):
    with pytest.raises(ValueError, match=f"^device cannot be {wrong}$"):
        GMSClientMemoryManager(server, device=wrong)
    with GMSClientMemoryManager(server) as manager:
        asked = [
            ("size", manager.allocate_handle),
            ("size", manager.reserve_va),
            ("fd", lambda fd: manager.map_va(fd, 0)),
            ("va", lambda va: manager.map_va(0, va)),
            ("va", manager.unmap_va),
            ("va", manager.free_va),
            ("va", manager.destroy_mapping),
            ("offset_bytes", lambda offset: manager.metadata_put("a", "b", offset, b"")),
            ("size", lambda size: manager.create_mapping(size=size)),
            ("a size", lambda size: manager.create_mappings([size])),
            ("size", manager.create_scratch_mapping),
            ("base_va", manager.destroy_scratch_mapping),
        ]
        for name, ask in asked:
            with pytest.raises(ValueError, match=f"^{name} cannot be {wrong}$"):
                ask(wrong)
        if wrong > 0:
            asked = [manager.set_answer_timeout, lambda time: manager.connect("ro", time)]
            for ask in asked:
                with pytest.raises(ValueError, match=f"^timeout_ms cannot be {wrong}$"):
                    ask(wrong)
        # For ever, as it is below 0.
        manager.set_answer_timeout(-(1 << 70))


def test_a_layout_is_written_published_and_read(server):
    with GMSClientMemoryManager(server) as writer:
        assert not writer.is_connected and writer.granted_lock_type is None
        writer.connect(RequestedLockType.RW_OR_RO)
        assert writer.granted_lock_type is GrantedLockType.RW
        with pytest.raises(RuntimeError, match="already connected"):
            writer.connect(RequestedLockType.RO)
        first = writer.create_mapping(size=3 * MIB, tag="weights")
        second, third = writer.create_mappings([MIB, 5 * MIB], tag="weights")
        assert writer.granularity == 2 * MIB and writer.total_bytes == 12 * MIB
        mapping = writer.mappings[first]
        assert mapping.is_mapped and mapping.va == first and mapping.aligned_size == 4 * MIB
        assert writer.metadata_put("a.weight", mapping.allocation_id, 512, b"\x00shape\xff")
        assert writer.metadata_put("b.empty", mapping.allocation_id, 0, b"")
        assert writer.metadata_get("a.weight") == (mapping.allocation_id, 512, b"\x00shape\xff")
        assert writer.metadata_get("b.empty") == (mapping.allocation_id, 0, b"")
        # Whatever has bytes: all of them, however many its elements are.
        assert writer.metadata_put("b.empty", mapping.allocation_id, 0, array.array("i", [1, 2]))
        assert writer.metadata_get("b.empty")[2] == array.array("i", [1, 2]).tobytes()
        assert writer.metadata_get("c") is None
        assert writer.metadata_list() == ["a.weight", "b.empty"]
        assert writer.metadata_list("a") == ["a.weight"]
        assert writer.metadata_delete("b.empty") and not writer.metadata_delete("b.empty")
        with pytest.raises(RuntimeError, match="out of range"):
            writer.metadata_put("d", mapping.allocation_id, 4 * MIB, b"")
        writer.destroy_mapping(third)
        assert [handle.layout_slot for handle in writer.list_handles("weights")] == [0, 1]
        assert writer.commit() and writer.is_unmapped and not writer.is_connected

        writer.connect(RequestedLockType.RO)
        writer.remap_all_vas()
        assert set(writer.mappings) == {first, second} and not writer.is_unmapped
        with GMSClientMemoryManager(server) as reader:
            reader.connect("ro", timeout_ms=10_000)
            assert reader.get_memory_layout_hash() == writer.get_memory_layout_hash()
            names = [handle.allocation_id for handle in reader.list_handles()]
            placed = reader.import_all()
            assert list(placed) == names
            assert reader.create_mapping(allocation_id=names[0]) == placed[names[0]]
            with pytest.raises(RuntimeError, match="RW"):
                reader.allocate_handle(MIB)


def test_a_visitor_may_ask_as_well(server):
    """Of the C ABI: nobody is kept waiting while somebody is shown something."""
    lib, ffi, null = _library.lib, _library.ffi, _library.NULL
    with GMSClientMemoryManager(server) as writer:
        writer.connect(RequestedLockType.RW)
        address = writer.create_mapping(size=MIB, tag="weights")
        made = writer.mappings[address].allocation_id
        writer.metadata_put("key", made, 0, b"value")
        answers = []

        def ask(*_):
            answers.append(writer.granted_lock_type)

        allocation = ffi.callback("void(void *, const vpmm_gms_allocation *)", ask)
        value = ffi.callback("void(void *, const char *, uint64_t, const void *, size_t)", ask)
        assert lib.vpmm_gms_handle_info(writer._handle, made.encode(), allocation, null) == 0
        assert lib.vpmm_gms_list_mappings(writer._handle, allocation, null) == 0
        assert lib.vpmm_gms_metadata_get(writer._handle, b"key", value, null) == 0
        assert answers == [GrantedLockType.RW] * 3


def test_what_a_signal_s_handler_raises_while_something_is_shown(server, stopped):
    with GMSClientMemoryManager(server) as writer:
        writer.connect(RequestedLockType.RW)
        name, _ = writer.allocate_handle(1)
        keys = [f"key {number:03}" for number in range(300)]
        for key in keys:
            writer.metadata_put(key, name, 0, b"value")

        def work():
            assert writer.metadata_list() == keys

        stopped(work, 30, 0.01)


def test_each_step_by_itself(server):
    with GMSClientMemoryManager(server) as manager:
        manager.connect(RequestedLockType.RW)
        name, slot = manager.allocate_handle(MIB, "weights")
        about = manager.get_handle_info(name)
        assert (about.allocation_id, about.layout_slot, about.tag) == (name, slot, "weights")
        descriptor = manager.export_handle(name)
        address = manager.reserve_va(about.aligned_size)
        assert manager.map_va(descriptor, address, about.aligned_size, name, "weights") == address
        assert manager.mappings[address].is_mapped
        assert manager.mappings[address].handle == address
        manager.unmap_va(address)
        assert not manager.mappings[address].is_mapped and manager.mappings[address].handle == 0
        manager.free_va(address)
        assert manager.mappings == {}
        assert manager.free_handle(name)
        with pytest.raises(RuntimeError, match="Unknown allocation"):
            manager.free_handle(name)
        with pytest.raises(RuntimeError, match="size"):
            manager.allocate_handle(0)
        # What is mapped is unmapped first, as with the Python service's own.
        manager.free_va(manager.create_mapping(size=MIB, tag="weights"))
        assert manager.mappings == {}
        sealed = manager.commit_layout()
        assert sealed.memory_layout_hash == manager.get_memory_layout_hash()
        assert sealed.granted_lock_type is manager.granted_lock_type is GrantedLockType.RW_DATA
        with pytest.raises(RuntimeError, match="RW"):
            manager.commit()


def test_scratch_becomes_memory(server):
    with GMSClientMemoryManager(server, scratch_size=4 * MIB) as manager:
        vas = [manager.create_scratch_mapping(size) for size in (9 * MIB, MIB)]
        assert manager.scratch_summary() == (2, 10 * MIB, 4 * MIB)
        assert manager.mappings == {} and all(va % (4 * MIB) == 0 for va in vas)
        with pytest.raises(RuntimeError, match="still mapped"):
            manager.prepare_scratch_for_reallocation()
        spare = manager.create_scratch_mapping(MIB, tag="t")
        assert manager.destroy_scratch_mapping(spare) and not manager.destroy_scratch_mapping(spare)
        manager.unmap_all_vas()
        assert manager.scratch_summary() == (2, 10 * MIB, 0)
        manager.connect(RequestedLockType.RW)
        manager.prepare_scratch_for_reallocation()
        assert manager.scratch_summary() == (0, 0, 0)
        manager.reallocate_all_handles("kv_cache")
        manager.remap_all_vas()
        assert set(manager.mappings) == set(vas)
        assert [handle.size for handle in manager.list_handles("kv_cache")] == [9 * MIB, MIB]
    for size in (MIB, 6 * MIB):
        with GMSClientMemoryManager(server, scratch_size=size) as manager:
            with pytest.raises(ValueError, match="power of two"):
                manager.create_scratch_mapping(MIB)


def test_sleep_and_wake_and_another_layout(server):
    manager = GMSClientMemoryManager(server)
    manager.connect(RequestedLockType.RW)
    cache = manager.create_mapping(size=4 * MIB, tag="weights")
    manager.unmap_all_vas()
    manager.abort()
    assert manager.is_unmapped and manager.total_bytes == 4 * MIB
    # A cache that is written anew.
    manager.connect(RequestedLockType.RW)
    manager.reallocate_all_handles("weights")
    manager.remap_all_vas()
    assert manager.mappings[cache].is_mapped
    manager.commit()
    manager.connect(RequestedLockType.RO)
    manager.remap_all_vas()
    manager.unmap_all_vas()
    manager.abort()
    with GMSClientMemoryManager(server) as other:
        other.connect(RequestedLockType.RW)
        other.create_mapping(size=8 * MIB, tag="weights")
        other.commit()
    manager.connect(RequestedLockType.RO)
    with pytest.raises(StaleMemoryLayoutError):
        manager.remap_all_vas()
    manager.close()
    with pytest.raises(RuntimeError, match="closed"):
        manager.connect(RequestedLockType.RO)


def test_locks_that_are_not_to_be_had(server, tmp_path):
    with GMSClientMemoryManager(server) as one, GMSClientMemoryManager(server) as two:
        one.connect(RequestedLockType.RW)
        with pytest.raises(TimeoutError, match="Timeout waiting for lock"):
            two.connect(RequestedLockType.RO, timeout_ms=50)
        one.abort()
        two.connect(RequestedLockType.RW, timeout_ms=5000)
    with GMSClientMemoryManager(str(tmp_path / "nobody.sock")) as lost:
        with pytest.raises(ConnectionError):
            lost.connect(RequestedLockType.RO, timeout_ms=50)
        with pytest.raises(vpmm.StateError):
            lost.list_handles()


def test_a_name_with_a_zero_is_no_shorter_one(server):
    # The library takes a text to end there: it would be another entry.
    with pytest.raises(ValueError, match="zero"):
        GMSClientMemoryManager(f"{server}\0")
    with GMSClientMemoryManager(server) as manager:
        manager.connect(RequestedLockType.RW)
        name, _ = manager.allocate_handle(1, "a tag")
        assert manager.metadata_put("key", name, 0, b"value")
        with pytest.raises(ValueError, match="zero"):
            manager.metadata_put("key\0of another", name, 0, b"other")
        with pytest.raises(ValueError, match="zero"):
            manager.metadata_delete("key\0of another")
        assert manager.metadata_get("key") == (name, 0, b"value")


def test_a_server_that_says_nothing_is_given_up(tmp_path):
    path = str(tmp_path / "silent.sock")
    with socket.socket(socket.AF_UNIX) as listener, GMSClientMemoryManager(path) as manager:
        listener.bind(path)
        listener.listen()
        manager.set_answer_timeout(100)
        with pytest.raises(ConnectionError, match="the server has not answered for 0.1 s"):
            manager.connect(RequestedLockType.RW)
        manager.set_answer_timeout(None)
        assert not manager.is_connected


class Enough(Exception):
    """Raised by the handler of a signal."""


@contextlib.contextmanager
def _handled(handler):
    """Signals come ten times a second."""
    former = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def test_what_a_signal_s_handler_raises_ends_the_wait_for_memory(tmp_path):
    calls = []

    def handler(*_):
        calls.append(None)
        if len(calls) == 3:
            raise Enough

    path = str(tmp_path / "gms.sock")
    with _served(tmp_path, "--socket-path", path, "--alloc-retry-timeout", "20"):
        with GMSClientMemoryManager(path) as manager:
            for ask in (
                manager.allocate_handle,
                lambda size: manager.create_mapping(size=size),
                lambda size: manager.create_mappings([size]),
            ):
                calls.clear()
                manager.connect(RequestedLockType.RW, 60_000)
                manager.allocate_handle(140 << 30)
                begin = time.monotonic()
                with _handled(handler), pytest.raises(Enough):
                    ask(10 << 30)
                assert time.monotonic() - begin < 10 and len(calls) >= 3
                # The answer is still to come: nobody takes it for another's.
                assert not manager.is_connected and manager.granted_lock_type is None
                with pytest.raises(RuntimeError, match="not connected"):
                    manager.list_handles()
            manager.connect(RequestedLockType.RW, 60_000)
            slot = manager.allocate_handle(MIB, "weights")[1]
            assert slot == 0 and [one.tag for one in manager.list_handles()] == ["weights"]


def test_a_signal_s_handler_that_raises_nothing_leaves_a_request_as_it_is(tmp_path):
    calls, refused = [], []

    def handler(*_):
        # A call of this thread's has the manager, but perhaps where it begins and where it ends.
        if not 0.5 < time.monotonic() - begin < 1.5:
            return
        calls.append(None)
        for use in (manager.list_handles, manager.abort, lambda: manager.granted_lock_type):
            try:
                use()
            except vpmm.InUseError as error:
                refused.append(error)

    path = str(tmp_path / "gms.sock")
    with _served(tmp_path, "--socket-path", path, "--alloc-retry-timeout", "2"):
        with GMSClientMemoryManager(path) as manager:
            manager.connect(RequestedLockType.RW)
            manager.allocate_handle(140 << 30)
            begin = time.monotonic()
            with _handled(handler):
                with pytest.raises(vpmm.RefusedError, match="Timed out waiting for GPU memory"):
                    manager.allocate_handle(10 << 30)
                waited = time.monotonic() - begin
            assert len(calls) > 3 and 1.9 < waited < 20
            assert len(refused) == 3 * len(calls)
            assert len(manager.list_handles()) == 1


def test_a_signal_that_came_to_another_thread_ends_the_wait_for_memory(tmp_path):
    path = str(tmp_path / "gms.sock")
    with _served(tmp_path, "--socket-path", path, "--alloc-retry-timeout", "20"):
        with GMSClientMemoryManager(path) as manager:
            manager.connect(RequestedLockType.RW)
            manager.allocate_handle(140 << 30)

            def handler(*_):
                raise Enough

            former = signal.signal(signal.SIGALRM, handler)
            sends = threading.Timer(
                0.3, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGALRM)
            )
            try:
                begin = time.monotonic()
                sends.start()
                with pytest.raises(Enough):
                    manager.create_mapping(size=10 << 30)
                assert time.monotonic() - begin < 10
            finally:
                signal.signal(signal.SIGALRM, former)
                sends.join()


def test_who_waits_for_a_call_with_the_interpreter_s_lock_does_not_stop_its_signals(tmp_path):
    """As PyTorch may for a tensor in the manager's memory."""
    path = str(tmp_path / "gms.sock")
    with _served(tmp_path, "--socket-path", path, "--alloc-retry-timeout", "20"):
        with GMSClientMemoryManager(path) as manager:
            manager.connect(RequestedLockType.RW)
            manager.allocate_handle(140 << 30)
            # It keeps the lock for the call.
            state_of = ctypes.PyDLL(_library.path()).vpmm_gms_state_of
            state = ctypes.create_string_buffer(ctypes.sizeof(ctypes.c_size_t) + 24)
            ctypes.c_size_t.from_buffer(state).value = len(state)
            handle, answers = _library.address(manager._handle), []

            def look():
                time.sleep(0.5)
                answers.append(state_of(ctypes.c_void_p(handle), state))

            def handler(*_):
                raise Enough

            former = signal.signal(signal.SIGALRM, handler)
            looks = threading.Thread(target=look, daemon=True)
            try:
                begin = time.monotonic()
                looks.start()
                signal.setitimer(signal.ITIMER_REAL, 1)
                with pytest.raises(Enough):
                    manager.create_mapping(size=10 << 30)
                assert time.monotonic() - begin < 10
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, former)
            looks.join(30)
            assert answers == [0]


def test_a_signal_that_came_to_another_thread_ends_the_wait_for_a_lock(server):
    def handler(*_):
        raise Enough

    former = signal.signal(signal.SIGALRM, handler)
    sends = threading.Timer(0.3, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGALRM))
    with GMSClientMemoryManager(server) as writer, GMSClientMemoryManager(server) as waiting:
        writer.connect(RequestedLockType.RW)
        try:
            begin = time.monotonic()
            sends.start()
            with pytest.raises(Enough):
                waiting.connect(RequestedLockType.RW, 20_000)
            assert time.monotonic() - begin < 10 and not waiting.is_connected
        finally:
            signal.signal(signal.SIGALRM, former)
            sends.join()


def test_who_waits_for_a_lock_keeps_its_turn_whatever_signals_come(server):
    with contextlib.ExitStack() as stack:
        writer, first, second = (stack.enter_context(GMSClientMemoryManager(server)) for _ in range(3))
        writer.connect(RequestedLockType.RW)
        done = []

        def come_second():
            time.sleep(0.5)
            second.connect(RequestedLockType.RW, 60_000)
            done.append("second")
            second.abort()

        comes, leaves = threading.Thread(target=come_second), threading.Timer(1.5, writer.abort)
        with _handled(lambda *_: None):
            comes.start()
            leaves.start()
            first.connect(RequestedLockType.RW, 60_000)
        done.append("first")
        first.abort()
        comes.join()
        leaves.join()
        assert done == ["first", "second"]


def test_handlers_of_signals_run_while_a_lock_is_waited_for(server, tmp_path):
    calls = []

    def handler(*_):
        calls.append(time.monotonic())
        if len(calls) == enough:
            raise Enough

    former = signal.signal(signal.SIGALRM, handler)
    writer = GMSClientMemoryManager(server)
    writer.connect(RequestedLockType.RW)
    waiting = GMSClientMemoryManager(server)
    try:
        # For the lock, and for a server that is not there yet.
        for manager in (waiting, GMSClientMemoryManager(str(tmp_path / "nobody.sock"))):
            calls.clear()
            enough = 3
            signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
            with pytest.raises(Enough):
                manager.connect(RequestedLockType.RW, 60_000)
            assert calls[-1] - calls[0] < 20 and not manager.is_connected
        # One that raises nothing only has the lock asked for anew, within the time.
        calls.clear()
        enough = None
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        begin = time.monotonic()
        with pytest.raises(TimeoutError):
            waiting.connect(RequestedLockType.RW, 1000)
        assert len(calls) > 3 and 0.9 < time.monotonic() - begin < 20
        leaves = threading.Timer(0.5, writer.abort)
        leaves.start()
        waiting.connect(RequestedLockType.RW)
        leaves.join()
        assert waiting.granted_lock_type is GrantedLockType.RW
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        waiting.close()
        writer.close()


def test_the_usual_server_is_found_anew_after_an_abort(monkeypatch):
    # Not the test's own folder: sockets' paths are short.
    with (
        tempfile.TemporaryDirectory() as one,
        tempfile.TemporaryDirectory() as two,
        _served(pathlib.Path(one)) as here,
        _served(pathlib.Path(two)) as there,
    ):
        assert pathlib.Path(here).name == pathlib.Path(there).name != "gms.sock"
        monkeypatch.setenv("GMS_SOCKET_DIR", one)
        with (
            GMSClientMemoryManager(here, tag="weights") as usual,
            GMSClientMemoryManager(here) as without,
            GMSClientMemoryManager(here, tag="kv_cache") as other,
        ):
            # As where a process was moved to a GPU with another name.
            monkeypatch.setenv("GMS_SOCKET_DIR", two)
            usual.connect(RequestedLockType.RW)
            assert usual.socket_path == here, "only after an abort"
            va = usual.create_mapping(size=MIB, tag="weights")
            usual.commit()
            usual.connect(RequestedLockType.RO)
            assert usual.socket_path == here and len(usual.list_handles()) == 1, "a commit is none"
            usual.unmap_all_vas()
            usual.abort()
            with pytest.raises(TimeoutError):
                usual.connect(RequestedLockType.RO, timeout_ms=20)
            assert usual.socket_path == there, "nothing is published there"
            usual.connect(RequestedLockType.RW)
            usual.reallocate_all_handles("weights")
            usual.remap_all_vas()
            assert set(usual.mappings) == {va} and len(usual.list_handles()) == 1
            # Who has said no tag, or has a path of their own, stays there.
            for manager in (without, other):
                manager.connect(RequestedLockType.RO)
                manager.abort()
                manager.connect(RequestedLockType.RO)
                assert manager.socket_path == here and len(manager.list_handles()) == 1
                manager.abort()


def _read(path, queue):
    with GMSClientMemoryManager(path) as reader:
        reader.connect(RequestedLockType.RO)
        placed = reader.import_all()
        queue.put((len(placed), reader.metadata_get("key")[2]))


def test_another_process_reads(server):
    with GMSClientMemoryManager(server) as writer:
        writer.connect(RequestedLockType.RW)
        writer.create_mappings([MIB] * 20, tag="weights")
        name = writer.list_handles()[7].allocation_id
        writer.metadata_put("key", name, 0, b"value")
        writer.commit()
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    process = spawn.Process(target=_read, args=(server, queue))
    process.start()
    assert queue.get(timeout=60) == (20, b"value")
    process.join(60)
    assert process.exitcode == 0


class _Torch:
    """What PyTorch calls for a pool of tensors."""

    def __init__(self):
        library = ctypes.CDLL(_library.path())
        self._alloc, self._free = library.vpmm_gms_torch_alloc, library.vpmm_gms_torch_free
        self._alloc.restype = ctypes.c_void_p
        self._alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self._free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]

    def alloc(self, size):
        return self._alloc(size, 0, None)

    def free(self, address):
        self._free(address, 0, 0, None)

    @staticmethod
    def end():
        _library.call(_library.lib.vpmm_gms_torch_end)


def test_pytorchs_memory_is_a_writers_layout(server):
    torch = _Torch()
    with GMSClientMemoryManager(server) as manager:
        manager.connect(RequestedLockType.RW)
        with pytest.raises(RuntimeError, match="begun nothing"):
            torch.end()
        manager.begin_torch("weights")
        segments = [torch.alloc(size) for size in (2 * MIB, 20 * MIB, 3 * MIB)]
        torch.end()
        assert set(manager.mappings) == set(segments)
        assert [handle.tag for handle in manager.list_handles()] == ["weights"] * 3
        torch.free(segments[1])
        assert set(manager.mappings) == {segments[0], segments[2]}
        assert len(manager.list_handles()) == 2
        manager.begin_torch("weights")
        late = torch.alloc(MIB)
        torch.end()
        assert set(manager.mappings) == {segments[0], segments[2], late}
        torch.free(segments[0])
        # What is published stays whole, whatever the process lets go.
        manager.commit()
        torch.free(late)
        manager.connect(RequestedLockType.RO)
        manager.remap_all_vas()
        torch.free(segments[2])
        assert all(mapping.is_mapped for mapping in manager.mappings.values())
        manager.unmap_all_vas()
        manager.abort()
        # A writer of the next layout has what is left.
        manager.connect(RequestedLockType.RW)
        manager.reallocate_all_handles("weights")
        manager.remap_all_vas()
        assert manager.mappings == {} and manager.list_handles() == []
    torch.free(late)


def test_pytorchs_cache_sleeps_and_takes_over(server):
    torch = _Torch()
    with GMSClientMemoryManager(server, scratch_size=4 * MIB) as manager:
        manager.begin_torch("kv_cache", scratch=True)
        cache = [torch.alloc(20 * MIB) for _ in range(3)]
        torch.end()
        assert manager.scratch_summary() == (3, 60 * MIB, 4 * MIB)
        torch.free(cache.pop())
        assert manager.scratch_summary() == (2, 40 * MIB, 4 * MIB)
        manager.unmap_all_vas()
        manager.connect(RequestedLockType.RW)
        manager.prepare_scratch_for_reallocation()
        manager.reallocate_all_handles("kv_cache")
        manager.remap_all_vas()
        assert set(manager.mappings) == set(cache)
        manager.unmap_all_vas()
        manager.abort()
        # One goes while the memory is away.
        torch.free(cache.pop())
        manager.connect(RequestedLockType.RW)
        manager.reallocate_all_handles("kv_cache")
        manager.remap_all_vas()
        assert list(manager.mappings) == cache and manager.total_bytes == 20 * MIB
        assert len(manager.list_handles("kv_cache")) == 1


def test_a_free_waits_for_no_other_call(server):
    torch = _Torch()
    with GMSClientMemoryManager(server) as manager, GMSClientMemoryManager(server) as other:
        manager.connect(RequestedLockType.RW)
        manager.begin_torch("kv_cache")
        cache = [torch.alloc(2 * MIB) for _ in range(2)]
        torch.end()
        manager.unmap_all_vas()
        manager.abort()
        other.connect(RequestedLockType.RW)
        connecting = threading.Thread(target=manager.connect, args=(RequestedLockType.RW,))
        connecting.start()
        time.sleep(0.1)
        # The thread has the manager, and waits for its lock.
        torch.free(cache.pop())
        assert connecting.is_alive()
        other.abort()
        connecting.join(30)
        assert manager.granted_lock_type is GrantedLockType.RW
        manager.reallocate_all_handles("kv_cache")
        manager.remap_all_vas()
        assert list(manager.mappings) == cache and len(manager.list_handles()) == 1


def test_a_tag_has_one_manager(server, tmp_path):
    from vpmm.gms import torch as pools

    assert pools.get_gms_client_memory_manager("t") is None
    create = pools.get_or_create_gms_client_memory_manager
    manager = create(server, 0, RequestedLockType.RW_OR_RO, tag="t")
    try:
        assert create(server, 0, "rw", tag="t") is manager
        assert pools.get_gms_client_memory_manager("t") is manager
        assert pools.get_gms_client_memory_managers() == (manager,)
        with pytest.raises(RuntimeError, match="not ro"):
            create(server, 0, "ro", tag="t")
        with pytest.raises(RuntimeError, match="is of"):
            create(str(tmp_path / "other"), 0, "rw", tag="t")
        with pytest.raises(RuntimeError, match="is of .* on device 0"):
            create(server, 1, "rw", tag="t")
        with pytest.raises(RuntimeError, match="there is a manager"):
            pools.create_scratch_manager(server, 0, tag="t")
        va = manager.create_mapping(size=MIB, tag="t")
        manager.create_mapping(size=MIB, tag="t")
        name = manager.mappings[va].allocation_id
        pools.prune_allocations(manager, referenced_allocation_ids={name}, synchronize=False)
        assert set(manager.mappings) == {va}
        # An address without memory is kept for what is to be there again; of who reads nothing goes.
        manager.unmap_va(va)
        pools.prune_allocations(manager, referenced_allocation_ids=(), synchronize=False)
        assert set(manager.mappings) == {va}
        other = manager.create_mapping(size=MIB, tag="t")
        manager.commit()
        with pytest.raises(RuntimeError, match="has None"):
            # Tensors may have its addresses.
            create(server, 0, "rw", tag="t")
        manager.connect("ro")
        manager.remap_all_vas()
        pools.prune_allocations(manager, referenced_allocation_ids=(), synchronize=False)
        assert set(manager.mappings) == {va, other}
    finally:
        pools.evict_gms_client_memory_manager(manager)
        manager.close()
    assert pools.get_gms_client_memory_managers() == ()


def test_threads_that_ask_at_once_have_one_manager(server):
    from vpmm.gms import torch as pools

    create = pools.get_or_create_gms_client_memory_manager
    found = []

    def ask():
        found.append(create(server, 0, "rw", tag="t", timeout_ms=20_000))

    with GMSClientMemoryManager(server, tag="t") as other:
        other.connect("rw")
        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        with pytest.raises(LockTimeoutError, match="another thread"):
            create(server, 0, "rw", tag="t", timeout_ms=10)
        other.abort()
        for thread in threads:
            thread.join(30)
    try:
        assert len(found) == 3 and len(set(map(id, found))) == 1 and found[0].is_connected
        assert pools.get_gms_client_memory_managers() == (found[0],)
    finally:
        for manager in set(found):
            pools.evict_gms_client_memory_manager(manager)
            manager.close()


def test_a_manager_that_was_closed_is_replaced(server):
    from vpmm.gms import torch as pools

    create = pools.get_or_create_gms_client_memory_manager
    try:
        with create(server, 0, "rw", tag="t") as closed:
            closed.create_mapping(size=MIB, tag="t")
        manager = create(server, 0, "rw", tag="t", timeout_ms=10_000)
        assert manager is not closed and manager.is_connected
        manager.close()
        scratch = pools.create_scratch_manager(server, 0, tag="t")
        assert pools.get_gms_client_memory_managers() == (scratch,)
        with pytest.raises(RuntimeError, match="there is a manager"):
            pools.create_scratch_manager(server, 0, tag="t")
        # It has no lock yet, but addresses that tensors may have.
        scratch.create_scratch_mapping(MIB, tag="t")
        with pytest.raises(RuntimeError, match="has None"):
            create(server, 0, "rw", tag="t")
        assert pools.get_gms_client_memory_managers() == (scratch,)
    finally:
        for manager in pools.get_gms_client_memory_managers():
            pools.evict_gms_client_memory_manager(manager)
            manager.close(best_effort=True)


class _Plugged:
    """What PyTorch calls where the process's pools are its allocator."""

    def __init__(self):
        library = ctypes.CDLL(_library.path())
        self._alloc, self._free = library.vpmm_torch_alloc, library.vpmm_torch_free
        self._alloc.restype = ctypes.c_void_p
        self._alloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self._free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self._base = library.vpmm_torch_base_alloc
        self._base.restype = ctypes.c_void_p
        self._base.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t)]
        self._record = library.vpmm_torch_record_stream
        self._record.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._failed = library.vpmm_torch_failed_frees
        self._failed.restype = ctypes.c_uint64

    def alloc(self, size):
        return self._alloc(size, 0, None)

    def free(self, address):
        before = self._failed()
        self._free(address, 0, 0, None)
        assert self._failed() == before

    def base(self, address):
        size = ctypes.c_size_t()
        return self._base(address, ctypes.byref(size)), size.value

    def record(self, address, stream):
        self._record(address, stream)


@pytest.fixture
def plugged(monkeypatch):
    """As after ``vpmm.torch.use()``, without PyTorch."""
    import vpmm.torch

    monkeypatch.setattr(vpmm.torch, "_is_used", True)
    return _Plugged()


def _held(manager):
    return sorted(mapping.aligned_size for mapping in manager.mappings.values())


def _holds(manager, address):
    mappings = manager.mappings.items()
    return any(va <= address < va + mapping.aligned_size for va, mapping in mappings)


def test_which_mapping_has_a_tensor():
    from vpmm.gms import LocalMapping
    from vpmm.gms.torch import _Holders

    def of(count, gap):
        places = [MIB * (1 + (1 + gap) * at) for at in range(count)]
        # Not in their order, as addresses that were given back serve again.
        random.Random(1).shuffle(places)
        return {va: LocalMapping(f"at {va}", va, 1, MIB, "weights", 0, True) for va in places}

    assert _Holders({}).of(MIB, 1) is None
    for gap in 0, 1:
        mappings = of(5, gap)
        holders = _Holders(mappings)
        for address in range(MIB // 2, 12 * MIB, MIB // 4):
            for size in 1, MIB // 4, MIB // 2, MIB, 2 * MIB:
                has = [va for va in mappings if va <= address and address + size <= va + MIB]
                assert [holders.of(address, size)] == (has or [None])
        assert all(holders.allocation_id(va) == f"at {va}" for va in mappings)
    # A look at each for every tensor would be half a billion.
    mappings = of(30_000, 0)
    begin, holders = time.monotonic(), _Holders(mappings)
    assert all(holders.of(va + 512, 512) == va for va in mappings)
    assert time.monotonic() - begin < 10


def test_what_uses_a_pool_ends_with_its_block_whatever_comes(server, plugged, stopped):
    from vpmm.gms import torch as gms_torch

    manager = gms_torch.get_or_create_gms_client_memory_manager(server, 0, RequestedLockType.RW)

    def work():
        with gms_torch.use_pool():
            pass

    try:
        stopped(work, 300, 1e-3)
        gc.collect()
        with pytest.raises(vpmm.StateError, match="begun nothing"):
            _library.call(_library.lib.vpmm_gms_torch_end)
        with pytest.raises(vpmm.InvalidArgumentError, match="no tag"):
            _library.call(_library.lib.vpmm_process_pop_tag)
    finally:
        gms_torch.evict_gms_client_memory_manager(manager)
        manager.close()


def test_pools_beside_our_allocator(server, plugged):
    from vpmm.gms import _pools
    from vpmm.gms import torch as gms_torch

    manager = gms_torch.get_or_create_gms_client_memory_manager(server, 0, RequestedLockType.RW)
    try:
        live = vpmm.statistics().live_bytes
        outside, elsewhere = plugged.alloc(MIB), []
        with gms_torch.use_pool():
            small = [plugged.alloc(1000) for _ in range(4)]
            large = plugged.alloc(30 * MIB)
            assert plugged.alloc(0) is None
            thread = threading.Thread(target=lambda: elsewhere.append(plugged.alloc(MIB)))
            thread.start()
            thread.join()
            # What is the process's goes back there, from here too.
            plugged.free(outside)
        assert _held(manager) == [2 * MIB, 30 * MIB], "small tensors share a segment"
        assert all(_holds(manager, address) for address in (*small, large))
        assert not _holds(manager, elsewhere[0])
        assert vpmm.statistics().live_bytes == live + MIB
        plugged.free(elsewhere[0])
        # Found by the address, wherever it is freed; it serves the pool again, and nobody else.
        thread = threading.Thread(target=plugged.free, args=(small[1],))
        thread.start()
        thread.join()
        after = plugged.alloc(1000)
        assert not _holds(manager, after)
        plugged.free(after)
        with gms_torch.use_pool():
            assert plugged.alloc(1000) == small[1]
        assert plugged.base(small[2] + 7) == (small[2], 1024)
        plugged.record(large, None)
        with pytest.raises(RuntimeError, match="this thread has no tag"):
            _library.call(_library.lib.vpmm_process_pop_tag)
        with pytest.raises(RuntimeError, match="has begun nothing"):
            _library.call(_library.lib.vpmm_gms_torch_end)
        with pytest.raises(RuntimeError, match="of device 0"):
            with gms_torch.use_pool(device=1):
                pass
        # Inside each other and inside a tag, the innermost counts; beyond the device's memory the words
        # are the service's, and the error is as usual.
        with vpmm.tag("a tag"), gms_torch.use_pool():
            inner = plugged.alloc(MIB)
            with vpmm.tag("a tag"):
                tagged = plugged.alloc(MIB)
            with pytest.raises(vpmm.OutOfMemoryError, match="GPU memory service.*More than the device"):
                vpmm.DeviceBuffer(1 << 42)
        assert _holds(manager, inner) and not _holds(manager, tagged)
        plugged.free(tagged)

        # Contents: what is made in the pool is what others read.
        with gms_torch.use_pool():
            buffer = vpmm.DeviceBuffer.from_bytes(b"weights!" * 5000)
        (va,) = (va for va, one in manager.mappings.items() if va <= buffer.ptr < va + one.aligned_size)
        name = manager.mappings[va].allocation_id
        manager.metadata_put("key", name, buffer.ptr - va, b"")
        # What nobody has any more is not published.
        plugged.free(large)
        assert _held(manager) == [2 * MIB, 30 * MIB]
        ended, _pools._pools["weights"].memory = _pools._pools["weights"].memory, None
        ended.end()
        assert _held(manager) == [2 * MIB]
        # A pool that has ended gives back what becomes free, and there may be another.
        with gms_torch.use_pool():
            late = plugged.alloc(5 * MIB)
        assert _held(manager) == [2 * MIB, 20 * MIB]
        ended, _pools._pools["weights"].memory = _pools._pools["weights"].memory, None
        ended.end()
        assert _held(manager) == [2 * MIB, 20 * MIB]
        plugged.free(inner)
        plugged.free(late)
        assert _held(manager) == [2 * MIB]
        manager.commit()
        manager.connect(RequestedLockType.RO)
        manager.remap_all_vas()
        with GMSClientMemoryManager(server) as reader:
            reader.connect(RequestedLockType.RO)
            addresses = reader.import_all()
            found, offset, _ = reader.metadata_get("key")
            copy = vpmm.DeviceBuffer(40_000)
            source = addresses[found] + offset
            copy.copy_from_device(_Device(source, 40_000))
            assert copy.to_bytes() == b"weights!" * 5000
        with pytest.raises(RuntimeError, match="does not write"):
            with gms_torch.use_pool():
                pass
        # What is published stays whole, whatever the process lets go.
        before = _held(manager)
        buffer.free()
        for address in small:
            plugged.free(address)
        assert _held(manager) == before and all(one.is_mapped for one in manager.mappings.values())
    finally:
        gms_torch.evict_gms_client_memory_manager(manager)
        manager.close()


def test_what_no_tensor_has_goes_when_the_device_is_done_with_it(server, plugged, monkeypatch):
    from vpmm.gms import torch as gms_torch

    manager = gms_torch.get_or_create_gms_client_memory_manager(server, 0, RequestedLockType.RW)
    seen, torch = [], types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(synchronize=lambda device: seen.append((device, _held(manager))))
    monkeypatch.setitem(sys.modules, "torch", torch)
    try:
        gms_torch.release_unused(manager)
        assert seen == []
        with gms_torch.use_pool():
            kept, gone = plugged.alloc(1000), plugged.alloc(30 * MIB)
        plugged.free(gone)
        gms_torch.release_unused(manager)
        assert seen == [(0, [2 * MIB, 30 * MIB])] and _held(manager) == [2 * MIB]
        plugged.free(kept)
        assert _held(manager) == []
    finally:
        gms_torch.evict_gms_client_memory_manager(manager)
        manager.close()


class _Device:
    """Device memory for whoever takes the array interface."""

    def __init__(self, address, size):
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, True),
            "version": 3,
        }


def test_a_cache_beside_our_allocator_sleeps_and_takes_over(server, plugged):
    from vpmm.gms import torch as gms_torch

    manager = gms_torch.create_scratch_manager(server, 0, scratch_size=4 * MIB)
    try:
        with gms_torch.use_pool("kv_cache"):
            cache = [plugged.alloc(20 * MIB) for _ in range(3)]
        assert manager.scratch_summary() == (3, 60 * MIB, 4 * MIB)
        manager.unmap_all_vas()
        with pytest.raises(RuntimeError, match="is away"):
            with gms_torch.use_pool("kv_cache"):
                pass
        manager.connect(RequestedLockType.RW)
        manager.prepare_scratch_for_reallocation()
        manager.reallocate_all_handles("kv_cache")
        manager.remap_all_vas()
        assert set(manager.mappings) == set(cache)
        # The same pool, with memory now.
        with gms_torch.use_pool("kv_cache"):
            more = plugged.alloc(20 * MIB)
        assert set(manager.mappings) == {*cache, more} and len(manager.list_handles("kv_cache")) == 4
        # What is freed serves again, while the pool is one: its addresses stay through sleep and waking.
        plugged.free(cache[1])
        manager.unmap_all_vas()
        manager.abort()
        manager.connect(RequestedLockType.RW)
        manager.reallocate_all_handles("kv_cache")
        manager.remap_all_vas()
        with gms_torch.use_pool("kv_cache"):
            assert plugged.alloc(20 * MIB) == cache[1]
        for address in (*cache, more):
            plugged.free(address)
        assert len(manager.mappings) == 4
    finally:
        gms_torch.evict_gms_client_memory_manager(manager)
        assert manager.mappings == {}, "the pool went with the last that knew it"
        manager.close()


def test_many_threads_use_a_pool(server, plugged):
    from vpmm.gms import _pools
    from vpmm.gms import torch as gms_torch

    manager = gms_torch.get_or_create_gms_client_memory_manager(server, 0, RequestedLockType.RW)
    failed_before = plugged._failed()
    live = vpmm.statistics().live_count
    # What one thread makes another frees.
    shared, errors = collections.deque(), []

    def work(seed):
        draw = random.Random(seed)
        try:
            for _ in range(300):
                if draw.random() < 0.6:
                    size = draw.choice((100, 5000, MIB, 3 * MIB))
                    if draw.random() < 0.7:
                        with gms_torch.use_pool():
                            address = plugged.alloc(size)
                    else:
                        address = plugged.alloc(size)
                    shared.append(address)
                elif shared:
                    plugged._free(shared.popleft(), 0, 0, None)
        except Exception as error:
            errors.append(error)

    try:
        with gms_torch.use_pool():
            plugged.free(plugged.alloc(1))
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == [] and len(set(shared)) == len(shared), "nothing is given out twice"
        assert any(_holds(manager, address) for address in shared)
        assert not all(_holds(manager, address) for address in shared)
        for address in shared:
            plugged._free(address, 0, 0, None)
        ended, _pools._pools["weights"].memory = _pools._pools["weights"].memory, None
        ended.end()
        assert manager.mappings == {} and manager.list_handles() == []
        assert vpmm.statistics().live_count == live and plugged._failed() == failed_before
    finally:
        gms_torch.evict_gms_client_memory_manager(manager)
        manager.close()


def test_a_manager_that_ends_before_its_tensors(server, plugged):
    from vpmm.gms import torch as gms_torch

    manager = gms_torch.get_or_create_gms_client_memory_manager(server, 0, RequestedLockType.RW)
    with gms_torch.use_pool():
        kept = [plugged.alloc(size) for size in (1000, 3 * MIB)]
    gms_torch.evict_gms_client_memory_manager(manager)
    manager.close()
    for address in kept:
        plugged.free(address)
    # The next one is another's, whoever has the addresses now.
    manager = gms_torch.get_or_create_gms_client_memory_manager(server, 0, RequestedLockType.RW)
    try:
        with gms_torch.use_pool():
            plugged.free(plugged.alloc(1000))
        assert _held(manager) == [2 * MIB]
    finally:
        gms_torch.evict_gms_client_memory_manager(manager)
        manager.close()


class _Published:
    """A reader of tensors that are in this test's memory, as there is no device."""

    device, granted_lock_type = 0, GrantedLockType.RO


def test_a_module_without_memory_is_attached(monkeypatch):
    torch = pytest.importorskip("torch")
    from vpmm.gms import torch as gms_torch

    def model(device):
        with torch.device(device):
            made = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
            made.register_parameter("tied", made[0].weight)
        return made.eval()

    source = model("cpu")
    published = {name: (tensor.detach(), kind) for name, tensor, kind in gms_torch.registered(source)}
    monkeypatch.setattr(gms_torch, "tensors", lambda manager: published)
    with pytest.raises(RuntimeError, match="device 0, not 1"):
        gms_torch.materialize_module_from_gms(_Published(), source, device_index=1)
    for device in ("meta", "cpu"):
        module = model(device)
        gms_torch.materialize_module_from_gms(_Published(), module, device_index=0)
        value = torch.randn(5, 3)
        assert torch.equal(module(value), source(value))
        weight = source[0].weight.data_ptr()
        assert module[0].weight.data_ptr() == module.tied.data_ptr() == weight, "in place"
        assert not module[0].weight.requires_grad
        assert module[1].running_mean.data_ptr() != source[1].running_mean.data_ptr(), "a copy"
    with pytest.raises(ValueError, match="published as"):
        gms_torch.attach(torch.nn.Sequential(torch.nn.Linear(4, 2)), _Published())


def test_tensors_that_are_plain_attributes_are_attached(monkeypatch):
    torch = pytest.importorskip("torch")
    from vpmm.gms import torch as gms_torch
    from vpmm.gms._module import attributes

    class Quantised(torch.nn.Module):
        def __init__(self, fill):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((3, 2), float(fill)))
            self.scale = torch.full((3,), float(fill))
            self.ranges = [torch.full((2,), fill + item) for item in range(11)]
            self.pair = (torch.full((1,), float(fill)), torch.full((1,), -float(fill)))
            # Not tensors of their own.
            self.known, self.mixed, self.number = [self.weight], [self.scale, 3], 5

        @property
        def halved(self):
            return self.scale / 2

    def model(fill, **late):
        made = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ModuleDict({"q": Quantised(fill)}))
        for name, value in late.items():
            setattr(made[1]["q"], name, value)
        return made

    source = model(7, late=torch.arange(4), more=[torch.ones(1), torch.zeros(2)])
    found = {name: (tensor.detach(), kind) for name, tensor, kind in attributes(source)}
    lists = [f"1.q.ranges.{item}" for item in range(11)] + ["1.q.pair.0", "1.q.pair.1"]
    assert set(found) == {"1.q.scale", "1.q.late", "1.q.more.0", "1.q.more.1", *lists}
    assert {kind for _, kind in found.values()} == {"tensor_attr"}
    for name, tensor, kind in gms_torch.registered(source):
        found[name] = tensor.detach(), kind
    # What the Python service's client publishes beside: what properties make, and what the module that
    # attaches has no place for; a parameter that it has not made yet.
    found["1.q.halved"] = torch.zeros(3), "tensor_attr"
    found["2.scale"] = torch.zeros(3), "tensor_attr"
    found["1.q.known.0"] = torch.zeros(3, 2), "tensor_attr"
    found["1.q.qweight"] = torch.ones(5), "parameter"
    monkeypatch.setattr(gms_torch, "tensors", lambda manager: found)
    module = model(1)
    part = module[1]["q"]
    scale, ranges, pair = part.scale, part.ranges, part.pair
    gms_torch.attach(module, _Published())
    assert part.scale is scale and part.ranges is ranges, "who knows them already sees it"
    assert scale.tolist() == [7, 7, 7] and part.halved.tolist() == [3.5] * 3
    assert part.mixed[0] is scale
    assert [item.tolist() for item in ranges] == [[7 + item] * 2 for item in range(11)]
    assert part.pair[0] is pair[0] and [item.item() for item in part.pair] == [7, -7]
    assert part.late.tolist() == [0, 1, 2, 3]
    assert [item.tolist() for item in part.more] == [[1], [0, 0]]
    assert part.known[0] is part.weight and part.weight.data_ptr() == source[1]["q"].weight.data_ptr()
    assert part.qweight.data_ptr() == found["1.q.qweight"][0].data_ptr(), "in place"
    # Copies: programs write to them.
    assert all(
        tensor.data_ptr() != found[name][0].data_ptr()
        for name, tensor, _ in attributes(module)
        if name != "1.q.qweight"
    )
    # Tensors without memory, or of another kind, are replaced.
    module = model(1, scale=torch.empty(3, device="meta"), pair=(torch.zeros(9), torch.zeros(1)))
    gms_torch.attach(module, _Published())
    assert module[1]["q"].scale.tolist() == [7, 7, 7]
    assert [item.item() for item in module[1]["q"].pair] == [7, -7]


def test_threads_that_ask_until_the_interpreter_ends(server):
    """Before Python 3.14 one that asks for the interpreter's lock too late is ended, in the library."""
    with GMSClientMemoryManager(server) as writer:
        writer.connect(RequestedLockType.RW)
        writer.create_mappings([MIB] * 20)
        writer.metadata_put("key", writer.list_handles()[0].allocation_id, 0, b"value")
        writer.commit()
    program = f"""
import threading, time
from vpmm.gms import *
def for_ever(ask):
    while True:
        ask()
managers = [GMSClientMemoryManager({server!r}) for _ in range(3)]
for manager in managers:
    manager.connect(RequestedLockType.RO)
first, second, third = managers
for ask in first.list_handles, second.metadata_list, lambda: third.metadata_get("key"):
    threading.Thread(target=for_ever, args=(ask,), daemon=True).start()
time.sleep(0.1)
"""
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), done
