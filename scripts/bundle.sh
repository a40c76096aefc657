#!/usr/bin/env bash
# Makes a folder with the `vpmm` command, the test executables of the workspace, the
# traces and the recordings that tests replay, to be carried to a machine that has a GPU
# but no Rust:
#
#     scripts/bundle.sh [FOLDER]      (default: bundle)
#     FOLDER/run-tests.sh             (over there)
#
# Documentation tests are not in it: they are compiled one by one by rustdoc. Nor are
# tests of the sources, and those that build or run other programs of the workspace.
set -euo pipefail
[[ ${1:-} != -* ]] || { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2; exit 2; }
out=${1:+$(realpath -m "$1")}
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${out:-bundle}
limit_mib=256
# The tests that are left out, here and in other packages.
at_home=' examples header packages peers programs rooms '

if [[ -e $out && ! -e $out/.vpmm-bundle ]]; then
    echo "$out exists and is no bundle: not touching it" >&2
    exit 1
fi
rm -rf "$out"
mkdir -p "$out/bin" "$out/tests" "$out/traces"
touch "$out/.vpmm-bundle" # so that the next run knows that it may replace the folder

echo "Building the command"
cargo build --release --locked -p vpmm-cli --bin vpmm --message-format=json-render-diagnostics |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' |
    while read -r executable; do cp "$executable" "$out/bin/"; done

# Cargo tells each artifact as one line of JSON. A test executable is run in its
# package's folder, as cargo runs it, so its name here begins with that folder.
echo "Building the tests"
root=$PWD
cargo test --workspace --locked --features vpmm-harness/stub --no-run --message-format=json-render-diagnostics |
    grep '"reason":"compiler-artifact"' | grep '"profile":{[^}]*"test":true' | grep '"executable":"' |
    while read -r artifact; do
        executable=$(sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' <<<"$artifact")
        manifest=$(sed -n 's/.*"manifest_path":"\([^"]*\)".*/\1/p' <<<"$artifact")
        package=$(dirname "$manifest")
        package=${package#"$root"}
        package=${package#/}
        name=$(basename "$executable")
        [[ $at_home != *" ${name%-*} "* ]] || continue
        cp "$executable" "$out/tests/${package:-harness}--$name"
    done

strip --strip-all "$out"/bin/* "$out"/tests/*

# The stub libraries that the tests of loading open: the newest build's.
target=${CARGO_TARGET_DIR:-target}
stubs=$(ls -td "$target"/debug/build/vpmm-harness-*/out/stub | head -n 1)
cp -r "$stubs" "$out/stubs"

for trace in traces/*; do cp "$trace" "$out/traces/"; done
grep -rhoE 'benches/results/simulated-[0-9a-z-]+' tests | sort -u |
    while read -r folder; do
        mkdir -p "$out/$folder"
        cp "$folder"/*.csv.gz "$out/$folder/"
    done

commit=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
[[ -z $(git status --porcelain 2>/dev/null) ]] || commit+=' with uncommitted changes'
{
    echo "commit $commit"
    rustc --version
} >"$out/BUILD"

cat >"$out/run-tests.sh" <<'RUN'
#!/usr/bin/env bash
# Runs every test executable of this bundle, then replays every trace with --verify.
# Prints what failed and exits with 1 if anything did.
#
#     run-tests.sh [FILTER]       only test executables whose name holds FILTER
#     VPMM_TEST_SECONDS=300       how long one of them may take
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
filter=${1:-}
seconds=${VPMM_TEST_SECONDS:-300}
export VPMM_STUBS=$here/stubs
export CARGO_BIN_EXE_vpmm=$here/bin/vpmm
log=$(mktemp)
trap 'rm -f "$log"' EXIT

passed=0 failed=0 ignored=0 executables=0
broken=()
cat "$here/BUILD"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null || echo 'no nvidia-smi here'

for executable in "$here"/tests/*"$filter"*; do
    [[ -x $executable ]] || continue
    name=$(basename "$executable")
    package=${name%%--*}
    [[ $package == harness ]] && package=.
    mkdir -p "$here/$package" # empty folders may not have come along
    printf '\n=== %s\n' "$name"
    # What tests print is shown even when they pass: a skipped test says why.
    (cd "$here/$package" && CARGO_MANIFEST_DIR=$PWD timeout "$seconds" "$executable" --show-output) 2>&1 |
        tee "$log"
    status=${PIPESTATUS[0]}
    executables=$((executables + 1))
    ((status == 0)) || broken+=("$name (exit $status)")
    # "test result: ok. 12 passed; 0 failed; 1 ignored; ..."
    while read -r p f i; do
        passed=$((passed + p)) failed=$((failed + f)) ignored=$((ignored + i))
    done < <(sed -n 's/^test result: [^.]*\. \([0-9]*\) passed; \([0-9]*\) failed; \([0-9]*\) ignored.*/\1 \2 \3/p' "$log")
done

replays=0
if [[ -z $filter ]]; then
    for trace in "$here"/traces/*.csv*; do
        printf '\n=== replay %s\n' "$(basename "$trace")"
        if timeout "$seconds" "$here/bin/vpmm" replay "$trace" --device auto --allocator default,paged --verify; then
            replays=$((replays + 1))
        else
            broken+=("replay of $(basename "$trace") (exit $?)")
        fi
    done
fi

printf '\n=== %s tests passed, %s failed, %s ignored, in %s executables; %s traces replayed\n' \
    "$passed" "$failed" "$ignored" "$executables" "$replays"
if ((${#broken[@]} > 0)); then
    printf 'FAILED: %s\n' "${broken[@]}"
    exit 1
fi
((passed > 0)) || { echo 'FAILED: no test ran'; exit 1; }
RUN
chmod +x "$out/run-tests.sh"

echo
(cd "$out" && du -ah --max-depth=2 . | sort -k2 | grep -v '\./stubs/')
size_mib=$(du -sm "$out" | cut -f1)
echo "$out: $size_mib MiB of at most $limit_mib"
((size_mib < limit_mib))
