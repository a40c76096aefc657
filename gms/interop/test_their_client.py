"""The Python service's own client, as it is, at both servers: the same steps, the same outcome."""

import multiprocessing
import sys
import time
import types

import pytest
from cuda.bindings import driver as cuda
from gpu_memory_service.client.memory_manager import (
    GMSClientMemoryManager,
    StaleMemoryLayoutError,
)
from gpu_memory_service.client.session import _GMSClientSession
from gpu_memory_service.common import utils
from gpu_memory_service.common.locks import GrantedLockType, RequestedLockType
from peers import Side

MIB = 1 << 20
KINDS = ("theirs", "ours")


def use_device():
    """What PyTorch would have done: makes the device's primary context current."""
    (result,) = cuda.cuInit(0)
    result, device = cuda.cuDeviceGet(0)
    result, context = cuda.cuDevicePrimaryCtxRetain(device)
    (result,) = cuda.cuCtxSetCurrent(context)
    assert result == cuda.CUresult.CUDA_SUCCESS
    return device


def write(va, data):
    (result,) = cuda.cuMemcpyHtoD(va, data, len(data))
    assert result == cuda.CUresult.CUDA_SUCCESS


def read(va, size):
    data = bytearray(size)
    (result,) = cuda.cuMemcpyDtoH(data, va, size)
    return bytes(data) if result == cuda.CUresult.CUDA_SUCCESS else result


def may_write(va):
    return cuda.cuMemcpyHtoD(va, b"x", 1)[0] == cuda.CUresult.CUDA_SUCCESS


@pytest.fixture(autouse=True)
def device():
    return use_device()


def published(path):
    """What anybody can see of a server, with names of allocations as numbers."""
    side = Side(path)
    return side.probe("get_runtime_state_request"), side.probe("get_event_history_request")


def compare(servers, steps):
    outcomes, paths = [], []
    for kind in KINDS:
        paths.append(servers.start(kind))
        outcomes.append(steps(paths[-1]))
    assert outcomes[1] == outcomes[0]
    # A server may notice a connection's end a little after it answers the next one.
    deadline = time.monotonic() + 2
    while len({repr(published(path)) for path in paths}) > 1 and time.monotonic() < deadline:
        time.sleep(0.005)
    assert published(paths[1]) == published(paths[0])


def in_another_process(path, queue):
    use_device()
    with GMSClientMemoryManager(path) as reader:
        reader.connect(RequestedLockType.RO, timeout_ms=10_000)
        seen = []
        for handle in reader.list_handles():
            va = reader.create_mapping(allocation_id=handle.allocation_id)
            seen.append((handle.layout_slot, handle.tag, handle.size, read(va, 8), may_write(va)))
        queue.put((seen, reader.metadata_list(), reader.get_memory_layout_hash()))


def test_weights_are_written_published_and_read_elsewhere(servers):
    def steps(path):
        with GMSClientMemoryManager(path, device=0) as writer:
            writer.connect(RequestedLockType.RW_OR_RO)
            assert writer.granted_lock_type is GrantedLockType.RW
            vas = [writer.create_mapping(size=size, tag="weights") for size in (1, 3 * MIB, 8 * MIB)]
            for number, va in enumerate(vas):
                write(va, bytes([65 + number]) * 8)
                name = writer.mappings[va].allocation_id
                assert writer.metadata_put(f"layer.{number}", name, number, b"value")
            writer.destroy_mapping(writer.create_mapping(size=5 * MIB, tag="weights"))
            writer.commit()
            writer.connect(RequestedLockType.RO)
            writer.remap_all_vas()
            mine = [(read(va, 8), may_write(va)) for va in vas]
            spawn = multiprocessing.get_context("spawn")
            queue = spawn.Queue()
            process = spawn.Process(target=in_another_process, args=(path, queue))
            process.start()
            theirs = queue.get(timeout=60)
            process.join(60)
            return mine, theirs, process.exitcode

    compare(servers, steps)


def test_sleep_wake_and_another_layout(servers):
    def steps(path):
        seen = []
        manager = GMSClientMemoryManager(path)
        manager.connect(RequestedLockType.RW)
        va = manager.create_mapping(size=4 * MIB, tag="kv_cache")
        manager.unmap_all_vas()
        manager.abort()
        manager.connect(RequestedLockType.RW)
        manager.reallocate_all_handles("kv_cache")
        manager.remap_all_vas()
        write(va, b"anew")
        seen.append(read(va, 4))
        manager.commit()
        manager.connect(RequestedLockType.RO)
        manager.remap_all_vas()
        manager.unmap_all_vas()
        manager.abort()
        for size in (4 * MIB, 6 * MIB):
            with GMSClientMemoryManager(path) as other:
                other.connect(RequestedLockType.RW)
                other.create_mapping(size=size, tag="kv_cache")
                other.commit()
            manager.connect(RequestedLockType.RO)
            try:
                manager.remap_all_vas()
                seen.append("the same shape")
                manager.unmap_all_vas()
            except StaleMemoryLayoutError as error:
                seen.append(str(error))
            manager.abort()
        manager.close()
        return seen

    compare(servers, steps)


def test_a_seal_and_who_takes_over(servers):
    def steps(path):
        seen = []
        writer = GMSClientMemoryManager(path)
        writer.connect(RequestedLockType.RW_DATA_OR_RW)
        va = writer.create_mapping(size=4 * MIB, tag="kv_cache")
        write(va, b"kept")
        sealed = writer.commit_layout()
        seen.append((sealed.memory_layout_hash, sealed.granted_lock_type))
        with pytest.raises(RuntimeError) as refused:
            writer._client.allocate(1)
        seen.append(str(refused.value))
        writer.abort()
        writer.close()
        with GMSClientMemoryManager(path) as heir:
            heir.connect(RequestedLockType.RW_DATA_OR_RW)
            (handle,) = heir.list_handles()
            va = heir.create_mapping(allocation_id=handle.allocation_id)
            seen.append((heir.granted_lock_type, read(va, 4), may_write(va)))
        return seen

    compare(servers, steps)


def test_scratch_becomes_memory(servers):
    def steps(path):
        seen = []
        manager = GMSClientMemoryManager(path, scratch_size=4 * MIB)
        vas = [manager.create_scratch_mapping(size=size) for size in (9 * MIB, 2 * MIB)]
        write(vas[0], b"aliased!")
        seen.append((manager.scratch_summary(), read(vas[0] + 4 * MIB, 8), read(vas[1], 8)))
        manager.unmap_all_vas()
        manager.connect(RequestedLockType.RW)
        manager.prepare_scratch_for_reallocation()
        manager.reallocate_all_handles("kv_cache")
        manager.remap_all_vas()
        write(vas[0], b"real")
        seen.append((read(vas[0], 4), read(vas[0] + 4 * MIB, 4), read(vas[1], 4)))
        seen.append(
            [
                (handle.size, handle.aligned_size, handle.tag, handle.layout_slot)
                for handle in manager.list_handles()
            ]
        )
        manager.close()
        return seen

    compare(servers, steps)


def test_errors_and_locks(servers):
    def steps(path):
        texts = []

        def refused(error, call, *arguments):
            with pytest.raises(error) as raised:
                call(*arguments)
            texts.append(str(raised.value).replace(path, "PATH"))

        with _GMSClientSession(path, RequestedLockType.RW, None) as writer:
            refused(TimeoutError, _GMSClientSession, path, RequestedLockType.RO, 60)
            refused(TimeoutError, _GMSClientSession, path, RequestedLockType.RW_OR_RO, 60)
            refused(RuntimeError, writer.allocate, 0)
            refused(RuntimeError, writer.export, "nothing")
            refused(RuntimeError, writer.get_allocation, "nothing")
            refused(RuntimeError, writer.metadata_put, "k", "nothing", 0, b"")
            texts.append((writer.free("nothing"), writer.metadata_delete("nothing")))
            name, size = writer.allocate(5, "weights")
            texts.append(size)
            state = writer.get_lock_state()
            texts.append((state.state, state.waiting_writers, state.layout_committed))
            writer.metadata_put("k", name, 3, b"v")
            writer.commit()
        with _GMSClientSession(path, RequestedLockType.RW_OR_RO, 5000) as reader:
            texts.append((reader.lock_type, reader.committed))
            refused(RuntimeError, reader.allocate, 5)
            refused(RuntimeError, reader.commit)
            refused(TimeoutError, _GMSClientSession, path, RequestedLockType.RW, 60)
            texts.append(reader.metadata_get("k")[1:])
        return texts

    compare(servers, steps)


def test_the_usual_place_of_a_socket(servers, device, monkeypatch, short_path):
    """Where `vpmm serve` listens is where the Python client looks: NVML, which there is none of here,
    tells the device's identity as the driver does."""
    _, uuid = cuda.cuDeviceGetUuid(device)
    digits = bytes(uuid.bytes).hex()
    cuts = (0, 8, 12, 16, 20, 32)
    text = "GPU-" + "-".join(digits[a:b] for a, b in zip(cuts, cuts[1:], strict=False))
    nvml = types.ModuleType("pynvml")
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetUUID = lambda handle: text
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("GMS_SOCKET_DIR", short_path)
    utils.invalidate_uuid_cache()
    servers.start_at_the_usual_place()
    for tag in utils.GMS_TAGS:
        with _GMSClientSession(utils.get_socket_path(0, tag), RequestedLockType.RW, 10_000) as session:
            assert session.lock_type is GrantedLockType.RW
    utils.invalidate_uuid_cache()
