"""What sixteen threads of one process cost each other, and what sixteen processes of one thread do.

python3 procs.py VPMM ROUNDS        prints nanoseconds a call: each round and number, threads of one process and processes
"""
import json
import subprocess
import sys

vpmm, rounds = sys.argv[1], int(sys.argv[2])


def command(case):
    return [vpmm, "bench", "--case", case, "--allocator", "default", "--device", "sim", "--json"]


def took(output):
    return json.loads(output)["ns_per_op"]


for _ in range(rounds):
    for number in (1, 2, 4, 8, 16):
        threads = took(subprocess.check_output(command(f"threads_{number}"), text=True))
        each = [subprocess.Popen(["taskset", "-c", str(at), *command("threads_1")], stdout=subprocess.PIPE, text=True)
                for at in range(number)]
        found = sorted(took(process.communicate()[0]) for process in each)
        mean = sum(found) / number
        print(f"{number:2} threads {threads:.2f}  {number:2} processes {mean:.2f}, {found[0]:.2f} to {found[-1]:.2f}", flush=True)
