"""What PyTorch's own allocator was asked for, as a log in RMM's format, for `vpmm replay`."""

import csv
import gzip


def begin(torch):
    """Has PyTorch write down every allocation and free from now on."""
    torch.cuda.memory._record_memory_history(max_entries=1 << 24, context=None, stacks="python")


def end(torch, path):
    """Writes what came since: a row for each allocation and each free, by streams in the order in which they
    came. Threads are not known. What is used on further streams beside is not in such a log."""
    torch.cuda.synchronize()
    events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    actions = {"alloc": "allocate", "free_requested": "free"}
    streams = {0: 0}
    live = {}
    start = None
    with gzip.open(path, "wt", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["Thread", "Time", "Action", "Pointer", "Size", "Stream"])
        for event in events:
            action = actions.get(event["action"])
            # What failed has none.
            address = event.get("addr")
            if action is None or (action == "free" and address not in live):
                continue
            if action == "allocate":
                live[address] = event["size"]
            size = live[address] if action == "allocate" else live.pop(address)
            start = event["time_us"] if start is None else start
            seconds, micros = divmod(event["time_us"] - start, 10**6)
            time = f"{seconds // 3600 % 24:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{micros:06}"
            stream = streams.setdefault(event["stream"], len(streams))
            rows.writerow([1, time, action, hex(address), size, stream])
