"""Does mapping elsewhere stall kernels that run? Kernels in a loop, timed by events, beside a thread that moves
extents of 2 MiB at a rate."""

import ctypes, json, threading, time, statistics as S
import torch

cu = ctypes.CDLL("libcuda.so.1")
u64 = ctypes.c_uint64


class Loc(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Prop(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("loc", Loc),
        ("meta", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Acc(ctypes.Structure):
    _fields_ = [("loc", Loc), ("flags", ctypes.c_int)]


def ok(r, w=""):
    if r:
        raise RuntimeError(f"{w} {r}")


torch.zeros(1, device="cuda")
G = 2 << 20
N = 256
prop = Prop(type=1, handles=0, loc=Loc(1, 0))
acc = Acc(Loc(1, 0), 3)
va = u64()
ok(cu.cuMemAddressReserve(ctypes.byref(va), u64(2 * N * G), u64(0), u64(0), u64(0)))
H = []
for i in range(N):
    h = u64()
    ok(cu.cuMemCreate(ctypes.byref(h), u64(G), ctypes.byref(prop), u64(0)))
    H.append(h)
    ok(cu.cuMemMap(u64(va.value + i * G), u64(G), u64(0), h, u64(0)))
ok(cu.cuMemSetAccess(va, u64(N * G), ctypes.byref(acc), u64(1)))
at = list(range(N))
free = list(range(N, 2 * N))
stop = threading.Event()
rate = 0
moved = 0
took = []
ctx = ctypes.c_void_p()
cu.cuCtxGetCurrent(ctypes.byref(ctx))


def mover(rate):
    global moved
    cu.cuCtxSetCurrent(ctx)
    t0 = time.perf_counter()
    n = 0
    while not stop.is_set():
        due = t0 + n / rate
        while time.perf_counter() < due and not stop.is_set():
            time.sleep(0)
        a = time.perf_counter()
        to = free.pop(0)
        i = n % N
        ok(cu.cuMemUnmap(u64(va.value + at[i] * G), u64(G)))
        ok(cu.cuMemMap(u64(va.value + to * G), u64(G), u64(0), H[i], u64(0)))
        ok(cu.cuMemSetAccess(u64(va.value + to * G), u64(G), ctypes.byref(acc), u64(1)))
        free.append(at[i])
        at[i] = to
        n += 1
        took.append(time.perf_counter() - a)
    moved = n


x = torch.zeros(1 << 28, device="cuda")  # 1 GiB
m = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
o = torch.empty_like(m)
small = torch.zeros(1 << 20, device="cuda")
W = {
    "copy": lambda: x.add_(1),
    "matmul": lambda: torch.mm(m, m, out=o),
    "small": lambda: [small.add_(1) for _ in range(20)],
}
graphs = {}
for name, work in W.items():
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(20):
            work()
    graphs[name] = g


def measure(name, n=12):
    g = graphs[name]
    out = []
    for _ in range(n):
        a = torch.cuda.Event(enable_timing=True)
        b = torch.cuda.Event(enable_timing=True)
        a.record()
        g.replay()
        b.record()
        b.synchronize()
        out.append(a.elapsed_time(b))
    return S.median(out), min(out)


for turn in range(2):
    for rate in (0, 450, 2000, 10000, 40000):
        stop.clear()
        took.clear()
        t = None
        if rate:
            t = threading.Thread(target=mover, args=(rate,))
            t.start()
            time.sleep(0.02)
        r = {}
        for name in W:
            a = time.perf_counter()
            med, least = measure(name)
            r[name] = (round(med, 4), round(least, 4))
        if t:
            stop.set()
            t.join()
        print(
            json.dumps(
                {
                    "turn": turn,
                    "rate": rate,
                    "moved": moved if rate else 0,
                    "move_us": round(1e6 * S.median(took), 2) if took else None,
                    **r,
                }
            ),
            flush=True,
        )
