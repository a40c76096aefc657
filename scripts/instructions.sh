#!/usr/bin/env bash
# Counts the instructions of the pool's hit path under callgrind and compares them with
# benches/instructions.json. A count that rose by more than 5 % fails the check.
#
#     scripts/instructions.sh             compare
#     scripts/instructions.sh --update    write the counts of today into the baseline
#
# Needs valgrind and python3, and installs nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

case ${1:-} in
'' | --update) ;;
*) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2 && exit 2 ;;
esac
for tool in valgrind python3 cargo; do
    command -v "$tool" >/dev/null || {
        echo "$tool is missing, and this script installs nothing (valgrind: apt-get install valgrind)" >&2
        exit 2
    }
done

# The pool is optimised as in a release; all else, which is not counted, is compiled fast. No
# optimisation across crates: it takes minutes, and lets one crate's code change another's counts.
program=$(cargo build --release --locked -p vpmm-harness --example instructions \
    --config 'profile.release.opt-level=0' --config 'profile.release.lto="off"' \
    --config 'profile.release.codegen-units=16' --config 'profile.release.debug=false' \
    --config profile.release.package.vpmm.opt-level=3 \
    --config profile.release.package.vpmm.codegen-units=1 \
    --config profile.release.package.vpmm-harness.opt-level=3 \
    --message-format=json-render-diagnostics |
    sed -n 's/.*"executable":"\([^"]*\/instructions\)".*/\1/p')

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for name in $("$program"); do
    calls=$(valgrind --tool=callgrind --callgrind-out-file=/dev/null --log-file="$work/log" \
        --toggle-collect=vpmm_counted --toggle-collect=vpmm_not_counted "$program" "$name")
    collected=$(sed -n 's/.*Collected *: *\([0-9]*\).*/\1/p' "$work/log")
    [[ -n $collected && $collected != 0 ]] || {
        cat "$work/log" >&2
        echo "$name: callgrind collected nothing" >&2
        exit 1
    }
    echo "$name $collected $calls"
done >"$work/counts"

python3 - "$work/counts" benches/instructions.json "$(rustc --version)" "${1:-}" <<'CHECK'
import json, sys

counts, baseline_path, rustc, option = sys.argv[1:]
MOST_RISE = 1.05
FAR_BELOW = 0.95

today = {}
for line in open(counts):
    name, collected, calls, driver_calls = line.split()
    calls = int(calls.removeprefix("calls="))
    today[name] = {
        "instructions_per_call": round(int(collected) / calls, 2),
        "driver_calls_per_call": round(int(driver_calls.removeprefix("driver_calls=")) / calls, 4),
    }

if option == "--update":
    with open(baseline_path, "w") as baseline:
        json.dump({"rustc": rustc, "cases": today}, baseline, indent=2)
        baseline.write("\n")
    print(f"{baseline_path} written:")
    for name, count in today.items():
        print(f"  {name}: {count['instructions_per_call']} instructions per call")
    sys.exit(0)

try:
    with open(baseline_path) as file:
        baseline = json.load(file)
except OSError as error:
    sys.exit(f"{error}: run scripts/instructions.sh --update")

failed = renew = False
for name in {**baseline["cases"], **today}:
    before, now = baseline["cases"].get(name), today.get(name)
    if before is None or now is None:
        print(f"{name}: only in the {'program' if before is None else 'baseline'}")
        failed = True
        continue
    ratio = now["instructions_per_call"] / before["instructions_per_call"]
    verdict = "as before"
    if ratio > MOST_RISE:
        verdict, failed = "MORE THAN 5 % ABOVE THE BASELINE", True
    elif ratio < FAR_BELOW:
        verdict, renew = "far below the baseline", True
    print(
        f"{name}: {now['instructions_per_call']:.2f} instructions per call,"
        f" baseline {before['instructions_per_call']:.2f} ({ratio - 1:+.1%}): {verdict}"
    )
    if now["driver_calls_per_call"] > MOST_RISE * before["driver_calls_per_call"] + 0.001:
        print(
            f"{name}: {now['driver_calls_per_call']} driver calls per call,"
            f" baseline {before['driver_calls_per_call']}: MORE DRIVER CALLS"
        )
        failed = True
if (failed or renew) and baseline["rustc"] != rustc:
    print(f"The baseline was counted with {baseline['rustc']}; this is {rustc}.")
if renew and not failed:
    print("Keep the gain: scripts/instructions.sh --update")
sys.exit(1 if failed else 0)
CHECK
