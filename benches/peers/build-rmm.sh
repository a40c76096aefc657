#!/usr/bin/env bash
# Builds rmm.cpp into a folder that runs on a machine with a GPU and no compiler:
#
#     benches/peers/build-rmm.sh FOLDER
#     FOLDER/rmm-peer [replay] ...        (over there)
#
# Headers and libraries come from pip, kept in RMM_WHEELS or the user's cache; the folder holds
# the program and the three shared libraries that it needs beside the driver.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=${1:?usage: build-rmm.sh FOLDER}
# The CUDA runtime is pinned to what the driver of a CUDA 13.0 machine runs.
wheels=(librmm-cu13==26.10.0 rapids-logger==0.3.0
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88)

site=${RMM_WHEELS:-${XDG_CACHE_HOME:-$HOME/.cache}/vpmm-rmm-wheels}
if [[ $(cat "$site/.wheels" 2>/dev/null) != "${wheels[*]}" ]]; then
    # It is taken away, but only if this script has made it.
    if [[ ! -e $site/.wheels && -n $(ls -A "$site" 2>/dev/null) ]]; then
        echo "$site has something else in it: RMM_WHEELS must name a folder for these wheels alone" >&2
        exit 2
    fi
    rm -rf "$site"
    mkdir -p "$site"
    : >"$site/.wheels" # whatever comes of the rest
    python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
        --no-deps --target "$site" "${wheels[@]}"
    echo "${wheels[*]}" >"$site/.wheels"
fi

mkdir -p "$out"
cp "$site"/librmm/lib64/librmm.so "$site"/rapids_logger/lib64/librapids_logger.so \
    "$site"/nvidia/cu13/lib/libcudart.so.13 "$out/"
# shellcheck disable=SC2016 # $ORIGIN is for the dynamic linker
"${CXX:-g++}" -std=c++20 -O3 -DNDEBUG -Wall -Wextra "$here/rmm.cpp" -o "$out/rmm-peer" \
    -isystem "$site/librmm/include" -isystem "$site/librmm/include/rapids" \
    -isystem "$site/rapids_logger/include" -isystem "$site/nvidia/cu13/include" \
    "$out/librmm.so" "$out/librapids_logger.so" "$out/libcudart.so.13" \
    -pthread -Wl,-rpath,'$ORIGIN' -Wl,--disable-new-dtags
strip --strip-all "$out/rmm-peer"
du -sh "$out"
