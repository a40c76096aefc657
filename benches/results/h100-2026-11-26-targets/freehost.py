"""Whether cuMemFreeHost waits for work that uses the memory: a quarter of a second of work is before a copy from it."""

import ctypes
import time

import torch

BYTES = ctypes.c_size_t(1 << 20)
cuda = ctypes.CDLL("libcuda.so.1")
torch.zeros(1, device="cuda")
torch.cuda.synchronize()
for stream in (torch.cuda.Stream(), torch.cuda.default_stream()):
    host = ctypes.c_void_p()
    assert cuda.cuMemHostAlloc(ctypes.byref(host), BYTES, 0) == 0
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        device = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
        to, on = ctypes.c_uint64(device.data_ptr()), ctypes.c_void_p(stream.cuda_stream)
        assert cuda.cuMemcpyHtoDAsync_v2(to, host, BYTES, on) == 0
    start = time.perf_counter()
    code = cuda.cuMemFreeHost(host)
    took = (time.perf_counter() - start) * 1e3
    print(f"cuMemFreeHost {code} took {took:.1f} ms, the stream was done after it: {stream.query()}")
