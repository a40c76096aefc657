#!/usr/bin/env bash
# Builds a wheel of the Python package for every Linux with glibc 2.17 or newer (manylinux2014), and checks it:
# its tag, exceptions of C++ that pass through it, and that it does something where it is installed. Installs
# maturin, zig, auditwheel and cffi, from the package index, into environments of its own. Needs gcc.
#
#     scripts/python-wheel.sh [FOLDER]
#
# The wheel goes to the folder, else to target/wheels-of-vpmm.
set -euo pipefail
[[ ${1:-} != -* ]] || { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2; exit 2; }
folder=${1:+$(realpath -m "$1")}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Whole, as what is in it is used from other folders, too.
CARGO_TARGET_DIR=$(realpath -m "${CARGO_TARGET_DIR:-target}")
export CARGO_TARGET_DIR
folder=${folder:-$CARGO_TARGET_DIR/wheels-of-vpmm}
environment=$CARGO_TARGET_DIR/python-wheel
packages=('maturin>=1.9,<2' 'cffi>=1.15' 'ziglang==0.17.*' 'auditwheel>=6,<7')
# The stamp says what is there.
if [[ $(cat "$environment/.packages" 2>/dev/null) != "${packages[*]}" ]]; then
    rm -rf "$environment"
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}"
    echo "${packages[*]}" >"$environment/.packages"
fi
export PATH=$environment/bin:$PATH

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Zig has its linker leave out newer symbols of glibc. It would also put an unwinder of its own into the library,
# though, and what PyTorch throws passes through that by the system's: the process ended with a signal. So the
# system's is named before Zig looks for one; what that needs of a newer glibc is nothing to the library.
unwinder=$(gcc -print-file-name=libgcc_s.so.1)
[[ -e $unwinder ]] || { echo "gcc has no libgcc_s.so.1" >&2; exit 1; }
(
    cd python
    maturin build --release --locked --zig --target "$(uname -m)-unknown-linux-gnu" \
        --compatibility manylinux2014 --out "$scratch" \
        -- "-Clink-arg=$unwinder" -Clink-arg=-Wl,--allow-shlib-undefined
)
wheel=("$scratch"/*.whl)

auditwheel show "$wheel" >"$scratch/audit"
for found in manylinux_2_17 libgcc_s.so.1; do
    grep -q "$found" "$scratch/audit" || { cat "$scratch/audit" >&2; exit 1; }
done

# Where it is installed, and nothing else.
python3 -m venv "$scratch/installed"
"$scratch/installed/bin/pip" install --quiet --disable-pip-version-check "$wheel"
export VPMM_DEVICE=sim
file=$(cd "$scratch" && installed/bin/python -c '
import vpmm.torch
assert vpmm.DeviceBuffer.from_bytes(b"abc").to_bytes() == b"abc"
assert all(map(vpmm.torch._address, vpmm.torch._SETTERS.values()))
print(vpmm._library.path())
')

# As vpmm-capi/tests/programs.rs has it: with PyTorch's exceptions, and without them.
ln -s "$file" "$scratch/libvpmm.so"
compile=(g++ -std=c++17 -O1 -I vpmm-capi/include)
"${compile[@]}" -shared -fPIC -Wl,-soname,libc10.so -o "$scratch/libc10.so" vpmm-capi/tests/c/c10.cpp
for c10 in '' "$scratch/libc10.so"; do
    "${compile[@]}" vpmm-capi/tests/c/torch.cpp ${c10:+-DWITH_C10 "$c10"} -o "$scratch/torch" \
        -L "$scratch" -lvpmm -lpthread -ldl -lm
    LD_LIBRARY_PATH=$scratch "$scratch/torch"
done

mkdir -p "$folder"
mv "$wheel" "$folder/"
echo "$folder/$(basename "$wheel")"
