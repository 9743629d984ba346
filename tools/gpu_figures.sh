#!/usr/bin/env bash
# What is to be proven and measured on one GPU, part by part, each with a time limit of its own:
#
#     tools/gpu_figures.sh OUT SECONDS [PART...]
#
# OUT gets a log a part; the last lines of each are printed. A part that the SECONDS left do not suffice for is
# named and skipped. BASE=TREE also measures `steps` with the sources of an older commit, alternating with these.
# Without PARTs all of one GPU run, in this order, proofs before the figures that rest on them. Others run where they
# are named: `experts-more`, `gpus-tables`, and `gpus`, which needs two GPUs of one host.
set -uo pipefail

out=$1 ends=$((SECONDS + $2))
shift 2
wanted=" ${*:-numbers drafts-exact drafts-rows drafts-text table steps experts-exact experts experts-tunings tests} "
mkdir -p "$out"
model=(--shape llama-3.1-8b --dtype bf16)
mixture=(--shape qwen3-30b-a3b)

# shellcheck source=tools/parts.sh
source "$(dirname "$0")/parts.sh"

test_on_gpu() { pytest -v -p no:cacheprovider -p no:benchmark -m gpu --tb=short -rfE "$@"; }
test_here() { pytest -p no:cacheprovider -p no:benchmark -m "not multigpu" --tb=short -rfE "$@"; }
export -f test_on_gpu test_here

steps_of() {
    run "$1-decode" 60 env -C "$2" PYTHONPATH="$2${PYTHONPATH:+:$PYTHONPATH}" python -m bench.decode "${model[@]}" --batch 1,32,64,256 --json
    run "$1-mixed" 40 env -C "$2" PYTHONPATH="$2${PYTHONPATH:+:$PYTHONPATH}" python -m bench.decode "${model[@]}" --batch 32 --mixed 512 --json
    run "$1-prefill" 60 env -C "$2" PYTHONPATH="$2${PYTHONPATH:+:$PYTHONPATH}" \
        python -m bench.prefill "${model[@]}" --prompts 1x1024,1x8192,8x1024 --json
}

if wants drafts-exact; then
    run drafts-kernels 150 bash -c 'test_on_gpu -n 8 --dist load tests/engine/kernels/gpu/speculation \
        tests/engine/kernels/gpu/attention/test_slot_attention.py'
    run drafts-tokens 240 bash -c 'test_on_gpu -n 6 --dist load tests/engine/speculation/test_graph_same_tokens.py'
fi
if wants drafts-rows; then
    run drafts-rows 150 python -m bench.decode "${model[@]}" --rows-per-slot 1,2,4,8 --batch 1,8,32,64,128 --json
    run drafts-rows-fp8 150 python -m bench.decode "${model[@]}" --quantization fp8 --kv-dtype fp8 \
        --rows-per-slot 1,2,4,8 --batch 1,8,32,64,128 --json
    run drafts-attention 60 python -m bench.decode attention --runs 1x1152,8x1152,32x1152,64x1152,128x1152 \
        --rows 2,4,8 --json
fi
if wants drafts-text; then
    run drafts-text 120 python -m bench.decode "${model[@]}" --text markov:0.8 --rows-per-slot 2,4,8 \
        --batch 1,8,64,128 --json
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
    run numbers 240 bash -c 'test_on_gpu -n 12 --dist load tests/engine/decode/test_gpu_numbers.py \
        tests/engine/kernels/gpu/attention/test_gpu_codes.py tests/engine/kernels/gpu/attention/test_slot_attention.py'
fi
if wants experts-exact; then
    # These files' tests use a GPU where there is one.
    run experts-kernels 150 bash -c 'test_here -n 8 --dist load tests/engine/kernels/gpu/experts \
        tests/engine/executor/test_mixture_steps.py'
    run experts-passes 240 bash -c 'test_here -n 8 --dist load -k "moe or mixture" tests/engine/decode/test_gpu_pass.py \
        tests/engine/prefill/test_gpu_pass.py tests/engine/prefill/test_gpu_numerics.py \
        tests/engine/prefill/test_gpu_graphs.py'
    run experts-tokens 240 bash -c 'test_on_gpu -n 8 --dist load -s -k "moe or mixtral" tests/engine/test_gpu_tokens.py \
        tests/engine/decode/test_gpu_logits.py'
    run experts-memory 90 bash -c 'test_on_gpu -s tests/engine/model/test_mixture_memory.py'
fi
# table SHAPE [OPTION...]: products that the tables lack, in bf16 and in fp8; OUT gets the tables as well.
table() {
    run "table-$1" 100 python -m bench.decode products --shape "$@" --rows 128 --write
    run "table-$1-fp8" 100 python -m bench.decode products --shape "$@" --quantization fp8 --rows 128 --write
    cp baton/engine/gemm_dispatch/tables/*.json "$out"
}

if wants experts; then
    table qwen3-30b-a3b
    for format in bf16 "bf16 --quantization fp8 --kv-dtype fp8"; do
        # shellcheck disable=SC2086
        run "experts-decode-${format##* }" 150 python -m bench.decode "${mixture[@]}" --dtype $format \
            --batch 1,8,32,64,128 --json
    done
    for format in bf16 "bf16 --quantization fp8"; do
        # shellcheck disable=SC2086
        run "experts-prefill-${format##* }" 120 python -m bench.prefill "${mixture[@]}" --dtype $format \
            --prompts 1x1024,8x1024,1x8192 --profile --json
    done
fi
if wants experts-tunings; then
    run experts-tunings 240 python -m bench.decode experts --json
    run experts-tunings-fp8 200 python -m bench.decode experts --quantization fp8 --json
    run experts-budget 100 python -m bench.decode "${mixture[@]}" --dtype bf16 --budget --batch 1,8,64 --json
    table mixtral-8x7b
    run experts-mixtral 120 python -m bench.decode --shape mixtral-8x7b --dtype bf16 --quantization fp8 \
        --kv-dtype fp8 --batch 1,8,32,64,128 --json
fi
if wants experts-more; then
    run experts-mixed 90 python -m bench.decode "${mixture[@]}" --dtype bf16 --batch 32 --mixed 512,2048 --json
    run experts-drafts 120 python -m bench.decode "${mixture[@]}" --dtype bf16 --rows-per-slot 1,4 --batch 1,8,32 --json
    # Workers refuse a mixture on a GPU while MIXTURES_ON_GPUS in startup/model_loader.py is False.
    run experts-served 420 python -m bench.cluster gpu --topology both "${mixture[@]}" --streams 1,16,64 \
        --prompts 1024 --up=--log-level --up=info --json
fi
# Folder by folder, so that each has a summary with what failed, and with each test's name, so that one that is cut
# off has it too; those that start clusters run few at a time, those that measure memory alone.
if wants tests; then
    run tests-memory 120 bash -c 'test_on_gpu tests/engine/test_gpu_memory.py tests/engine/model/test_mixture_memory.py'
    run tests-clusters 240 bash -c 'test_on_gpu -n 4 tests/e2e tests/worker tests/engine/test_gpu.py'
    run tests-kvtransfer 150 bash -c 'test_on_gpu -n 6 tests/kvtransfer tests/device'
    # Most of their time goes to compiling.
    run tests-engine 600 bash -c 'test_on_gpu -n $(($(nproc) - 4)) --dist load --maxschedchunk 1 tests/engine \
        --deselect tests/engine/test_gpu.py --deselect tests/engine/test_gpu_memory.py \
        --deselect tests/engine/model/test_mixture_memory.py'
fi
# On one GPU, for a worker of two.
if wants gpus-tables; then
    table llama-3.1-8b --tensor-parallel 2
    table llama-3.1-70b --tensor-parallel 2
fi
if wants gpus; then
    export CUDA_MODULE_LOADING=EAGER
    run gpus-exchange 150 pytest -p no:cacheprovider -s -m multigpu --tb=short -rfE tests/engine/parallel/test_gpus_exchange.py
    run gpus-tokens 240 pytest -p no:cacheprovider -s -m multigpu --tb=short -rfE tests/engine/parallel/test_gpus_decode.py
    run gpus-prompts 240 pytest -p no:cacheprovider -s -m multigpu --tb=short -rfE tests/engine/parallel/test_gpus_prefill.py
    run gpus-links 300 pytest -p no:cacheprovider -s -m multigpu --tb=short -rfE tests/engine/memory \
        tests/worker/engine/test_gpus_links.py
    run gpus-decode 120 python -m bench.decode "${model[@]}" --batch 1,8,32,64,128 --tensor-parallel 2 --json
    run gpus-prefill 120 python -m bench.prefill "${model[@]}" --prompts 1x1024,8x1024,1x8192 --chunk-tokens 2048 \
        --tensor-parallel 2 --json
fi
