#!/usr/bin/env bash
# What is to be measured on four GPUs of one host, part by part:
#
#     tools/four_gpus.sh OUT SECONDS PART...
#
#     goodput-2p2d, goodput-2p2both, goodput-4both   an arrangement of four workers, started once for all limits
#     goodput-pairs                  1p1d on GPUs 0 and 1 beside 1p1both on 2 and 3
#     goodput-vllm                   vLLM on GPUs 0 and 1, with steps of 2,048 and of 8,192 tokens; VLLM is a Python
#                                    that has it, or finds it in the folder VLLM_SITE
#     faults-2p2d, faults-4both      SIGKILL and SIGSTOP of an engine: tokens, then times
#     devices                        models divided among two and four GPUs: exchange, tokens, handoffs, steps
#     goodput-large                  LARGE at 30 ms: 1p1d of two GPUs a worker, one combined worker of four.
#
# OUT gets a log a part and lines of JSON. What SECONDS do not suffice for is named, or cut off where it is. A line a
# run of goodput: rate asked for, rate that arrived, share in time. Variables, with what they are unset:
#
#     SHAPE=llama-3.1-8b DTYPE=bf16 DEVICE=cuda LARGE=llama-3.1-70b QUANTIZATION=fp8 (of LARGE)
#     LIMITS='6 12 30'     TPOT in ms: 6 and 12 with 1,024 tokens in and 256 out, 30 with 4,096 and 256
#     RATES=R,R            requests a second and GPU, in place of 0.9, 1.0 and 1.1 of the prediction
#     RATE_SECONDS=45      arrivals at each rate
#     WORKLOAD=NAME        in place of the limit's
#     SEED=294000          every run has a seed of its own from there on
#     FAULT_RATE=R         goodput at 12 ms, of which faults have 0.7 (unset: the prediction)
#     EXACT_RATE=R         the same with `--numerics exact` (unset: half of FAULT_RATE)
#     FAULT_SECONDS=60     arrivals at each fault
#     COMPARED=200         requests whose tokens are compared
set -uo pipefail

out=$1 ends=$((SECONDS + $2))
shift 2
wanted=" $* "
mkdir -p "$out"
# shellcheck source=tools/parts.sh
source "$(dirname "$0")/parts.sh"
# Clusters that are cut off end their processes first.
GRACE=45

model=(--shape "${SHAPE:-llama-3.1-8b}" --dtype "${DTYPE:-bf16}" --device "${DEVICE:-cuda}")
large="--shape ${LARGE:-llama-3.1-70b} --dtype ${DTYPE:-bf16}" seed=${SEED:-294000}
# Requests a second and GPU at 90 % in virtual time (bench/LOG.md, 29 November); of vLLM those measured before.
declare -A predicted=(
    [1p1d-6]=10.29 [2p2d-6]=10.36 [1p1both-6]=11.64 [2p2both-6]=11.78 [4both-6]=11.80 [vllm-6]=5
    [1p1d-12]=18.51 [2p2d-12]=19.56 [1p1both-12]=23.60 [2p2both-12]=24.54 [4both-12]=24.34 [vllm-12]=15.4
    [large-30]=2 [1p1d-30]=3.82 [2p2d-30]=4.46 [1p1both-30]=5.76 [2p2both-30]=5.95 [4both-30]=6.05
)

# Sets `words` to the program and options of an arm, and `most` to the seconds that it may take: a minute until it is
# ready, and 15 s beside the arrivals of each rate. points ARM SEED PROCESSES, the latter of loadgen.
points() {
    local limit workload rate rates
    most=60
    words=(python -m bench.goodput points --arm "$1 $(flags_of "$1")" --seed $((seed + $2)) --processes "$3"
        --seconds "${RATE_SECONDS:-45}" "${model[@]}" --out "$out/goodput.jsonl")
    for limit in ${LIMITS:-6 12 30}; do
        workload=$([[ $limit == 30 ]] && echo 4k-256 || echo 1k-256)
        rate=${predicted[$1-$limit]}
        IFS=, read -ra rates <<<"${RATES:-$(part 0.9 "$rate"),$rate,$(part 1.1 "$rate")}"
        words+=(--points "${WORKLOAD:-$workload}:$limit:$(IFS=,; echo "${rates[*]}")")
        most=$((most + ${#rates[@]} * (${RATE_SECONDS:-45} + 15)))
    done
    [[ $1 != *d ]] || words+=(--unstated)
}

# Two router processes; combined workers alone compute prompts for one another.
flags_of() { echo "$([[ $1 != 4both ]] || echo --both-receives) --router-processes 2"; }

part() { awk -v part="$1" -v rate="$2" 'BEGIN { printf "%.2f", part * rate }'; }

# What `bash -c` runs with a model's options and the number of its GPUs.
model_steps='python -m bench.decode $0 --batch 1,64 --tensor-parallel $1 --json
    python -m bench.prefill $0 --prompts 1x1024,8x1024 --tensor-parallel $1 --json'

# on GPUS COMMAND...: with these GPUs alone.
on() { CUDA_VISIBLE_DEVICES=$1 "${@:2}"; }

# faults ARM FAULTS SEED: tokens with exact numerics, then times.
faults() {
    local rate=${FAULT_RATE:-${predicted[$1-12]}} stated=() each
    each=(python -m bench.goodput faults --tpot 12 --workload "${WORKLOAD:-1k-256}" --faults "$2" --seed $((seed + $3))
        --processes 4 "${model[@]}" --out "$out/faults.jsonl")
    [[ $1 != *d ]] || stated=(--unstated)
    run "faults-$1-tokens" 240 "${each[@]}" --arm "$1 $(flags_of "$1") --numerics exact" --seconds 0 \
        --compare "${COMPARED:-200}" --rate "$(part 0.7 "${EXACT_RATE:-$(part 0.5 "$rate")}")" --unstated
    run "faults-$1-times" 330 "${each[@]}" --arm "$1 $(flags_of "$1")" --seconds "${FAULT_SECONDS:-60}" \
        --rate "$(part 0.7 "$rate")" "${stated[@]}"
}

number=0
for arm in 2p2d 2p2both 4both; do
    number=$((number + 50000))
    if wants "goodput-$arm"; then
        points "$arm" "$number" 4
        run "goodput-$arm" "$most" "${words[@]}"
    fi
done
if wants goodput-pairs; then
    points 1p1d 200000 2
    on 0,1 run goodput-1p1d "$most" "${words[@]}" &
    points 1p1both 250000 2
    on 2,3 run goodput-1p1both "$most" "${words[@]}" &
    wait
fi
if wants goodput-vllm; then
    for steps in 2048 8192; do
        LIMITS='6 12' points vllm $((300000 + steps)) 2
        words+=(--unstated --vllm "${VLLM:-python3}" --vllm-site "${VLLM_SITE:-}")
        words[5]="vllm-$steps=vllm --api-server-count 4 --max-num-batched-tokens $steps"
        on $((steps / 4096)) run "goodput-vllm-$steps" "$most" "${words[@]}" &
    done
    wait
fi
! wants faults-2p2d || faults 2p2d kill:decode,stop:prefill 400000
! wants faults-4both || faults 4both kill:both,stop:both 450000
if wants devices; then
    # As engines of several devices are started.
    export CUDA_MODULE_LOADING=EAGER
    on_gpus=(pytest -p no:cacheprovider -s -m multigpu --tb=short -rfE)
    run devices-exchange 120 "${on_gpus[@]}" tests/engine/parallel/test_gpus_exchange.py -k 'four or test_times'
    run devices-tokens 90 "${on_gpus[@]}" tests/engine/parallel/test_gpus_decode.py -k four
    run devices-handoffs 150 "${on_gpus[@]}" tests/worker/engine/test_gpus_links.py \
        -k 'four or test_handoffs_change_no_token'
    for count in 1 2 4; do
        run "devices-steps-$count" 120 bash -c "$model_steps" "${model[*]:0:4}" $count
    done
    for count in 2 4; do
        run "devices-large-$count" 180 bash -c "$model_steps" "$large --quantization ${QUANTIZATION:-fp8}" $count
    done
fi
if wants goodput-large; then
    export CUDA_MODULE_LOADING=EAGER
    read -ra model <<<"$large --device ${DEVICE:-cuda}"
    for arm in '1p1d --tensor-parallel 2' '1both --tensor-parallel 4'; do
        number=$((number + 50000))
        LIMITS=30 WORKLOAD=${WORKLOAD:-1k-256} RATES=${RATES:-1,1.5,2,2.5} points large $((number + 500000)) 2
        words[5]="large-${arm%% *}=$arm --quantization ${QUANTIZATION:-fp8} --router-processes 2"
        [[ $arm != 1p1d* ]] || words+=(--unstated)
        run "goodput-large-${arm%% *}" "$most" "${words[@]}"
    done
fi
