"""Prefill of random prompts on GPUs (or a CPU): time to all first tokens, tokens per second, MFU.

    python -m bench.prefill --shape llama-3.1-8b --dtype bf16 --prompts 1x1024,1x8192,8x1024,8x8192
        [--chunk-tokens 8192] [--cached 0,50,90] [--tier device,host,disk] [--numerics exact|fast]
        [--no-graphs] [--repeats 5] [--profile] [--tensor-parallel N] [--device cuda|cpu] [--json]

Random weights, every prompt a new one. A case is timed from the arrival of its prompts to the last first
token on the host, the median of --repeats after one warm-up; `device_ms` is the steps' time by the device's
events, `step_device_ms` and `step_host_ms` the time of one step on the device, and of launching it on the
host.

    --prompts NxT    N prompts of T tokens that arrive together; steps of up to --chunk-tokens rows, unbounded
                     in time (a worker's are bounded by prefill_step_ms)
    --cached P       the first P percent of each prompt's blocks are cached: on the device, or only in a lower
    tier
                     (--tier), so that they are loaded first
    --no-graphs      steps of few rows launch by launch, like longer ones
    --profile        the time of one more run by kinds of kernels; `idle` is the device's
    --alone          instead: one prompt at a time in a worker's steps, for each bound of --step-ms MS,MS (of
                     steps while no short prompts come)
    --fairness       instead: time to first token of short prompts (--short), at 30 % of their sustained rate
                     (Poisson), alone and next to a long one (--long), with a worker's step bounds or those of
                     --step-ms MS,MS, the first of which is also run alone
    --tensor-parallel N
                     the model is divided among the first N GPUs; needs CUDA_MODULE_LOADING=EAGER.
                     all_devices_ms, alone_ms: a step of the case's first rows on all GPUs, and on the first
                     alone, which then exchanges with none

mfu: operations of the uncached tokens over 989 TFLOP/s a GPU (bf16, fp16), whatever the weights. peak_gb: the
most memory of tensors on the first device; peak_beside_gb: of that, what runs used in addition to weights, KV
and permanent buffers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench.case import TIERS, PrefillCase, parse_prompts
from bench.options import (
    add_precision_options,
    add_shape_option,
    precision_of,
    program_parser,
    run_program,
    settings_of,
    show,
)

# A step's tokens, where none are given.
_ROWS = 8192


def main() -> None:
    arguments = command_parser().parse_args()
    if arguments.tensor_parallel > 1 and (arguments.profile or arguments.alone or arguments.fairness):
        sys.exit("bench.prefill: --tensor-parallel goes with neither --profile, --alone nor --fairness")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.alone:
            from bench.prefill.fairness import run_alone

            run_alone(arguments, Path(folder))
        elif arguments.fairness:
            from bench.prefill.fairness import run_fairness

            run_fairness(arguments, Path(folder))
        else:
            run_all(cases_of(arguments), arguments, Path(folder))


def command_parser() -> argparse.ArgumentParser:
    parser = program_parser("prefill", __doc__)
    add_shape_option(parser)
    add_precision_options(parser)
    parser.add_argument("--prompts", default="1x1024,1x8192,8x1024,8x8192", type=parse_prompts)
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        help=f"rows of a step, at most (default {_ROWS}; with --fairness a worker's)",
    )
    parser.add_argument("--cached", default="0", help="percent of a prompt; with --tier")
    parser.add_argument("--tier", default="device", help=f"of {','.join(TIERS)}")
    parser.add_argument("--numerics", default="fast", choices=("exact", "fast"))
    parser.add_argument("--no-graphs", action="store_true", help="all steps launch by launch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="what the time goes to")
    parser.add_argument("--alone", action="store_true", help="one prompt at a time, in a worker's steps")
    parser.add_argument("--fairness", action="store_true", help="short prompts alongside a long one")
    parser.add_argument(
        "--step-ms",
        metavar="MS,MS",
        help="with --fairness and --alone: bounds of a step (default a worker's)",
    )
    parser.add_argument("--short", type=int, default=500, help="with --fairness: tokens")
    parser.add_argument("--long", type=int, default=100_000, help="with --fairness: tokens")
    parser.add_argument("--count", type=int, default=300, help="with --fairness: short prompts of each load")
    parser.add_argument("--seed", type=int, default=0, help="with --fairness: of the arrivals")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs of the engine")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", action="store_true", help="one object a line, for programs")
    return parser


def cases_of(arguments: argparse.Namespace) -> list[PrefillCase]:
    """Every combination of prompts, cached share and tier; without a share there is no tier."""
    shares = [int(share) for share in arguments.cached.split(",")]
    tiers = arguments.tier.split(",")
    if any(tier not in TIERS for tier in tiers) or any(not 0 <= share < 100 for share in shares):
        sys.exit(f"bench.prefill: tiers are {', '.join(TIERS)}, shares 0 to 99")
    return [
        PrefillCase(
            arguments.shape,
            precision_of(arguments),
            prompts,
            tokens,
            arguments.chunk_tokens or _ROWS,
            share,
            tier,
            arguments.tensor_parallel,
        )
        for prompts, tokens in arguments.prompts
        for share in shares
        for tier in (tiers if share else tiers[:1])
    ]


def run_all(cases: list[PrefillCase], arguments: argparse.Namespace, folder: Path) -> None:
    """Measures cases of one shape and dtype on one engine, and prints each."""
    import torch

    from bench.prefill.engine import PrefillEngine

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    exact, graphs = arguments.numerics == "exact", not arguments.no_graphs
    engine = PrefillEngine(cases, arguments.device, folder, exact=exact, graphs=graphs)
    engine.report_ready()
    on_gpu = arguments.device == "cuda"
    around: dict[str, object] = {
        "numerics": arguments.numerics,
        "graphs": graphs,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
    }
    for case in cases:
        found = settings_of(case) | engine.measure(case, arguments.repeats) | engine.split_cost(case)
        if arguments.profile:
            found["budget_ms"] = engine.profile(case)
        show(found | around, arguments.json)


if __name__ == "__main__":
    run_program("prefill", main)
