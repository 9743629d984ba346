#!/usr/bin/env bash
# What is to be proven and measured on one GPU, part by part, each with a time limit of its own:
#
#     tools/gpu_figures.sh OUT SECONDS [PART...]
#
# OUT gets a log a part; the last lines of each are printed. A part that the SECONDS left do not suffice for is
# named and skipped. BASE=TREE also measures `steps` with the sources of an older commit, alternating with these.
# Without PARTs all run, in this order, proofs before the figures that rest on them.
set -uo pipefail

out=$1 ends=$((SECONDS + $2))
shift 2
wanted=" ${*:-drafts-exact drafts-rows drafts-text table steps experts-exact experts tests} "
mkdir -p "$out"
model=(--shape llama-3.1-8b --dtype bf16)

# run NAME LIMIT COMMAND...: at most LIMIT seconds, of which a third must be left.
run() {
    local name=$1 limit=$2 left=$((ends - SECONDS)) began=$SECONDS
    shift 2
    if ((left * 3 < limit)); then
        echo "== $name: skipped, $left s left"
        return
    fi
    timeout -k 5 $((limit < left ? limit : left)) "$@" >"$out/$name.log" 2>&1
    echo "== $name: exit code $?, $((SECONDS - began)) s: $*"
    tail -n 40 "$out/$name.log"
}

wants() { [[ $wanted == *" $1 "* ]]; }

test_on_gpu() { pytest -p no:cacheprovider -q -m gpu --tb=short "$@"; }
export -f test_on_gpu

steps_of() {
    run "$1-decode" 60 env -C "$2" PYTHONPATH="$2${PYTHONPATH:+:$PYTHONPATH}" python -m bench.decode "${model[@]}" --batch 1,32,64,256 --json
    run "$1-mixed" 40 env -C "$2" PYTHONPATH="$2${PYTHONPATH:+:$PYTHONPATH}" python -m bench.decode "${model[@]}" --batch 32 --mixed 512 --json
    for prompts in 1x1024 1x8192 8x1024; do
        run "$1-prefill-$prompts" 40 env -C "$2" PYTHONPATH="$2${PYTHONPATH:+:$PYTHONPATH}" \
            python -m bench.prefill "${model[@]}" --prompts "$prompts" --json
    done
}

if wants drafts-exact; then
    run drafts-kernels 150 bash -c 'test_on_gpu -x tests/engine/kernels/gpu/speculation'
    run drafts-tokens 240 bash -c 'test_on_gpu -x tests/engine/speculation/test_graph_same_tokens.py'
fi
if wants drafts-rows; then
    run drafts-rows 150 python -m bench.decode "${model[@]}" --rows-per-slot 1,2,4,8 --batch 1,8,32,64,128 --json
    run drafts-attention 60 python -m bench.decode attention --runs 64x1024,128x1024 --rows 4 --tunings --json
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
if wants experts-exact; then
    run experts-kernels 120 bash -c 'test_on_gpu tests/engine/kernels/gpu/experts tests/engine/executor'
fi
if wants experts; then
    for dtype in bf16 "bf16 --quantization fp8"; do
        # shellcheck disable=SC2086
        run "experts-${dtype##* }" 120 python -m bench.decode --shape qwen3-30b-a3b --dtype $dtype \
            --batch 1,8,32,64,128 --json
    done
    run experts-tunings 120 python -m bench.decode experts --json
fi
if wants tests; then
    run tests 600 bash -c 'test_on_gpu -n 14'
fi
