#!/usr/bin/env bash
# Calls of less than ten minutes on one or two GPUs of one host, for what has not run on GPUs:
#
#     tools/gpu_session.sh NUMBER OUT [SECONDS]
#
#     1   both: exchanges that fail, twenty times; then GPU 0: steps with drafts; GPU 1: numbers of every format
#     2   both: a model that one GPU does not hold, served; then GPU 0: tiles of experts; GPU 1: mixed steps of a mixture
#     3   GPU 0: drafts of text, tunings of experts; GPU 1: all other tests of one GPU
#     4   both: goodput of a mixture; then GPU 0: its steps and prompts; GPU 1: every tuning of attention over codes
#     5   both: goodput with drafts and without, 1,024 tokens in; 6, 7, 8: 256 in, 256 in exchange, half of new text
#
# One GPU alone (GPUS=1; unset, as many as the machine has) has 1: tests; 2: all figures; 3: the other tests; 4: goodput
# with drafts and without.
#
# SECONDS (560): in which all parts are over, but for 20 s. What they found is printed at the end, in less than 12,000
# characters; OUT gets all logs in one archive, and the tables that were completed, which the next call on the same
# machine begins with. A part that fails or comes to its limit does not keep others from running.
set -uo pipefail

number=$1 out=$2 seconds=${3:-560}
ends=$((SECONDS + seconds))
here=$(dirname "$0")
logs=$(mktemp -d)
tables=baton/engine/gemm_dispatch/tables kept=${XDG_CACHE_HOME:-$HOME/.cache}/baton/session-tables
mkdir -p "$out" "$kept"
cp "$kept"/*.json $tables 2>/dev/null || true
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
# Tests compile most of the time. Cores are left to those who measure beside them.
PROCESSES=${PROCESSES:-$(($(nproc) * (gpus > 1 ? 5 : 7) / 8))}
export PROCESSES

# parts FOLDER GPUS SECONDS PART...
parts() {
    CUDA_VISIBLE_DEVICES=$2 "$here/gpu_figures.sh" "$logs/$1" "$3" "${@:4}" >"$logs/$1.txt" 2>&1
}

drafts="drafts-rows drafts-rows-fp8 drafts-oracle drafts-text drafts-served"
experts="attention-codes experts-tiles experts-tunings experts-bf16 experts-fp8 experts-more"
tests="tests-any-device numbers wide experts-exact experts-tokens tests-clusters tests-kvtransfer tests-alone"

case $((gpus > 1 ? 2 : 1))-$number in
1-1)
    # shellcheck disable=SC2086
    parts tests 0 "$seconds" $tests
    ;;
1-2)
    # shellcheck disable=SC2086
    parts figures 0 "$seconds" $experts $drafts
    ;;
1-3) parts tests 0 "$seconds" tests-engine ;;
1-4) parts figures 0 "$seconds" drafts-auto ;;
2-1)
    parts both 0,1 "$seconds" gpus-faults
    parts figures 0 $((ends - SECONDS)) drafts-rows drafts-rows-fp8 &
    parts tests 1 $((ends - SECONDS)) tests-any-device numbers wide &
    ;;
2-2)
    parts both 0,1 "$seconds" gpus-served
    parts figures 0 $((ends - SECONDS)) experts-tiles &
    parts tests 1 $((ends - SECONDS)) experts-more &
    ;;
2-3)
    parts figures 0 "$seconds" drafts-oracle drafts-text experts-tunings &
    parts tests 1 "$seconds" tests-engine &
    ;;
2-4)
    parts both 0,1 "$seconds" experts-goodput
    parts figures 0 $((ends - SECONDS)) experts-bf16 &
    parts tests 1 $((ends - SECONDS)) attention-codes &
    ;;
2-5) parts both 0,1 "$seconds" drafts-goodput ;;
2-6) parts both 0,1 "$seconds" drafts-goodput-512 ;;
2-7) parts both 0,1 "$seconds" drafts-goodput-both ;;
2-8) parts both 0,1 "$seconds" drafts-goodput-new ;;
*)
    echo "there is no call $number" >&2
    exit 2
    ;;
esac
wait

cp $tables/*.json "$out"
cp $tables/*.json "$kept"
tar -C "$logs" -czf "$out/logs-$number.tar.gz" .
python "$here/part_summary.py" "$logs"/*/
rm -r "$logs"
