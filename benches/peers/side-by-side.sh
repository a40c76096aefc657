#!/usr/bin/env bash
# Measures vpmm and its peers on this machine's GPU, one after the other, into one file of JSON
# lines, and prints them side by side.
#
#     benches/peers/side-by-side.sh --vpmm BIN [--rmm FOLDER] [--no-torch] [--out FILE]
#                                   [--allocators A,B] [--only bench|replay|fit] [--cases A,B]
#                                   [--turns N] [TRACE...]
#
#   --vpmm BIN         the command, built with --release; or VPMM
#   --rmm FOLDER       what build-rmm.sh made; without it RMM is left out; or RMM_PEER
#   --no-torch         leave PyTorch out
#   --out FILE         where the results go; default results.jsonl
#   --allocators A,B   of vpmm; default default,paged,cuda-async. With semicolons between, where
#                      names have commas: 'default;binning(18,22)'
#   --only PART        one of the three parts; may be given again
#   --cases A,B        of bench; default all
#   --turns N          everything so often, one turn after the other; the tables have the fastest. For
#                      a machine that others use, too; default 1
#   TRACE...           RMM's CSV logs, plain or gzip; default: traces/*.csv.gz
#
# Every allocator runs in a process of its own. One that fails or takes longer than PART_SECONDS
# (120) for a part is named at the end, and the exit status is then 1; all other results are kept.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
command_line="side-by-side.sh $*"

vpmm=${VPMM:-} rmm=${RMM_PEER:-} torch=yes out=results.jsonl
allocators=default,paged,cuda-async
limit=${PART_SECONDS:-120}
turns=1
parts=() traces=() cases=()
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2; exit 2; }
while (($# > 0)); do
    case $1 in
    --vpmm | --rmm | --out | --allocators | --only | --cases | --turns)
        (($# > 1)) || usage
        case $1 in
        --vpmm) vpmm=$2 ;;
        --rmm) rmm=$2 ;;
        --out) out=$2 ;;
        --allocators) allocators=$2 ;;
        --only) parts+=("$2") ;;
        --cases) cases=(--case "$2") ;;
        --turns) [[ $2 =~ ^[1-9][0-9]*$ ]] || usage; turns=$2 ;;
        esac
        shift 2
        ;;
    --no-torch) torch=no && shift ;;
    -*) usage ;;
    *) traces+=("$1") && shift ;;
    esac
done
[[ -n $vpmm ]] || usage
# What cannot be is told before anything is measured, or results of an earlier run are overwritten.
vpmm=$(realpath -e "$vpmm") || exit 2
[[ -z $rmm ]] || rmm=$(realpath -e "$rmm") || exit 2
((${#parts[@]} > 0)) || parts=(bench replay fit)
for part in "${parts[@]}"; do
    [[ $part == bench || $part == replay || $part == fit ]] || usage
done
((${#traces[@]} > 0)) || traces=("$root"/traces/*.csv.gz)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The peers read plain CSV, and everyone gets the same files: in a folder of their own, whatever they are called.
copies=$work/traces
mkdir "$copies" || exit 1
plain=()
for trace in "${traces[@]}"; do
    name=$(basename "$trace" .gz)
    # The results name traces by this.
    [[ ! -e $copies/$name ]] || { echo "$trace: two traces are called $name" >&2 && exit 2; }
    cp "$trace" "$copies/$name" || exit 2
    # Gzip is told by its first bytes, as the command tells it.
    if [[ $(od -An -tx1 -N2 "$copies/$name") == ' 1f 8b' ]]; then
        gunzip <"$copies/$name" >"$work/plain" || { echo "$trace cannot be read" >&2 && exit 2; }
        mv "$work/plain" "$copies/$name"
    fi
    plain+=("$name")
done

# The commit: of this checkout, or of the bundle that the command came in.
commit=${VPMM_COMMIT:-}
if [[ -z $commit ]]; then
    commit=$(sed -n 's/^commit //p' "$(dirname "$vpmm")/../BUILD" 2>/dev/null)
fi
if [[ -z $commit ]]; then
    commit=$(git -C "$root" rev-parse --short HEAD 2>/dev/null || echo unknown)
fi
python3 - "$commit" "$command_line" >"$out" <<'HEADER' || exit 1
import datetime, json, os, platform, subprocess, sys


def first(command):
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return answer.stdout.strip().splitlines()[0]
    except (OSError, IndexError, subprocess.TimeoutExpired):
        return "unknown"


def processor():
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        return f"{len(names)} x {names[0]}"
    except (OSError, IndexError):
        return platform.processor() or "unknown"


gpu = first(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
name, _, driver = gpu.partition(", ")
print(json.dumps({
    "header": "vpmm side by side",
    "machine": name,
    "driver": driver or "unknown",
    "processor": processor(),
    "kernel": platform.release(),
    "commit": sys.argv[1],
    "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    "command": sys.argv[2],
}))
HEADER
out=$(realpath "$out")

failures=()
# measure NAME COMMAND...: its JSON lines go to the results, all else is shown.
measure() {
    local name=$1 began=$SECONDS
    shift
    (cd "$copies" && "$@") | tee -a "$work/lines" | grep '^{' >>"$out"
    local status=${PIPESTATUS[0]}
    grep -v '^{' "$work/lines" >&2
    rm -f "$work/lines"
    echo "$name: exit status $status, $((SECONDS - began)) s" >&2
    ((status == 0)) || failures+=("$name (exit status $status)")
}

one_turn() {
    local part allocator names between resource
    for part in "${parts[@]}"; do
        case $part in
        bench) ours=(bench "${cases[@]}") theirs=("${cases[@]}") torchs=(bench "${cases[@]}") ;;
        replay)
            ours=(replay "${plain[@]}" --repeat 3)
            theirs=(replay "${plain[@]}") torchs=("${theirs[@]}")
            ;;
        fit) ours=(fit "${plain[@]}") theirs=(none) torchs=(fit "${plain[@]}") ;;
        esac
        # One by one: a failure of one allocator must not take the others' results with it.
        [[ $allocators == *";"* ]] && between=';' || between=','
        IFS=$between read -ra names <<<"$allocators"
        for allocator in "${names[@]}"; do
            measure "vpmm $part, $allocator" timeout "$limit" "$vpmm" "${ours[@]}" --allocator "$allocator" --json
        done
        if [[ -n $rmm && ${theirs[*]} != none ]]; then
            for resource in rmm-cuda-async rmm-pool rmm-arena rmm-binning; do
                measure "$resource $part" timeout "$limit" "$rmm/rmm-peer" "${theirs[@]}" --allocator "$resource"
            done
        fi
        if [[ $torch == yes ]]; then
            measure "PyTorch $part" python3 "$here/run-torch.py" --build-dir "$work/torch" \
                --seconds "$limit" "${torchs[@]}"
        fi
    done
}

for ((turn = 1; turn <= turns; turn++)); do
    ((turns == 1)) || echo "turn $turn of $turns" >&2
    one_turn
done

python3 "$here/table.py" "$out"
((${#failures[@]} == 0)) || { printf 'FAILED: %s\n' "${failures[@]}" >&2 && exit 1; }
