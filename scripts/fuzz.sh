#!/usr/bin/env bash
# Looks for inputs that break what parses, and for programs that break a pool or graphs' pools of either profile, or a
# stack of resources, by what they reach in the code (libFuzzer). Needs a nightly Rust, a C++ compiler and Python;
# installs cargo-fuzz into target/fuzz.
#
#     scripts/fuzz.sh [--seconds N] [TARGET...]
#
#   --seconds N   how long each is tried; default 60
#   TARGET...     captures, frames, pool, resources, texts, traces (tests/fuzz); default all
#
# What was found to reach something stays in target/fuzz/corpus for the next time; what breaks something is put into
# target/fuzz/broken, and the exit status is then 1. Such an input is run again with
# `target/fuzz/build/*/release/TARGET FILE`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2; exit 2; }
seconds=60 targets=()
while (($# > 0)); do
    case $1 in
    --seconds)
        [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || usage
        seconds=$2
        shift 2
        ;;
    captures | frames | pool | resources | texts | traces) targets+=("$1") && shift ;;
    *) usage ;;
    esac
done
((${#targets[@]} > 0)) || targets=(captures frames pool resources texts traces)

folder=$(realpath -m "${CARGO_TARGET_DIR:-target}")/fuzz
rustup toolchain list 2>/dev/null | grep -q '^nightly' || { echo 'no nightly Rust: rustup toolchain install nightly' >&2; exit 1; }
if [[ ! -x $folder/tools/bin/cargo-fuzz ]]; then
    CARGO_TARGET_DIR=$folder/tools/build cargo install --quiet --locked --root "$folder/tools" cargo-fuzz
fi
export PATH=$folder/tools/bin:$PATH RUSTUP_TOOLCHAIN=nightly

# To begin with: what the tests have that is right.
for target in captures frames pool resources texts traces; do mkdir -p "$folder/corpus/$target" "$folder/broken"; done
python3 - "$folder/corpus" <<'SEEDS'
import gzip, json, pathlib, sys

corpus = pathlib.Path(sys.argv[1])


def put(target, name, content):
    (corpus / target / f"seed-{name}").write_bytes(content)


golden = json.loads(pathlib.Path("gms/tests/golden/v0.json").read_text())
for number, frame in enumerate(golden["frames"]):
    content = bytes.fromhex(frame["frame"])
    put("frames", f"{number}-body", content[4:])
    put("frames", f"{number}-parts", b"".join(bytes([1, byte]) for byte in content))
for path in sorted(pathlib.Path("traces").glob("*.csv.gz")):
    with gzip.open(path) as lines:
        head = b"".join(line for line, _ in zip(lines, range(20)))
    put("traces", path.name, head)
    put("traces", f"{path.name}-packed", gzip.compress(head))
texts = [
    "1.5GiB", "0x10", "4096", "auto", "sim:3", "cuda:1", "pair_512,gather_1GiB", "default", "cuda-async,paged",
    "limiting(1GiB,statistics(arena(cuda-malloc)))", "binning(18,22,default)", "logging(a.csv,pool(cuda-malloc))",
    "fixed-size(1MiB,blocks=128,cuda-malloc)", "aligned(4096,1MiB,tracking(default))", "failure(cuda-malloc,default)",
    "caching(max_split_size_mb=64,cuda-malloc)", "max_split_size_mb:64,roundup_power2_divisions:[256:1,512:2,>:8]",
    "garbage_collection_threshold:0.8,per_process_memory_fraction:0.5,large_segment_size_mb:40",
]
for number, text in enumerate(texts):
    put("texts", number, text.encode())
SEEDS

broken=()
for target in "${targets[@]}"; do
    # Programs are judged by what they reach, not by how near to a comparison they come.
    [[ $target =~ ^(captures|pool|resources)$ ]] && compares=(--no-trace-compares) || compares=()
    CARGO_TARGET_DIR=$folder/build cargo fuzz build --fuzz-dir tests/fuzz --sanitizer none "${compares[@]}" "$target"
    echo "$target: $seconds s" >&2
    # Programs are of that many bytes at most, texts of fewer, and are so from the start.
    "$folder"/build/*/release/"$target" "$folder/corpus/$target" "-artifact_prefix=$folder/broken/$target-" \
        -max_total_time="$seconds" -max_len=2000 -len_control=0 -timeout=30 -print_final_stats=1 ||
        broken+=("$target")
done
((${#broken[@]} == 0)) || { printf 'broken, see %s: %s\n' "$folder/broken" "${broken[*]}" >&2 && exit 1; }
