"""What the driver takes for a first GiB: addresses, one handle, its mapping, access; at addresses that are a
multiple of 1 GiB and at others, in reservations of several sizes, after pauses of several lengths. By turns;
medians in microseconds of 40 rounds each."""

import ctypes
import itertools
import random
import statistics
import time

GIB = 1 << 30
ROUNDS = 40

cuda = ctypes.CDLL("libcuda.so.1")


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 32),
    ]


class Access(ctypes.Structure):
    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code != 0:
        raise SystemExit(f"{name}: {code}")


def first_gib(reserved, alignment):
    """The time of each call."""
    base, handle = ctypes.c_uint64(), ctypes.c_uint64()
    size, nothing = ctypes.c_size_t, ctypes.c_uint64(0)
    calls = [
        ("cuMemAddressReserve", ctypes.byref(base), size(reserved), size(alignment), nothing, nothing),
        ("cuMemCreate", ctypes.byref(handle), size(GIB), ctypes.byref(properties), nothing),
        ("cuMemMap", base, size(GIB), size(0), handle, nothing),
        ("cuMemSetAccess", base, size(GIB), ctypes.byref(access), size(1)),
        ("cuMemUnmap", base, size(GIB)),
        ("cuMemRelease", handle),
        ("cuMemAddressFree", base, size(reserved)),
    ]
    times = []
    for name, *arguments in calls:
        start = time.perf_counter()
        call(name, *arguments)
        times.append((time.perf_counter() - start) * 1e6)
    return times


def compare(cases):
    times = {case: [] for case in cases}
    for _ in range(ROUNDS):
        random.shuffle(cases)
        for reserved, alignment, pause in cases:
            time.sleep(pause)
            times[reserved, alignment, pause].append(first_gib(reserved, alignment))
    print("reserved  aligned to  after    reserve  create  map  access  unmap  release  free  | growth: median  least")
    for case in sorted(times):
        medians = [statistics.median(round[at] for round in times[case]) for at in range(7)]
        growth = [sum(round[:4]) for round in times[case]]
        reserved, alignment, pause = case
        print(
            f"{reserved // GIB:4} GiB  {alignment // GIB or 'any':>5}  {pause * 1e3:6.0f} ms  ",
            "  ".join(f"{median:6.1f}" for median in medians),
            f" | {statistics.median(growth):6.1f}  {min(growth):6.1f}",
        )


device, context = ctypes.c_int(), ctypes.c_void_p()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
properties, access = Properties(), Access()
properties.type = properties.location.type = access.location.type = 1
access.flags = 3
compare(list(itertools.product([GIB, 64 * GIB, 1024 * GIB], [0, GIB], [0])))
compare(list(itertools.product([256 * GIB], [0, GIB], [0.001, 0.01])))
