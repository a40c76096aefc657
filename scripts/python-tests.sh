#!/usr/bin/env bash
# Builds the Python package into a virtual environment of its own and runs its tests on the simulated
# device, and checks its types. Installs maturin, cffi, distributed (Dask), numpy, pytest and mypy there, from
# the package index.
#
#     scripts/python-tests.sh [--ray] [ARGUMENTS FOR PYTEST]
#
# With --ray it installs Ray as well (370 MB), once, and runs the tests with it, which are skipped
# otherwise.
#
# Without a Python of 3.10 or newer it says so, and is done.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if ! python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
    echo 'skipped: no Python of 3.10 or newer with venv'
    exit 0
fi

# Whole, as what is in it is used from other folders, too.
CARGO_TARGET_DIR=$(realpath -m "${CARGO_TARGET_DIR:-target}")
export CARGO_TARGET_DIR
environment=$CARGO_TARGET_DIR/python
packages=('maturin>=1.9,<2' 'cffi>=1.15' distributed numpy pytest 'mypy>=2,<3')
is_with_ray=
if [[ ${1:-} == --ray ]]; then
    is_with_ray=yes
    shift
fi
# The stamp says what is there.
if [[ $(cat "$environment/.packages" 2>/dev/null) != "${packages[*]}" ]]; then
    rm -rf "$environment"
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}"
    echo "${packages[*]}" >"$environment/.packages"
fi
export PATH=$environment/bin:$PATH
if [[ -n $is_with_ray ]]; then
    pip install --quiet --disable-pip-version-check ray
fi

# With the settings of the tests of the C ABI, so that cargo has built most of it before.
export MATURIN_PEP517_ARGS='--profile dev --locked' CARGO_PROFILE_DEV_OPT_LEVEL=1
pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall ./python
# The command, for the memory service's server; as its own tests build it.
cargo build --quiet --locked --profile test -p vpmm-cli --bin vpmm
export VPMM_COMMAND=$CARGO_TARGET_DIR/debug/vpmm
cd python
if (($# == 0)); then
    mypy --cache-dir "$environment/mypy"
fi
VPMM_DEVICE=sim python -m pytest tests "$@"
if (($# == 0)); then
    # For two GPUs; here so that it is not there that it runs for the first time.
    VPMM_DEVICE=sim python -m pytest tests_cuda/test_dask.py
    VPMM_DEVICE=sim:1 python -m pytest tests_cuda/test_gms_all.py
fi
