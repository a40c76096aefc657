"""The client of the GPU memory service against a server of `vpmm serve`, on the simulator."""

import multiprocessing
import os
import pathlib
import shutil
import subprocess
import time

import pytest

import vpmm
from vpmm.gms import (
    GMSClientMemoryManager,
    GrantedLockType,
    RequestedLockType,
    StaleMemoryLayoutError,
)

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


@pytest.fixture
def server(tmp_path):
    command = _command()
    if command is None:
        pytest.skip("no `vpmm` program: cargo build -p vpmm-cli, or name it in VPMM_COMMAND")
    path = tmp_path / "gms.sock"
    arguments = [command, "serve", "--device", "sim", "--tag", "weights", "--socket-path", str(path)]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 30
        while not path.exists():
            assert process.poll() is None, process.stderr.read().decode()
            assert time.monotonic() < deadline, "the server has no socket"
            time.sleep(0.01)
        yield str(path)
    finally:
        process.terminate()
        process.wait(30)
        process.stderr.close()


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
        with pytest.raises(RuntimeError, match="still mapped"):
            manager.free_va(address)
        manager.unmap_va(address)
        assert not manager.mappings[address].is_mapped
        manager.free_va(address)
        assert manager.mappings == {}
        assert manager.free_handle(name)
        with pytest.raises(RuntimeError, match="Unknown allocation"):
            manager.free_handle(name)
        with pytest.raises(RuntimeError, match="size"):
            manager.allocate_handle(0)
        assert len(manager.commit_layout()) == 64


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
