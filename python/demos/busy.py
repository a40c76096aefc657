"""How long a GPU works during some steps, by PyTorch's profiler: the rest it waits for the host."""

import json
import pathlib
import tempfile
import time

#: What a trace calls the work of a GPU.
KINDS = {"kernel", "gpu_memcpy", "gpu_memset"}


def together(stretches):
    """How long at least one of some stretches of time, pairs of begin and end, goes on."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(stretches):
        total += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return total


def profiled(torch, work):
    """Calls a function that ends when the GPU has done its work; the seconds that this took, the profiler's
    own cost included, and those in which the GPU worked."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        begin = time.perf_counter()
        work()
        wall = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        trace = pathlib.Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    worked = [event for event in events if event.get("cat") in KINDS]
    stretches = [(event["ts"], event["ts"] + event["dur"]) for event in worked]
    return {"wall_s": wall, "busy_s": together(stretches) / 1e6, "launches": len(worked)}
