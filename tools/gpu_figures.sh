#!/usr/bin/env bash
# What is to be proven and measured on one GPU, part by part, each with a time limit of its own:
#
#     tools/gpu_figures.sh OUT SECONDS [PART...]
#
# OUT gets a log a part; the last lines of each are printed. A part that the SECONDS left do not suffice for is
# named and skipped. BASE=TREE also measures `steps` with the sources of an older commit, alternating with these;
# PROCESSES is how many run tests at once. Without PARTs all of one GPU run, in this order, proofs before the figures
# that rest on them. Others run where they are named: `wide`, `products-each`, `drafts-attention`, `drafts-oracle`,
# `drafts-served`, `attention-normed`, `attention-codes`, `experts-budget`, `experts-tiles`, `experts-more`,
# `experts-served`, `gpus-tables`, `drafts-auto`, and of two GPUs of one host `gpus-faults`, `gpus`, `gpus-served`,
# `experts-goodput`, `drafts-goodput`, `drafts-goodput-512`, `drafts-goodput-both`, `drafts-goodput-new` and
# `gpus-steps`.
# `gpu_session.sh` has what half an hour on two GPUs is for.
set -uo pipefail

out=$1 ends=$((SECONDS + $2))
shift 2
wanted=" ${*:-numbers drafts-exact drafts-rows drafts-rows-fp8 drafts-text table steps experts-exact experts-tokens \
    experts experts-tunings tests} "
[[ $wanted != *" experts "* ]] || wanted+="experts-table experts-bf16 experts-fp8 "
[[ $wanted != *" tests "* ]] || wanted+="tests-any-device tests-alone tests-clusters tests-kvtransfer tests-engine "
mkdir -p "$out"
model=(--shape llama-3.1-8b --dtype bf16)
mixture=(--shape qwen3-30b-a3b)
processes=${PROCESSES:-$(($(nproc) > 8 ? $(nproc) - 4 : 4))}
export processes
# An interrupted pytest still says what has failed.
STOP=INT GRACE=15

# shellcheck source=tools/parts.sh
source "$(dirname "$0")/parts.sh"

# With each test's name, so that a run that is cut off has those that have failed: twice -v, as pyproject.toml has -q.
options="-vv -p no:cacheprovider -p no:benchmark --tb=short -rfE"
export options
# shellcheck disable=SC2086
test_on_gpu() { pytest $options -m "gpu and not whole_gpu" "$@"; }
# Tests that run in the interpreter where there is no GPU.
# shellcheck disable=SC2086
test_on_any() { pytest $options -m "any_device and not gpu and not multigpu and not slow" "$@"; }
# shellcheck disable=SC2086
test_alone() { pytest $options -m whole_gpu "$@"; }
# shellcheck disable=SC2086
test_here() { pytest $options -m "not multigpu and not whole_gpu" "$@"; }
# shellcheck disable=SC2086
test_on_gpus() { CUDA_MODULE_LOADING=EAGER pytest $options -s -m multigpu "$@"; }
export -f test_on_gpu test_on_any test_alone test_here test_on_gpus

steps_of() {
    run "$1-decode" 60 env -C "$2" PYTHONPATH="$2${PYTHONPATH:+:$PYTHONPATH}" python -m bench.decode "${model[@]}" --batch 1,32,64,256 --json
    run "$1-mixed" 40 env -C "$2" PYTHONPATH="$2${PYTHONPATH:+:$PYTHONPATH}" python -m bench.decode "${model[@]}" --batch 32 --mixed 512 --json
    run "$1-prefill" 60 env -C "$2" PYTHONPATH="$2${PYTHONPATH:+:$PYTHONPATH}" \
        python -m bench.prefill "${model[@]}" --prompts 1x1024,1x8192,8x1024 --json
}

if wants drafts-exact; then
    run drafts-kernels 150 bash -c 'test_on_gpu -n 8 --dist worksteal tests/engine/kernels/gpu/speculation \
        tests/engine/kernels/gpu/attention/test_slot_attention.py'
    run drafts-tokens 240 bash -c 'test_on_gpu -n 6 --dist worksteal tests/engine/speculation/test_graph_same_tokens.py'
fi
if wants drafts-rows; then
    run drafts-rows 150 python -m bench.decode "${model[@]}" --rows-per-slot 1,2,4,8 --batch 1,8,32,64,128 --json
fi
if wants drafts-rows-fp8; then
    run drafts-rows-fp8 150 python -m bench.decode "${model[@]}" --quantization fp8 --kv-dtype fp8 \
        --rows-per-slot 1,2,4,8 --batch 1,8,32,64,128 --json
fi
if wants drafts-attention; then
    run drafts-attention 60 python -m bench.decode attention --runs 1x1152,8x1152,32x1152,64x1152,128x1152 \
        --rows 2,4,8 --json
fi
# Every tuning, where queries and keys are normed: with few KV heads and with more, and where they are not.
if wants attention-normed; then
    run attention-normed 120 python -m bench.decode attention --shapes qwen3-30b-a3b,qwen3-8b,llama-3.1-8b \
        --runs 1x1120,8x1120,16x1120,32x1120,64x1120 --json
fi
# KV in fp8: every tuning of one row, with norms and without, and of several rows a sequence.
if wants attention-codes; then
    run attention-codes 100 python -m bench.decode attention --kv-dtype fp8 --shapes qwen3-30b-a3b,llama-3.1-8b \
        --runs 1x1120,8x1120,32x1120 --json
    run attention-codes-rows 100 python -m bench.decode attention --kv-dtype fp8 --shapes llama-3.1-8b \
        --runs 1x1152,8x1152,64x1152 --rows 2,4,8 --tunings --json
fi
# Some 1.5, 2, 2.7 and 3 tokens a step.
if wants drafts-oracle; then
    run drafts-oracle 120 python -m bench.decode "${model[@]}" --rows-per-slot 4,8 --accept 0.34,0.52,0.64,0.68 \
        --batch 1,8,32,64 --json
fi
if wants drafts-text; then
    run drafts-text 120 python -m bench.decode "${model[@]}" --text markov:0.8 --rows-per-slot 2,4,8 \
        --batch 1,8,64,128 --json
fi
# A cluster whose worker decides about drafts, beside one that has none.
if wants drafts-served; then
    for drafts in off auto; do
        run "drafts-served-$drafts" 90 python -m bench.cluster gpu --topology both "${model[@]}" --streams 1,8,64 \
            --prompts 1024 --up=--log-level --up=info --up=--speculation --up=$drafts --json
    done
fi
if wants table; then
    run table-lookup 60 python -m bench.decode drafts --runs 1x8192,64x8192,256x8192 --lookahead-mb 64 --json
    run table-steps 90 python -m bench.decode "${model[@]}" --text markov:0.8 --rows-per-slot 4 --batch 1,64,128 \
        --lookahead-mb 64 --ends 60 --json
fi
if wants steps; then
    for round in 1 2; do
        steps_of "now-$round" "$PWD"
        [[ -z ${BASE:-} ]] || steps_of "base-$round" "$BASE"
    done
fi
if wants numbers; then
    run numbers 300 bash -c 'test_on_gpu -n $((processes < 14 ? processes : 14)) --dist worksteal \
        tests/engine/decode/test_gpu_numbers.py tests/engine/kernels/gpu/attention/test_gpu_codes.py \
        tests/engine/kernels/gpu/attention/test_slot_attention.py'
fi
# Products whose multiprocessors share tiles of x.
if wants wide; then
    run wide-tests 120 bash -c 'test_on_gpu -n $((processes < 12 ? processes : 12)) --dist worksteal \
        tests/engine/kernels/gpu/gemm/test_wide_product.py'
fi
# What each kernel takes of the rows that steps with drafts have, and each algorithm of the library.
if wants products-each; then
    run products-algorithms 60 python -m bench.decode products "${model[@]}" --buckets 96,128,256 --again --algorithms
    run products-each 90 python -m bench.decode products "${model[@]}" --buckets 128,256 --again --each
fi
if wants experts-exact; then
    # These files' tests use a GPU where there is one.
    run experts-kernels 150 bash -c 'test_here -n $processes --dist worksteal tests/engine/kernels/gpu/experts \
        tests/engine/executor/test_mixture_steps.py'
    run experts-passes 240 bash -c 'test_here -n $processes --dist worksteal -k "moe or mixture" tests/engine/decode/test_gpu_pass.py \
        tests/engine/prefill/test_gpu_pass.py tests/engine/prefill/test_gpu_numerics.py \
        tests/engine/prefill/test_gpu_graphs.py'
fi
if wants experts-tokens; then
    run experts-tokens 240 bash -c 'test_on_gpu -n 8 --dist worksteal -s -k "moe or mixtral" tests/engine/test_gpu_tokens.py \
        tests/engine/decode/test_gpu_logits.py'
fi
# table SHAPE [OPTION...]: products that the tables lack, in bf16 and in fp8; OUT gets the tables as well.
table() {
    run "table-$1" 100 python -m bench.decode products --shape "$@" --rows 128 --write
    run "table-$1-fp8" 100 python -m bench.decode products --shape "$@" --quantization fp8 --rows 128 --write
    cp baton/engine/gemm_dispatch/tables/*.json "$out"
}

! wants experts-table || table qwen3-30b-a3b
# experts FORMAT OPTION...
experts() {
    run "experts-decode-$1" 150 python -m bench.decode "${mixture[@]}" --dtype bf16 "${@:2}" --batch 1,8,32,64,128 --json
}
# prompts FORMAT OPTION...
prompts() {
    run "experts-prefill-$1" 120 python -m bench.prefill "${mixture[@]}" --dtype bf16 "${@:2}" \
        --prompts 1x1024,8x1024,1x8192 --profile --json
}
if wants experts-bf16; then
    experts bf16
    prompts bf16
fi
if wants experts-fp8; then
    experts fp8 --quantization fp8 --kv-dtype fp8
    prompts fp8 --quantization fp8
fi
if wants experts-tunings; then
    run experts-tunings 240 python -m bench.decode experts --json
    run experts-tunings-fp8 200 python -m bench.decode experts --quantization fp8 --json
    table mixtral-8x7b
    run experts-mixtral 120 python -m bench.decode --shape mixtral-8x7b --dtype bf16 --quantization fp8 \
        --kv-dtype fp8 --batch 1,8,32,64,128 --json
fi
# Prompts whose experts have tiles of 128 rows; `experts-tunings` has those of 64.
if wants experts-tiles; then
    run experts-tiles 120 python -m bench.decode experts --rows 1024,8192 --tile-rows 128 --json
fi
if wants experts-budget; then
    run experts-budget 100 python -m bench.decode "${mixture[@]}" --dtype bf16 --budget --batch 1,8,64 --json
    run experts-budget-fp8 100 python -m bench.decode "${mixture[@]}" --dtype bf16 --quantization fp8 \
        --kv-dtype fp8 --budget --batch 1,8,64 --json
fi
if wants experts-more; then
    run experts-mixed 90 python -m bench.decode "${mixture[@]}" --dtype bf16 --batch 32 --mixed 512,2048 --json
    run experts-drafts 120 python -m bench.decode "${mixture[@]}" --dtype bf16 --rows-per-slot 1,4 --batch 1,8,32 --json
fi
if wants experts-served; then
    run experts-served 420 python -m bench.cluster gpu --topology both "${mixture[@]}" --streams 1,16,64 \
        --prompts 1024 --up=--log-level --up=info --json
fi
# Those that need the GPU to themselves, one after the other; those that start clusters run few at a time.
if wants tests-alone; then
    run tests-alone 240 bash -c 'test_alone tests/engine/model tests/engine/prefill tests/engine/executor \
        tests/engine/decode tests/engine/shared_memory tests/engine/test_gpu_memory.py'
fi
if wants tests-any-device; then
    run tests-any-device 300 bash -c 'test_on_any -n $processes --dist worksteal tests/engine tests/kvtransfer'
fi
if wants tests-clusters; then
    run tests-clusters 240 bash -c 'test_on_gpu -n 4 tests/e2e tests/worker tests/engine/test_gpu.py'
fi
if wants tests-kvtransfer; then
    run tests-kvtransfer 150 bash -c 'test_on_gpu -n 6 tests/kvtransfer tests/device'
fi
# Most of their time goes to compiling. Those of `numbers` and `wide` are left out; as many models of published widths
# as there are processes would not fit on a GPU.
if wants tests-engine; then
    run tests-engine 600 bash -c 'test_on_gpu -n $processes --dist worksteal \
        tests/engine/prefill tests/engine/model tests/engine/decode tests/engine/executor tests/engine/speculation \
        tests/engine/sampling tests/engine/shared_memory tests/engine/test_gpu_tokens.py \
        tests/engine/test_gpu_requests.py tests/engine/kernels/gpu/speculation tests/engine/kernels/gpu/experts \
        tests/engine/kernels/gpu/gemm tests/engine/kernels/gpu/attention \
        --deselect tests/engine/decode/test_gpu_numbers.py \
        --deselect tests/engine/kernels/gpu/attention/test_gpu_codes.py \
        --deselect tests/engine/kernels/gpu/attention/test_slot_attention.py \
        --deselect tests/engine/kernels/gpu/gemm/test_wide_product.py'
fi
# On one GPU, for a worker of two.
if wants gpus-tables; then
    table llama-3.1-8b --tensor-parallel 2
    table llama-3.1-70b --tensor-parallel 2
fi
if wants gpus-faults; then
    run gpus-faults 420 bash -c 'test_on_gpus tests/e2e/faults/test_failing_exchange.py'
fi
if wants gpus; then
    run gpus-links 200 bash -c 'test_on_gpus tests/worker/engine/test_gpus_links.py tests/engine/memory'
    run gpus-tokens 180 bash -c 'test_on_gpus tests/engine/parallel/test_gpus_decode.py'
    run gpus-prompts 120 bash -c 'test_on_gpus tests/engine/parallel/test_gpus_prefill.py \
        tests/worker/engine/test_divided_steps.py'
    run gpus-exchange 120 bash -c 'test_on_gpus tests/engine/parallel/test_gpus_exchange.py \
        tests/engine/parallel/test_gpus_calls.py'
fi
# A worker of both on two GPUs whose model one does not hold: rates around its highest, then three minutes at 0.8 of it.
if wants gpus-served; then
    run gpus-served 440 python -m bench.goodput points --shape llama-3.1-70b --dtype bf16 --ttft 2000 --seconds 25 \
        --arm 'tp2=both --tensor-parallel 2 --log-level info' --points 1k-256:30:1.8,2.2 --points 1k-256:30:1.6:180 \
        --seed 60000 --out "$out/gpus-served.jsonl"
fi
# A mixture on a pair, at rates around where a decode worker's steps of 70 sequences take 12 ms.
if wants experts-goodput; then
    run experts-goodput 300 python -m bench.goodput points "${mixture[@]}" --dtype bf16 --ttft 1000 --seconds 40 --unstated \
        --arm 'fp8=1p1d --quantization fp8 --kv-dtype fp8' --points 1k-256:12:9.5,11,12.5 --seed 61000 --processes 2 \
        --out "$out/experts-goodput.jsonl"
fi
# Text of which about half repeats itself, at rates around the highest without drafts and with them: a worker of both
# on one GPU, pairs on two, and a pair half of whose requests ask for text that does not repeat itself.
# with_drafts NAME SECONDS KIND WORKLOAD RATES [OPTION...]
with_drafts() {
    run "$1" "$2" python -m bench.goodput "${model[@]}" --arm "off=$3" --arm "auto=$3 --speculation auto" \
        --workload "$4" --rates "$5" --tpot 6 --seconds 30 --text markov:0.8 --processes 2 --out "$out/$1" "${@:6}"
}
if wants drafts-auto; then
    with_drafts drafts-auto 550 both 256-512 11,14,18 --seed 62000
fi
if wants drafts-goodput; then
    with_drafts drafts-goodput 550 1p1d 1k-256 10,12.5,15,17.5 --seed 63000
fi
if wants drafts-goodput-512; then
    with_drafts drafts-goodput-512 550 1p1d 256-512 8,10,14,18 --seed 64000
fi
if wants drafts-goodput-both; then
    with_drafts drafts-goodput-both 550 1p1both 256-512 13,17,21,25 --seed 65000
fi
if wants drafts-goodput-new; then
    with_drafts drafts-goodput-new 550 1p1d 1k-256 10,12,14 --new-share 0.5 --seed 66000
fi
if wants gpus-steps; then
    export CUDA_MODULE_LOADING=EAGER
    run gpus-decode 120 python -m bench.decode "${model[@]}" --batch 1,8,32,64,128 --tensor-parallel 2 --json
    run gpus-prefill 120 python -m bench.prefill "${model[@]}" --prompts 1x1024,8x1024,1x8192 --chunk-tokens 2048 \
        --tensor-parallel 2 --json
fi
