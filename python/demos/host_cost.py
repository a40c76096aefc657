"""What a request and a free cost the host, measured from C++ that is built here (g++): through PyTorch with
its own allocator, with expandable segments, with vpmm's plug-in, and with a plug-in that does nothing, which
leaves PyTorch's wrapper; and the plug-in's two functions by themselves.

    python python/demos/host_cost.py            all of them, each in a process of its own: JSON, a line each
    python python/demos/host_cost.py raw        one
    python python/demos/host_cost.py vpmm --case "1 MiB" --folder /tmp/built

The library is built once for all, or stays in a folder for the next time. `raw` needs no PyTorch, and runs on
the simulated device with VPMM_DEVICE=sim.
"""

import argparse
import ctypes
import functools
import json
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile

WAYS = ("raw", "nothing", "vpmm", "torch", "expandable")
MIB = 1 << 20
ROUNDS = 15
STEPS = 50_000

#: Sizes, and how many blocks are live.
CASES = {
    "512 B": ([512], 1),
    "64 KiB": ([64 << 10], 1),
    "1 MiB": ([MIB], 1),
    "20 MiB": ([20 * MIB], 1),
    "to 4 MiB, 100 live": ([random.Random(1).randrange(1, 4 * MIB) for _ in range(997)], 100),
}


def build(folder, with_torch):
    """The library of host_cost.cpp, if it is not there."""
    source = pathlib.Path(__file__).with_name("host_cost.cpp")
    library = folder / ("host_cost_torch.so" if with_torch else "host_cost.so")
    if library.exists():
        return ctypes.CDLL(str(library))
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)]
    if with_torch:
        import torch
        from torch.utils import cpp_extension

        home = cpp_extension.CUDA_HOME or "/usr/local/cuda"
        folders = [*cpp_extension.include_paths(), os.path.join(home, "include")]
        # The headers of NVIDIA's wheels, where there is no toolkit.
        folders += map(str, pathlib.Path(torch.__file__).parents[1].glob("nvidia/cu*/include"))
        libraries = os.path.join(os.path.dirname(torch.__file__), "lib")
        command += ["-DWITH_TORCH", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
        command += [f"-isystem{folder}" for folder in folders]
        command += [f"-L{libraries}", "-lc10", "-lc10_cuda", f"-Wl,-rpath,{libraries}"]
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        sys.exit("there is no g++, which builds what measures")
    except subprocess.CalledProcessError as error:
        # It has said why.
        sys.exit(f"g++ has failed with {error.returncode}")
    return ctypes.CDLL(str(library))


def measure(way, cases, call, stream_name, stream):
    """Prints a line for each case."""
    for case in cases:
        sizes, live = CASES[case]
        array = (ctypes.c_size_t * len(sizes))(*sizes)
        out = (ctypes.c_double * ROUNDS)()
        numbers = map(ctypes.c_size_t, (len(sizes), live, STEPS, ROUNDS))
        if call(ctypes.c_void_p(stream), array, *numbers, out):
            sys.exit(f"{way}, {case}: failed")
        print(
            json.dumps(
                {
                    "way": way,
                    "stream": stream_name,
                    "case": case,
                    "min_ns": round(min(out), 1),
                    "median_ns": round(statistics.median(out), 1),
                }
            ),
            flush=True,
        )


def run(way, cases, folder):
    """One of them, in this process."""
    if way == "raw":
        from vpmm import _library

        library = build(folder, with_torch=False)
        plugin = ctypes.CDLL(_library.path())
        functions = [
            ctypes.cast(getattr(plugin, name), ctypes.c_void_p)
            for name in ("vpmm_torch_alloc", "vpmm_torch_free")
        ]
        measure(way, cases, functools.partial(library.host_cost_raw, *functions), "default", None)
        return
    # What the environment says would be measured under another name; the former has the last word.
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        os.environ.pop(variable, None)
    if way == "expandable":
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    import torch

    library = build(folder, with_torch=True)
    if way == "vpmm":
        import vpmm.torch

        vpmm.torch.use()
    elif way == "nothing":
        plugin = torch.cuda.memory.CUDAPluggableAllocator(
            library._name, "host_cost_nothing_alloc", "host_cost_nothing_free"
        )
        torch.cuda.memory.change_current_allocator(plugin)
    torch.cuda.init()
    measure(way, cases, library.host_cost_torch, "default", None)
    measure(way, cases, library.host_cost_torch, "side", torch.cuda.Stream().cuda_stream)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("way", nargs="?", choices=WAYS)
    parser.add_argument("--case", action="append", choices=CASES, help="one of them; may be given again")
    parser.add_argument("--folder", type=pathlib.Path, help="where what is built stays")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        # Whole: a library's name without a folder would be looked for elsewhere.
        folder = (args.folder or pathlib.Path(made)).resolve()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--folder: {error}")
        if args.way:
            run(args.way, args.case or list(CASES), folder)
            return
        named = [word for case in args.case or () for word in ("--case", case)]
        for way in WAYS:
            command = [sys.executable, __file__, way, "--folder", str(folder), *named]
            status = subprocess.run(command).returncode
            if status:
                # It has said why.
                sys.exit(status)


if __name__ == "__main__":
    main()
