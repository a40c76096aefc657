"""What the driver's calls answer once a kernel has written where there is no memory. Needs nothing but the driver.

    python3 failed.py
"""

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p

GRANULE = 2 << 20
driver = ctypes.CDLL("libcuda.so.1")
STRAY = b""".version 7.0
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


NOTHING = c_ulonglong(0)
kind = Kind(type=1, location=(1, 0))
access = Access(location=(1, 0), flags=3)
done("cuInit", 0)
device = made("cuDeviceGet", c_int, 0)
context = made("cuDevicePrimaryCtxRetain", c_void_p, device)
done("cuCtxSetCurrent", context)
streams = [made("cuStreamCreate", c_void_p, 1) for _ in range(6)]
events = [made("cuEventCreate", c_void_p, 2) for _ in range(6)]
done("cuEventRecord", events[0], streams[0])
done("cuStreamSynchronize", streams[0])
mapped = made("cuMemAddressReserve", c_ulonglong, size(8 * GRANULE), size(0), NOTHING, NOTHING)
free = made("cuMemAddressReserve", c_ulonglong, size(GRANULE), size(0), NOTHING, NOTHING)
handles = [made("cuMemCreate", c_ulonglong, size(GRANULE), byref(kind), NOTHING) for _ in range(4)]
done("cuMemMap", mapped, size(GRANULE), size(0), handles[0], NOTHING)
done("cuMemSetAccess", mapped, size(GRANULE), byref(access), size(1))
plain = made("cuMemAlloc_v2", c_ulonglong, size(GRANULE))
locked = made("cuMemHostAlloc", c_void_p, size(4096), 3)
pool = made("cuDeviceGetDefaultMemPool", c_void_p, device)
ordered = made("cuMemAllocAsync", c_ulonglong, size(GRANULE), streams[1])
module = made("cuModuleLoadData", c_void_p, STRAY)
stray = made("cuModuleGetFunction", c_void_p, module, b"stray")
done("cuLaunchKernel", stray, 1, 1, 1, 1, 1, 1, 0, streams[2], None, None)
print("sync", driver.cuStreamSynchronize(streams[2]))

handle, number, long, flags = c_void_p(), c_int(), c_ulonglong(), c_uint()
left, total = c_size_t(), c_size_t()
for name, *arguments in [
    ("cuCtxGetCurrent", byref(handle)),
    ("cuCtxSetCurrent", context),
    ("cuCtxGetId", context, byref(long)),
    ("cuCtxSynchronize",),
    ("cuDeviceGetAttribute", byref(number), 16, device),
    ("cuMemGetInfo_v2", byref(left), byref(total)),
    ("cuStreamIsCapturing", streams[0], byref(number)),
    ("cuStreamGetId", streams[0], byref(long)),
    ("cuStreamGetCtx", streams[0], byref(handle)),
    ("cuStreamGetFlags", streams[0], byref(flags)),
    ("cuThreadExchangeStreamCaptureMode", byref(number)),
    ("cuStreamQuery", streams[0]),
    ("cuStreamSynchronize", streams[0]),
    ("cuEventQuery", events[0]),
    ("cuEventSynchronize", events[0]),
    ("cuEventRecord", events[1], streams[0]),
    ("cuStreamWaitEvent", streams[0], events[0], 0),
    ("cuStreamCreate", byref(handle), 1),
    ("cuEventCreate", byref(handle), 2),
    ("cuStreamDestroy_v2", streams[3]),
    ("cuEventDestroy_v2", events[3]),
    ("cuMemCreate", byref(long), size(GRANULE), byref(kind), NOTHING),
    ("cuMemAddressReserve", byref(long), size(GRANULE), size(0), NOTHING, NOTHING),
    ("cuMemMap", c_ulonglong(mapped.value + GRANULE), size(GRANULE), size(0), handles[1], NOTHING),
    ("cuMemSetAccess", mapped, size(GRANULE), byref(access), size(1)),
    ("cuMemUnmap", mapped, size(GRANULE)),
    ("cuMemRelease", handles[0]),
    ("cuMemRelease", handles[3]),
    ("cuMemAddressFree", free, size(GRANULE)),
    ("cuMemFree_v2", plain),
    ("cuMemFreeHost", locked),
    ("cuMemAllocAsync", byref(long), size(GRANULE), streams[0]),
    ("cuMemFreeAsync", ordered, streams[1]),
    ("cuMemPoolTrimTo", pool, size(0)),
    ("cuPointerGetAttribute", byref(handle), 1, plain),
    ("cuMemsetD8Async", plain, 0, size(16), streams[0]),
    ("cuDeviceGetDefaultMemPool", byref(handle), device),
    ("cuMemGetAllocationGranularity", byref(left), byref(kind), 0),
    ("cuStreamBeginCapture_v2", streams[4], 2),
    ("cuModuleUnload", module),
    ("cuDevicePrimaryCtxRelease_v2", device),
    ("cuDeviceGet", byref(number), 0),
    ("cuDriverGetVersion", byref(number)),
]:
    print(name, getattr(driver, name)(*arguments))
