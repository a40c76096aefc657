#!/usr/bin/env bash
# Makes a folder with everything that benchmarks need on a machine with a GPU, PyTorch and a C++
# compiler, but no Rust and no network:
#
#     scripts/bench-bundle.sh [FOLDER]        (default: target/bench-bundle)
#
# There, in a copy of this repository that has the folder:
#
#     benches/peers/side-by-side.sh --vpmm FOLDER/bin/vpmm --rmm FOLDER/rmm --out results.jsonl
#     FOLDER/bin/hot_paths --bench
#     FOLDER/bin/sleep --bytes 64GiB
set -euo pipefail
[[ ${1:-} != -* ]] || { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2; exit 2; }
out=${1:+$(realpath -m "$1")}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${out:-target/bench-bundle}
mkdir -p "$out/bin"

# executable NAME ARGUMENTS...: builds with these arguments and copies the program of that name.
executable() {
    local name=$1
    shift
    local built
    built=$(cargo "$@" --locked --message-format=json-render-diagnostics |
        grep "\"name\":\"$name\"" | sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')
    cp "$built" "$out/bin/$name"
}
executable vpmm build --release -p vpmm-cli --bin vpmm
executable hot_paths bench -p vpmm-harness --bench hot_paths --no-run
executable sleep bench -p vpmm-harness --bench sleep --no-run
strip --strip-all "$out"/bin/*

benches/peers/build-rmm.sh "$out/rmm"

commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
[[ -z $(git status --porcelain 2>/dev/null) ]] || commit+=' with uncommitted changes'
{
    echo "commit $commit"
    rustc --version
} >"$out/BUILD"
du -sh "$out"
