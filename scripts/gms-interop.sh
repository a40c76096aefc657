#!/usr/bin/env bash
# The memory service beside the Python one: that one's own client at our server, our clients at its
# server, and the same requests to both with the answers compared to the byte. All on the simulator,
# which NVIDIA's Python bindings load as if it were the driver.
#
#     scripts/gms-interop.sh FOLDER [ARGUMENTS FOR PYTEST]
#
# GMS_SEEDS says how many random conversations there are.
#
# FOLDER holds the package gpu_memory_service (lib/ of a checkout of NVIDIA Dynamo), which is not part
# of this repository. Without it this says so, and is done. Installs maturin, cffi, cuda-bindings,
# msgspec, uvloop and pytest into a virtual environment of its own, from the package index.
set -euo pipefail
folder=${1:-}
if [[ ! -d $folder/gpu_memory_service ]]; then
    echo "skipped: no package gpu_memory_service in '${folder:-no folder named}'"
    exit 0
fi
shift
GMS_PYTHON=$(realpath "$folder")
export GMS_PYTHON
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Whole, as what is in it is used from other folders, too.
CARGO_TARGET_DIR=$(realpath -m "${CARGO_TARGET_DIR:-target}")
export CARGO_TARGET_DIR
environment=$CARGO_TARGET_DIR/gms-interop
packages=('maturin>=1.9,<2' 'cffi>=1.15' 'cuda-bindings>=13,<14' msgspec uvloop pytest)
# The stamp says what is there.
if [[ $(cat "$environment/.packages" 2>/dev/null) != "${packages[*]}" ]]; then
    rm -rf "$environment"
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}"
    echo "${packages[*]}" >"$environment/.packages"
fi
export PATH=$environment/bin:$PATH

MATURIN_PEP517_ARGS='--profile dev --locked' pip install --quiet --disable-pip-version-check \
    --no-build-isolation --no-deps --force-reinstall ./python
cargo build --quiet --locked -p vpmm-cli --bin vpmm
cargo build --quiet --locked -p vpmm-gms --example simulated_libcuda
mkdir -p "$environment/driver"
ln -sf "$CARGO_TARGET_DIR/debug/examples/libsimulated_libcuda.so" "$environment/driver/libcuda.so.1"

export VPMM_COMMAND=$CARGO_TARGET_DIR/debug/vpmm VPMM_DEVICE=sim
cd gms/interop
LD_LIBRARY_PATH=$environment/driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} \
    python -m pytest -p no:cacheprovider "$@" .
