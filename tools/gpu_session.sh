#!/usr/bin/env bash
# Half an hour on two GPUs of one host, in three calls of less than ten minutes, for what has not run on GPUs:
#
#     tools/gpu_session.sh NUMBER OUT [SECONDS]
#
#     1   GPU 0: products whose multiprocessors share x, steps with drafts, a mixture in bf16
#         GPU 1: every format gives numbers; tests of those products and of experts
#     2   GPU 0: a mixture in fp8, its budget, drafts in fp8, how attention is cut, drafts of text
#         GPU 1: all tests of one GPU
#     3   both: handoffs, tokens, faults and prompts of workers of two GPUs; their steps
#
# SECONDS (560): in which all parts are over, but for 20 s. What they found is printed at the end, in less than 12,000
# characters; OUT gets all logs in one archive, and the tables that were completed, which the next call on the same
# machine begins with. A part that fails or comes to its limit does not keep others from running.
set -uo pipefail

number=$1 out=$2 seconds=${3:-560}
here=$(dirname "$0")
logs=$(mktemp -d)
tables=baton/engine/gemm_dispatch/tables kept=${XDG_CACHE_HOME:-$HOME/.cache}/baton/session-tables
mkdir -p "$out" "$kept"
cp "$kept"/*.json $tables 2>/dev/null || true
# Tests compile most of the time. Cores are left to those who measure.
PROCESSES=${PROCESSES:-$(($(nproc) * 5 / 8))}
export PROCESSES

# parts FOLDER GPUS SECONDS PART...
parts() {
    CUDA_VISIBLE_DEVICES=$2 "$here/gpu_figures.sh" "$logs/$1" "$3" "${@:4}" >"$logs/$1.txt" 2>&1
}

case $number in
1)
    parts figures 0 "$seconds" wide-table drafts-rows experts-bf16 drafts-attention &
    parts tests 1 "$seconds" numbers wide experts-exact experts-tokens &
    ;;
2)
    parts figures 0 "$seconds" experts-fp8 experts-budget drafts-rows-fp8 attention-parts drafts-text &
    {
        # More tests than there is time for, those first that have not run; what is cut off says what has failed.
        parts tests 1 $((seconds * 2 / 3 - 15)) tests-engine
        parts tests-alone 1 $((seconds / 3)) tests-alone
    } &
    ;;
3) parts gpus 0,1 "$seconds" gpus gpus-steps & ;;
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
