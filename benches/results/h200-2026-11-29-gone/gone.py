"""What becomes of memory of cuMemCreate when the context that it was mapped in goes. Needs nothing but the driver.

    python3 gone.py failed|reset|reset-running|failed-then-reset [alone]
"""

import ctypes
import subprocess
import sys
import time
from ctypes import byref, c_int, c_size_t, c_ulonglong, c_void_p

GRANULE = 2 << 20
HANDLES = 64
BYTES = 128 << 20
driver = ctypes.CDLL("libcuda.so.1")
PTX = b""".version 7.0
.target sm_50
.address_size 64
.visible .entry stray() {
    .reg .b64 %at;
    .reg .b32 %value;
    mov.u64 %at, 16;
    mov.u32 %value, 1;
    st.global.u32 [%at], %value;
    ret;
}
.visible .entry run(.param .u64 memory, .param .u64 count, .param .u64 length) {
    .reg .b64 %memory, %count, %length, %start, %now;
    .reg .b32 %value;
    .reg .pred %on;
    ld.param.u64 %memory, [memory];
    ld.param.u64 %count, [count];
    ld.param.u64 %length, [length];
    mov.u64 %start, %globaltimer;
    mov.u32 %value, 0;
again:
    add.u32 %value, %value, 1;
    st.volatile.global.u32 [%memory], %value;
    st.volatile.global.u32 [%count], %value;
    membar.sys;
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %on, %now, %length;
    @%on bra again;
    ret;
}
\0"""


class Kind(ctypes.Structure):
    """Memory of device 0, pinned."""

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", c_int * 2),
        ("windows", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    _fields_ = [("location", c_int * 2), ("flags", c_int)]


def done(name, *arguments):
    code = getattr(driver, name)(*arguments)
    assert code == 0, f"{name}: {code}"


def made(name, of, *arguments):
    """What a call makes that writes it behind its first pointer."""
    value = of()
    done(name, byref(value), *arguments)
    return value


def size(number):
    return c_size_t(number)


def tell(name, *arguments):
    start = time.perf_counter()
    code = getattr(driver, name)(*arguments)
    print(name, code, f"{(time.perf_counter() - start) * 1e3:.1f} ms", flush=True)


def used():
    """MiB of the device, as nvidia-smi counts them."""
    time.sleep(0.3)
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout)


def launch(kernel, stream, *values):
    arguments = (c_void_p * len(values))(*[ctypes.cast(byref(value), c_void_p) for value in values])
    done("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, arguments if values else None, None)


NOTHING = c_ulonglong(0)
how = sys.argv[1]
kind = Kind(type=1, location=(1, 0))
access = Access(location=(1, 0), flags=3)
done("cuInit", 0)
device = made("cuDeviceGet", c_int, 0)
context = made("cuDevicePrimaryCtxRetain", c_void_p, device)
alone = "alone" in sys.argv
if not alone:
    beside = made("cuCtxCreate_v2", c_void_p, 0, device)
    of_beside = made("cuStreamCreate", c_void_p, 1)
done("cuCtxSetCurrent", context)
print(*sys.argv[1:], "| used before", used())
streams = [made("cuStreamCreate", c_void_p, 1) for _ in range(2)]
memory = made("cuMemAddressReserve", c_ulonglong, size(HANDLES * BYTES), size(0), NOTHING, NOTHING)
handles = [made("cuMemCreate", c_ulonglong, size(BYTES), byref(kind), NOTHING) for _ in range(HANDLES)]
for i, handle in enumerate(handles):
    done("cuMemMap", c_ulonglong(memory.value + i * BYTES), size(BYTES), size(0), handle, NOTHING)
done("cuMemSetAccess", memory, size(HANDLES * BYTES), byref(access), size(1))
print("used with", HANDLES * BYTES >> 20, "MiB mapped", used())
module = made("cuModuleLoadData", c_void_p, PTX)
stray = made("cuModuleGetFunction", c_void_p, module, b"stray")
run = made("cuModuleGetFunction", c_void_p, module, b"run")
count = made("cuMemHostAlloc", c_void_p, size(4096), 3)
seen = ctypes.cast(count, ctypes.POINTER(ctypes.c_uint32))
seen[0] = 0


def running():
    first = seen[0]
    time.sleep(0.05)
    return seen[0] - first


if how != "reset":
    launch(run, streams[0], memory, c_ulonglong(count.value), c_ulonglong(6_000_000_000))
    time.sleep(0.2)
    print("steps of a kernel in 50 ms", running())
if how.startswith("failed"):
    launch(stray, streams[1])
    tell("cuStreamSynchronize", streams[1])
    print("the other kernel after that", running())
    if not alone:
        done("cuCtxSetCurrent", beside)
        print("a context beside it:")
        tell("cuStreamQuery", of_beside)
        tell("cuMemsetD32Async", memory, 1, size(1024), of_beside)
        tell("cuStreamSynchronize", of_beside)
        done("cuCtxSetCurrent", context)
if how != "failed":
    tell("cuDevicePrimaryCtxReset_v2", device)
    current = c_void_p()
    tell("cuCtxGetCurrent", byref(current))
    print("current is", "the old one" if current.value == context.value else current.value)
if how == "reset":
    done("cuCtxSetCurrent", None)
print("used then", used())
for i in range(HANDLES):
    code = driver.cuMemUnmap(c_ulonglong(memory.value + i * BYTES), size(BYTES))
    if code or i == 0:
        print("cuMemUnmap", code)
print("used when unmapped", used())
print("cuMemRelease", sorted({driver.cuMemRelease(handle) for handle in handles}))
print("used when released", used())
tell("cuMemAddressFree", memory, size(HANDLES * BYTES))
if how == "failed":
    tell("cuDevicePrimaryCtxReset_v2", device)
    print("used when reset", used())
done("cuCtxSetCurrent", None)
again = c_void_p()
tell("cuDevicePrimaryCtxRetain", byref(again), device)
tell("cuCtxSetCurrent", again)
plain = c_ulonglong()
tell("cuMemAlloc_v2", byref(plain), size(HANDLES * BYTES))
tell("cuMemsetD8_v2", plain, 0, size(HANDLES * BYTES))
tell("cuCtxSynchronize")
print("used by a new context", used())
