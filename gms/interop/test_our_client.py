"""This repository's clients at the Python service's server, and every message that they send.

A tap stands between: what the clients send must be what the Python service's own code would have
written, to the byte. Only the handshake may say more, which extensions the client knows.
"""

import json
import os
import pathlib
import select
import socket
import subprocess
import threading

import msgspec
import pytest
from gpu_memory_service.common.protocol import messages
from peers import Side

vpmm_gms = pytest.importorskip("vpmm.gms", reason="the Python package vpmm is not installed")
from vpmm.gms import (  # noqa: E402
    GMSClientMemoryManager,
    GrantedLockType,
    RefusedError,
    RequestedLockType,
    StaleMemoryLayoutError,
)

MIB = 1 << 20
COMMAND = os.environ["VPMM_COMMAND"]


class Tap:
    """Listens in a server's place, passes everything on, and keeps what clients send."""

    def __init__(self, path, server):
        self.path, self.server, self.sent, self.threads = str(path), server, [], []
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.path)
        self.listener.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            sent = bytearray()
            self.sent.append(sent)
            thread = threading.Thread(target=self._pass, args=(client, sent), daemon=True)
            self.threads.append(thread)
            thread.start()

    def _pass(self, client, sent):
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.connect(self.server)
        other = {client: server, server: client}
        while True:
            for side in select.select([client, server], [], [])[0]:
                try:
                    data, files, _, _ = socket.recv_fds(side, 1 << 16, 16)
                    if side is client:
                        sent += data
                        assert not files
                    if data and files:
                        socket.send_fds(other[side], [data], files)
                    elif data:
                        other[side].sendall(data)
                except OSError:
                    data, files = b"", []
                for file in files:
                    os.close(file)
                if not data:
                    client.close()
                    server.close()
                    return

    def frames(self):
        """Everything that was sent, by connection."""
        self.listener.close()
        for thread in self.threads:
            thread.join(10)
        for sent in self.sent:
            data = bytes(sent)
            while data:
                length = 4 + int.from_bytes(data[:4], "big")
                assert len(data) >= length, "half a message"
                yield data[4:length]
                data = data[length:]


def check(tap):
    """Reads every message with the Python service's code and writes it again."""
    kinds = set()
    for data in tap.frames():
        message = messages.decode_message(data)
        kinds.add(type(message).__name__)
        again = messages.encode_message(message)
        if isinstance(message, messages.HandshakeRequest):
            plain = msgspec.msgpack.decode(data)
            assert plain.pop("extensions", ["batch"]) == ["batch"]
            data = msgspec.msgpack.encode(plain)
        assert data == again, message
    return kinds


@pytest.fixture
def tap(servers, tmp_path):
    return Tap(tmp_path / "tap.sock", servers.start("theirs"))


def test_every_request_of_the_python_client(tap):
    with GMSClientMemoryManager(tap.path) as writer:
        writer.connect(RequestedLockType.RW_OR_RO)
        assert writer.granted_lock_type is GrantedLockType.RW
        first = writer.create_mapping(size=3 * MIB, tag="weights")
        second, third = writer.create_mappings([MIB, 5 * MIB], tag="weights")
        name = writer.mappings[first].allocation_id
        assert writer.metadata_put("a.weight", name, 512, b"\x00\xff" * 300)
        assert writer.metadata_get("a.weight") == (name, 512, b"\x00\xff" * 300)
        assert writer.metadata_get("b") is None
        assert writer.metadata_put("b.empty", name, 0, b"")
        assert writer.metadata_list() == ["a.weight", "b.empty"]
        assert writer.metadata_list("a") == ["a.weight"]
        assert writer.metadata_delete("b.empty") and not writer.metadata_delete("b.empty")
        for text, call in (
            (
                "offset_bytes 4194304 out of range for allocation",
                lambda: writer.metadata_put("d", name, 4 * MIB, b""),
            ),
            ("Unknown allocation: nothing", lambda: writer.get_handle_info("nothing")),
            ("Unknown allocation: nothing", lambda: writer.export_handle("nothing")),
        ):
            with pytest.raises(RefusedError, match=text):
                call()
        writer.destroy_mapping(third)
        assert [handle.layout_slot for handle in writer.list_handles("weights")] == [0, 1]
        assert writer.commit() and writer.is_unmapped

        writer.connect(RequestedLockType.RO)
        writer.remap_all_vas()
        assert set(writer.mappings) == {first, second}
        with GMSClientMemoryManager(tap.path) as reader:
            reader.connect("ro", timeout_ms=10_000)
            assert reader.get_memory_layout_hash() == writer.get_memory_layout_hash()
            assert list(reader.import_all()) == [handle.allocation_id for handle in reader.list_handles()]
    kinds = check(tap)
    assert kinds >= {
        "HandshakeRequest",
        "AllocateRequest",
        "ExportAllocationRequest",
        "GetAllocationRequest",
        "ListAllocationsRequest",
        "FreeAllocationRequest",
        "MetadataPutRequest",
        "MetadataGetRequest",
        "MetadataListRequest",
        "MetadataDeleteRequest",
        "CommitRequest",
        "GetStateHashRequest",
    }, kinds


def test_sleep_seal_and_another_layout(tap):
    manager = GMSClientMemoryManager(tap.path)
    manager.connect(RequestedLockType.RW)
    cache = manager.create_mapping(size=4 * MIB, tag="kv_cache")
    manager.unmap_all_vas()
    manager.abort()
    manager.connect(RequestedLockType.RW)
    manager.reallocate_all_handles("kv_cache")
    manager.remap_all_vas()
    assert manager.mappings[cache].is_mapped
    manager.commit()
    manager.connect(RequestedLockType.RO)
    manager.remap_all_vas()
    manager.unmap_all_vas()
    manager.abort()
    with GMSClientMemoryManager(tap.path) as other:
        other.connect(RequestedLockType.RW)
        other.create_mapping(size=8 * MIB, tag="kv_cache")
        other.commit()
    manager.connect(RequestedLockType.RO)
    with pytest.raises(StaleMemoryLayoutError):
        manager.remap_all_vas()
    manager.close()
    with GMSClientMemoryManager(tap.path) as sealing:
        sealing.connect(RequestedLockType.RW_DATA_OR_RW)
        sealing.create_mapping(size=MIB, tag="kv_cache")
        sealing.commit_layout()
        assert sealing.granted_lock_type is GrantedLockType.RW_DATA
    with GMSClientMemoryManager(tap.path) as heir:
        heir.connect(RequestedLockType.RW_DATA_OR_RW)
        assert heir.granted_lock_type is GrantedLockType.RW_DATA and len(heir.import_all()) == 1
    with GMSClientMemoryManager(tap.path) as late:
        with pytest.raises(TimeoutError, match="Timeout waiting for lock"):
            late.connect(RequestedLockType.RO, timeout_ms=60)
    assert "CommitLayoutRequest" in check(tap)


def test_scratch_becomes_the_same_layout_with_either_manager(servers, tap):
    from cuda.bindings import driver as cuda
    from gpu_memory_service.client.memory_manager import GMSClientMemoryManager as Theirs
    from gpu_memory_service.common.locks import RequestedLockType as TheirLock

    cuda.cuInit(0)
    cuda.cuCtxSetCurrent(cuda.cuDevicePrimaryCtxRetain(cuda.cuDeviceGet(0)[1])[1])
    hashes = []
    for path in (tap.path, servers.start("ours")):
        for manager_type, lock in ((Theirs, TheirLock), (GMSClientMemoryManager, RequestedLockType)):
            manager = manager_type(path, scratch_size=4 * MIB)
            for size in (9 * MIB + 5, MIB, 4 * MIB):
                manager.create_scratch_mapping(size, tag="kv_cache")
            assert manager.scratch_summary() == (3, 14 * MIB + 5, 4 * MIB)
            manager.unmap_all_vas()
            manager.connect(lock.RW)
            manager.prepare_scratch_for_reallocation()
            manager.reallocate_all_handles("kv_cache")
            manager.remap_all_vas()
            # Asleep and awake in a layout of its own.
            manager.unmap_all_vas()
            manager.abort()
            manager.connect(lock.RW)
            manager.reallocate_all_handles("kv_cache")
            manager.remap_all_vas()
            sealed = manager.commit_layout()
            hashes.append((sealed.memory_layout_hash, sealed.granted_lock_type.value))
            manager.close()
    assert len(set(hashes)) == 1, hashes
    check(tap)


def run(*arguments):
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_rust_client_measures_it(tap):
    lines = run("serve-bench", "--device", "sim", "--quick", "--socket-path", tap.path)
    assert {"round_trip", "bulk_import_2MiB"} <= {line["case"] for line in lines}
    check(tap)


def test_a_layout_goes_from_their_server_to_ours_and_back(servers, tap, tmp_path):
    with GMSClientMemoryManager(tap.path) as writer:
        writer.connect(RequestedLockType.RW)
        for number, size in enumerate((MIB, 5 * MIB, 2 * MIB)):
            name, _ = writer.allocate_handle(size, "weights")
            writer.metadata_put(f"k{number}", name, number, bytes([number]) * 9)
        writer.commit()
    ours = servers.start("ours")
    place = ("--device", "sim", "--socket-path")
    (saved,) = run("snapshot", "save", *place, tap.path, str(tmp_path / "one"))
    (loaded,) = run("snapshot", "load", *place, ours, str(tmp_path / "one"))
    run("snapshot", "save", *place, ours, str(tmp_path / "two"))
    run("snapshot", "load", *place, tap.path, str(tmp_path / "two"))
    check(tap)
    states = [Side(path).probe("get_runtime_state_request") for path in (ours, tap.server)]
    assert states[0] == states[1]
    hashes = {saved["layout_hash"], loaded["layout_hash"]}
    assert len(hashes) == 1 and hashes.pop().encode() in states[0][0][0]


def test_a_server_that_is_there_already(servers, tmp_path):
    """Neither server takes the other's place, and each says so in the same words."""
    path = servers.start("theirs")
    arguments = [COMMAND, "serve", "--device", "sim", "--tag", "t", "--socket-path", path]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"GMS already running at {path}" in done.stderr
    servers.processes[-1].kill()
    servers.processes[-1].wait()
    assert pathlib.Path(path).exists(), "a server that was killed leaves its socket"
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE)
    try:
        with GMSClientMemoryManager(path) as manager:
            manager.connect(RequestedLockType.RW)
    finally:
        process.terminate()
        process.wait(30)
        process.stderr.close()
