"""What cuMemCreate takes after memory was given back. Needs nothing but the driver.

    python3 scrub.py
"""

import ctypes
import time

GIB, MIB = 1 << 30, 1 << 20
driver = ctypes.CDLL("libcuda.so.1")


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Kind(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


def call(name, *arguments):
    """Microseconds that it took."""
    began = time.perf_counter_ns()
    code = getattr(driver, name)(*arguments)
    took = (time.perf_counter_ns() - began) / 1e3
    if code != 0:
        raise RuntimeError(f"{name}: {code}")
    return took


def create(size):
    """A handle, and the microseconds that it took."""
    handle = ctypes.c_uint64()
    kind = Kind(type=1, location=Location(type=1, id=0))
    took = call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(kind), ctypes.c_uint64(0))
    return handle, took


def small():
    """What the smallest handle takes."""
    handle, took = create(2 * MIB)
    call("cuMemRelease", handle)
    return took


def give_back(gibibytes, each):
    """Milliseconds that it took."""
    handles = [create(each)[0] for _ in range(gibibytes * GIB // each)]
    small()
    return sum(call("cuMemRelease", handle) for handle in handles) / 1e3


call("cuInit", 0)
context = ctypes.c_void_p()
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxPushCurrent_v2", context)

print("at once after so much was given back: a small handle every millisecond")
for gibibytes, each in ((1, GIB), (8, GIB), (8, 64 * MIB), (40, GIB), (80, GIB)):
    released = give_back(gibibytes, each)
    began, created = time.perf_counter(), []
    while time.perf_counter() - began < 0.004 * gibibytes + 0.01:
        now = time.perf_counter()
        created.append(small())
        while time.perf_counter() - now < 0.001:
            pass
    slow = [took for took in created if took > 100]
    print(
        f"{gibibytes} GiB of {each // MIB} MiB (given back in {released:.1f} ms): {len(created)} created, "
        f"{len(slow)} took over 100 µs, {sum(slow) / 1e3:.1f} ms together, {max(created):.0f} µs at most"
    )

print("some time after so much was given back: six small handles, µs each")
for gibibytes in (1, 8, 40, 80):
    for wait in (0.02, 0.1, 0.3):
        give_back(gibibytes, GIB)
        time.sleep(wait)
        print(f"{gibibytes} GiB, {wait * 1e3:.0f} ms:", *(round(small()) for _ in range(6)))
