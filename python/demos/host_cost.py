"""What an allocation and a free cost the host through PyTorch: a loop of raw requests in Python, which
costs the same under each allocator beside the requests themselves.

    python python/demos/host_cost.py            runs all three, each in a process of its own
"""

import json
import os
import subprocess
import sys
import time

ALLOCATORS = ("torch", "expandable", "vpmm")
SIZES = (512, 64 << 10, 1 << 20, 20 << 20)


def measure(name):
    if name == "expandable":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    import torch

    if name == "vpmm":
        import vpmm.torch

        vpmm.torch.use()
    torch.cuda.init()
    allocate = torch._C._cuda_cudaCachingAllocator_raw_alloc
    free = torch._C._cuda_cudaCachingAllocator_raw_delete

    def per_call(stream, size, calls=100_000):
        best = float("inf")
        for _ in range(5):
            begin = time.perf_counter_ns()
            for _ in range(calls):
                free(allocate(size, stream))
            best = min(best, (time.perf_counter_ns() - begin) / (2 * calls))
        return round(best, 1)

    side = torch.cuda.Stream().cuda_stream
    result = {"allocator": name}
    for label, stream in (("default stream", 0), ("side stream", side)):
        result[label] = {str(size): per_call(stream, size) for size in SIZES}
    # The same loop around nothing.
    begin = time.perf_counter_ns()
    nothing = int
    for _ in range(100_000):
        nothing(nothing(0))
    result["loop_ns"] = round((time.perf_counter_ns() - begin) / 200_000, 1)
    print(json.dumps(result))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(sys.argv[1])
    else:
        for allocator in ALLOCATORS:
            subprocess.run([sys.executable, __file__, allocator], check=True)
