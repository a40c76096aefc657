#!/usr/bin/env python3
"""Builds torch.cpp against the installed PyTorch and runs it in each of its configurations.

    run-torch.py [--build-dir DIR] [--seconds N] [bench | replay TRACE.csv... | fit TRACE.csv...]

Prints what the program prints, one JSON object per line. Every configuration runs in a process of
its own, because PyTorch reads its settings once. Exit status 1 if any of them failed.
"""

import argparse
import glob
import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))

# Name in the results, and PYTORCH_CUDA_ALLOC_CONF.
CONFIGURATIONS = {
    "torch": "",
    "torch-expandable": "expandable_segments:True",
    "torch-cuda-async": "backend:cudaMallocAsync",
}


def cuda_runtime(library_folders):
    """The libcudart that PyTorch itself loads; the toolkit's where PyTorch has none of its own."""
    import torch

    site = os.path.dirname(os.path.dirname(torch.__file__))
    folders = sorted(glob.glob(os.path.join(site, "nvidia", "*", "lib"))) + library_folders
    for folder in folders:
        found = sorted(glob.glob(os.path.join(folder, "libcudart.so*")))
        if found:
            return found[0]
    raise SystemExit("no libcudart in " + ", ".join(folders))


def build(folder):
    """Compiles the program unless it is there and newer than its sources."""
    program = os.path.join(folder, "torch-peer")
    sources = [os.path.join(HERE, "torch.cpp"), *glob.glob(os.path.join(HERE, "harness", "*.hpp"))]
    if os.path.exists(program):
        if os.path.getmtime(program) > max(os.path.getmtime(source) for source in sources):
            return program

    try:
        from torch.utils import cpp_extension  # knows where PyTorch and CUDA are; seconds to import
    except ImportError as error:
        raise SystemExit(f"run-torch.py: PyTorch is not installed for {sys.executable}: {error}")

    libraries = cpp_extension.library_paths("cuda")
    runtime = cuda_runtime(libraries)
    command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O3", "-DNDEBUG"]
    command += [sources[0], "-o", program]
    for path in cpp_extension.include_paths("cuda"):
        command += ["-isystem", path]
    for path in libraries:
        command += ["-L" + path, "-Wl,-rpath," + path]
    command += ["-lc10_cuda", "-lc10", runtime, "-Wl,-rpath," + os.path.dirname(runtime)]
    command += ["-pthread"]
    print("#", " ".join(command), file=sys.stderr)
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"run-torch.py: the program is not built: {error}")
    return program


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build-dir", help="keep the program there; default: a temporary folder")
    parser.add_argument("--configurations", default=",".join(CONFIGURATIONS))
    parser.add_argument("--seconds", type=float, default=240, help="for each configuration")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")
    options = parser.parse_args()
    arguments = options.arguments
    if arguments[:1] == ["bench"]:
        arguments = arguments[1:]

    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.build_dir or temporary
        os.makedirs(folder, exist_ok=True)
        program = build(folder)
        for name in options.configurations.split(","):
            environment = dict(os.environ, PEER_NAME=name)
            environment.pop("PYTORCH_ALLOC_CONF", None)
            environment["PYTORCH_CUDA_ALLOC_CONF"] = CONFIGURATIONS[name]
            try:
                done = subprocess.run(
                    [program, *arguments], env=environment, timeout=options.seconds
                )
            except subprocess.TimeoutExpired:
                print(f"# {name}: not done after {options.seconds} s", file=sys.stderr)
                failed = True
                continue
            if done.returncode != 0:
                print(f"# {name}: exit status {done.returncode}", file=sys.stderr)
                failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
