"""What CuPy, Numba and PyTorch are given, as far as it can be seen without a GPU. Each is skipped where the
library is not installed; none is needed otherwise."""

import os
import subprocess
import sys
import types

import pytest


def test_none_of_them_is_imported_unasked():
    program = (
        "import sys, vpmm, vpmm.torch, vpmm.cupy\n"
        "found = {'torch', 'cupy', 'numba', 'numpy'} & {*sys.modules}\n"
        "assert not found, found\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_cupy_s_allocator(monkeypatch):
    cupy = pytest.importorskip("cupy")
    import vpmm.cupy

    stream = types.SimpleNamespace(ptr=0)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: stream)
    monkeypatch.setattr(cupy.cuda.device, "get_device_id", lambda: 0)
    before = vpmm.statistics().live_bytes
    memory = vpmm.cupy.allocator(1000)
    assert memory.ptr and memory.mem.size == 1000
    assert vpmm.statistics().live_bytes == before + 1024
    del memory
    assert vpmm.statistics().live_bytes == before
    assert vpmm.cupy.allocator(0).ptr == 0
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError, match="memory held"):
        vpmm.cupy.allocator(1 << 50)


def test_numba_s_manager():
    pytest.importorskip("numba")
    import vpmm.numba

    device = types.SimpleNamespace(id=0)
    manager = vpmm.numba.VpmmNumbaManager(context=types.SimpleNamespace(device=device))
    assert manager.interface_version == 1
    assert vpmm.numba._numba_memory_manager is vpmm.numba.VpmmNumbaManager
    before = vpmm.statistics().live_bytes
    memory = manager.memalloc(1000)
    assert memory.size == 1000 and vpmm.statistics().live_bytes == before + 1024
    memory.free()
    assert vpmm.statistics().live_bytes == before
    info, now = manager.get_memory_info(), vpmm.statistics()
    assert 0 < info.free <= info.total
    # With what the pool holds free.
    assert now.mapped_bytes > now.live_bytes
    assert info.free == vpmm.device_memory()[0] + now.mapped_bytes - now.live_bytes
    with pytest.raises(NotImplementedError):
        manager.get_ipc_handle(memory)
    with pytest.raises(MemoryError):
        manager.memalloc(1 << 50)


def test_cupy_s_allocator_without_cupy():
    """What CuPy is asked for and given, where it is not installed."""
    program = """
import gc, sys, types
cupy, cuda = types.ModuleType("cupy"), types.SimpleNamespace(device=types.SimpleNamespace())
class OutOfMemoryError(MemoryError):
    def __init__(self, size, total): super().__init__(size, total)
class UnownedMemory:
    def __init__(self, ptr, size, owner, device_id):
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id
cuda.UnownedMemory, cuda.MemoryPointer = UnownedMemory, lambda memory, offset: memory
cuda.memory = types.SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
cuda.get_current_stream = lambda: types.SimpleNamespace(ptr=2)
cuda.device.get_device_id = lambda: 1
cupy.cuda = cuda
sys.modules["cupy"] = cupy

import vpmm.cupy
memory = vpmm.cupy.allocator(1000)
assert (memory.size, memory.device_id, memory.owner.stream) == (1000, 1, 2) and memory.ptr == memory.owner.ptr
assert vpmm.statistics(1).live_count == 1
del memory
gc.collect()
assert vpmm.statistics(1).live_count == 0
try:
    vpmm.cupy.allocator(1 << 50)
    raise SystemExit("there is no such memory")
except OutOfMemoryError as error:
    assert "memory held" in str(error)
counted = vpmm.mr.StatisticsResourceAdaptor(vpmm.mr.CudaMemoryResource(device=1))
memory = vpmm.cupy.allocator_of(counted)(1000)
assert counted.allocation_counts.current_count == 1 and memory.owner.mr is counted
"""
    environment = {**os.environ, "VPMM_DEVICE": "sim:1"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_numba_s_manager_without_numba():
    """What Numba is told, where it is not installed."""
    program = """
import collections, sys, types
class Manager:
    def __init__(self, context): self.context = context
    def initialize(self): pass
    def reset(self): pass
class Pointer:
    def __init__(self, context, pointer, size, finalizer):
        self.pointer, self.size, self.free = pointer, size, finalizer
numba, cuda = types.ModuleType("numba"), types.ModuleType("numba.cuda")
numba.cuda, cuda.HostOnlyCUDAMemoryManager, cuda.MemoryPointer = cuda, Manager, Pointer
cuda.MemoryInfo = collections.namedtuple("MemoryInfo", "free total")
sys.modules.update({"numba": numba, "numba.cuda": cuda})

import vpmm.numba
context = types.SimpleNamespace(device=types.SimpleNamespace(id=1))
manager = vpmm.numba.VpmmNumbaManager(context=context)
manager.initialize()
memory = manager.memalloc(1 << 20)
gone = manager.memalloc(8 << 20)
assert (memory.size, vpmm.statistics(1).live_bytes) == (1 << 20, 9 << 20) and memory.pointer
gone.free()
now, (free, total) = vpmm.statistics(1), vpmm.device_memory(1)
assert now.live_bytes == 1 << 20 and now.mapped_bytes >= 9 << 20
# With what the pool holds free.
assert manager.get_memory_info() == (free + now.mapped_bytes - now.live_bytes, total)
manager.reset()
assert vpmm.statistics(1).mapped_bytes < now.mapped_bytes and vpmm.device_memory(1)[0] > free
memory.free()

counted = vpmm.mr.StatisticsResourceAdaptor(vpmm.mr.CudaMemoryResource(device=1))
other = vpmm.numba.manager_of(counted)(context=context)
memory = other.memalloc(1000)
# What the process's pool has free is nothing to a resource of one's own.
assert vpmm.statistics(1).mapped_bytes > 0 and other.get_memory_info() == vpmm.device_memory(1)
assert counted.allocation_counts.current_count == 1
memory.free()
assert counted.allocation_counts.current_count == 0
"""
    environment = {**os.environ, "VPMM_DEVICE": "sim:1"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


def test_all_that_pytorch_is_told_is_there():
    import vpmm.torch

    names = [*vpmm.torch._SETTERS.values(), "vpmm_torch_alloc", "vpmm_torch_free"]
    addresses = {vpmm.torch._address(name) for name in names}
    assert len(addresses) == len(names) and all(addresses)
    assert vpmm.torch.failed_frees() == 0


def test_pytorch_s_allocator_is_set():
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C, "_cuda_customAllocator"):
        pytest.skip("a PyTorch without CUDA")
    program = (
        "import vpmm.torch, torch\n"
        "vpmm.torch.use(limit='1 GiB')\n"
        "assert vpmm.torch.allocator() is vpmm.torch.allocator()\n"
        "assert torch.cuda.memory_stats_as_nested_dict() == {}\n"
        "assert torch.cuda.memory_allocated() == 0\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


#: PyTorch, as far as `use` goes: an allocator cannot be changed once it is used.
_TORCH = """
import sys, types
class Plugged:
    def __init__(self, *_): pass
    def allocator(self): return self
    def __getattr__(self, name): return lambda address: None
def change(allocator):
    assert not changes, "Can't swap an already initialized allocator"
    changes.append(allocator)
changes = []
memory = types.ModuleType("torch.cuda.memory")
memory.CUDAPluggableAllocator, memory.change_current_allocator = Plugged, change
cuda, torch = types.ModuleType("torch.cuda"), types.ModuleType("torch")
torch.cuda, cuda.memory = cuda, memory
cuda.memory_stats = len
sys.modules.update({"torch": torch, "torch.cuda": cuda, "torch.cuda.memory": memory})
import vpmm, vpmm.torch
def refused(*arguments, **named):
    try:
        vpmm.torch.use(*arguments, **named)
    except vpmm.InUseError as error:
        return "was called before" in str(error)
"""


@pytest.mark.parametrize("first", ["vpmm.torch.use", "vpmm.configure"])
def test_pytorch_s_allocator_is_set_once(first):
    program = f"""
{first}(limit='1 GiB')
vpmm.torch.use(limit=1 << 30)
vpmm.Pool.of_process()
vpmm.torch.use()
vpmm.torch.use(limit='1 GiB')
assert refused(limit='2 GiB') and refused(profile="paged") and refused(report=False)
assert len(changes) == 1
"""
    subprocess.run([sys.executable, "-c", _TORCH + program], check=True)


def test_devices_may_be_set_one_after_another():
    program = """
vpmm.torch.use(0, limit='1 GiB')
vpmm.torch.use(1, limit='2 GiB')
assert refused(1, limit='3 GiB')
assert len(changes) == 1
"""
    subprocess.run([sys.executable, "-c", _TORCH + program], check=True)


def test_a_setup_that_failed_may_be_tried_again():
    """As a function does that Ray calls."""
    program = """
import vpmm, vpmm.ray
try:
    vpmm.ray.setup(limit="16 MiB", addresses="1 GiB", pool_size="32 MiB", history=10)
    raise SystemExit("more than the limit")
except vpmm.OutOfMemoryError:
    pass
vpmm.ray.setup(limit="16 MiB", addresses="1 GiB", pool_size="8 MiB", history=10)
vpmm.DeviceBuffer(1000).free()
assert vpmm.statistics().mapped_bytes >= 8 << 20 and vpmm.snapshot()["device_traces"][0]
# Once it is done it is.
vpmm.ray.setup(limit="1 GiB")
"""
    subprocess.run([sys.executable, "-c", program], check=True)
