#!/usr/bin/env bash
# Half an hour on one or two GPUs of one host, in three calls of less than ten minutes, for what has not run on GPUs:
#
#     tools/gpu_session.sh NUMBER OUT [SECONDS]
#
#     1   GPU 0: products whose multiprocessors share x, steps with drafts, a mixture in bf16
#         GPU 1: every format gives numbers; tests of those products and of experts
#     2   GPU 0: a mixture in fp8, its budget, drafts in fp8, how attention is cut, drafts of text
#         GPU 1: all tests of one GPU
#     3   both: handoffs, tokens, faults and prompts of workers of two GPUs; their steps
#
# One GPU alone (GPUS=1; unset, as many as the machine has) has 1: those tests, then figures in bf16; 2: the other
# figures; 3: all tests of one GPU.
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
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
# Tests compile most of the time. Cores are left to those who measure beside them.
PROCESSES=${PROCESSES:-$(($(nproc) * (gpus > 1 ? 5 : 7) / 8))}
export PROCESSES

# parts FOLDER GPUS SECONDS PART...
parts() {
    CUDA_VISIBLE_DEVICES=$2 "$here/gpu_figures.sh" "$logs/$1" "$3" "${@:4}" >"$logs/$1.txt" 2>&1
}

# More tests than there is time for, those first that have not run; what is cut off says what has failed.
tests_of_one() {
    parts tests "$1" $((seconds * 2 / 3 - 15)) tests-kvtransfer tests-engine
    parts tests-alone "$1" $((seconds / 3)) tests-alone
}

case $((gpus > 1 ? 2 : 1))-$number in
1-1)
    parts tests 0 $((seconds * 3 / 5)) wide experts-exact experts-tokens numbers
    parts figures 0 $((seconds * 2 / 5)) experts-bf16 drafts-rows wide-table drafts-attention
    ;;
1-2) parts figures 0 "$seconds" experts-fp8 drafts-rows-fp8 drafts-text experts-budget attention-parts table ;;
1-3) tests_of_one 0 ;;
2-1)
    parts figures 0 "$seconds" wide-table drafts-rows experts-bf16 drafts-attention &
    parts tests 1 "$seconds" numbers wide experts-exact experts-tokens &
    ;;
2-2)
    parts figures 0 "$seconds" experts-fp8 experts-budget drafts-rows-fp8 attention-parts drafts-text &
    tests_of_one 1 &
    ;;
2-3) parts gpus 0,1 "$seconds" gpus gpus-steps & ;;
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
