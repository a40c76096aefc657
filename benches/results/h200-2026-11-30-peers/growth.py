"""What growth takes with memory that another GPU may use, some of which is open to it already, beside what it takes without."""

import json
import statistics
import time

import vpmm

MIB = 1 << 20
CASES = {"grow_1GiB": [1024 * MIB], "grow_512x2MiB": [2 * MIB] * 512, "grow_64x16MiB": [16 * MIB] * 64}

vpmm.Pool(1).malloc(1)  # the other device's context
held = vpmm.Pool(0)
held.set_access(1)
held.malloc(2 * MIB)
for peer in (False, True, False, True):
    for name, sizes in CASES.items():
        times = []
        for _ in range(12):
            time.sleep(0.02)
            pool = vpmm.Pool(0, addresses="64 GiB")
            if peer:
                pool.set_access(1)
            start = time.perf_counter()
            made = [pool.malloc(size) for size in sizes]
            times.append(1e6 * (time.perf_counter() - start))
            for address in made:
                pool.free(address)
            del pool
        line = {"case": name, "peer": peer, "us_min": round(min(times)), "us_median": round(statistics.median(times))}
        print(json.dumps(line), flush=True)
