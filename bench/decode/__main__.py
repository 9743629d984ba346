"""Decode on one GPU or several: step time, gaps and tail, by the GPU's own clock, while another process reads
the ring.

    python -m bench.decode --shape llama-3.1-8b --dtype bf16 --batch 1,8,64 --context 1024
        [--sampling greedy|temperature|filters|penalties|logprobs] [--numerics exact|fast] [--json]
        [--quantization fp8|int8|int4 [--quantize-head]] [--tune | --ignore-tables] [--seconds S] [--churn]
        [--budget] [--mixed ROWS,ROWS] [--front] [--burners N]
        [--tensor-parallel N]
        [--rows-per-slot N,N [--accept R,R | --text markov:P [--lookahead-mb M [--ends E]]]]

Random weights and KV. One JSON object a batch goes to stdout.

    (as it is)   every sequence starts with `context` tokens; step time over output tokens 33 to 160, so at a
                 mean context of context + 96; `rows_not_numbers` of the last step should be 0
    --seconds S  the same batch for S seconds: no sequence ends meanwhile, contexts grow by one a step
    --churn      sequences join (Poisson), end (16 to 256 tokens), are cancelled (1 in 10) and grow for
                 --seconds (10), at the rate that keeps about `batch` slots busy; each one's KV is scattered
                 from staging first
    --budget     a table of what a step's time goes to, after a second of steady steps
    --mixed R,R  a step that is part of a prefill step of R rows (`engine.mixed_steps`), beside both by
                 themselves
    --rows-per-slot N,N
                 a step whose sequences have N rows each, all but one of drafts, of which a share of --accept
                 (0) is right; an N for which the engine has no step is left out
    --text markov:P
                 text that repeats itself (`bench.markov_text`), drawn at temperature 1; with
                 --rows-per-slot N up to N - 1 drafts a sequence and step are looked up in its text: time of a
                 step and of a sequence's token, tokens a step, drafts, and which share of them was right
    --lookahead-mb M
                 with --text: drafts are looked up in a lookahead table, too, which is full of other texts
                 and has none; step_ms beside that of M = 0 is what it costs. --ends E: a table of that size
                 learns E outputs of 400 tokens a second meanwhile

--tensor-parallel N: the model is divided among the first N GPUs, whose step is one of decode alone; needs
CUDA_MODULE_LOADING=EAGER, and --tune where no table has the divided shapes. What dividing costs
(`budget.split_cost`) stands beside the step: alone_ms + attention_ms + exchange_ms are its parts alone.

--ignore-tables: products run by the kernels that a worker's start finds where it has no table: neither the
repository's tables nor this machine's are read, the cache of compiled kernels is empty, and tuning ends at
the limit of a worker's start; stderr says what it measured, in how many seconds. Without it, the same steps
with the tables: so a table's gain over tuning at start is measured. Attention has no table.

floor_ms: bytes that a step must read, over the bandwidth that is measured at the start; of a mixture those of
experts_expected, of a layer whose rows draw them evenly; experts_a_layer had rows in a step. gap: end of a
step's last kernel to start of the next step's first. busy: 1 - gaps / window. tail_us: end of the head's
product to the end of the step.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from bench.case import RANDOM, SAMPLINGS, DecodeCase, EngineSize
from bench.decode.products import no_tables, tune_missing
from bench.options import (
    add_precision_options,
    add_shape_option,
    precision_of,
    program_parser,
    run_program,
    settings_of,
)

_CHURN_S = 10.0
_BUDGET_S = 1.0


def main() -> None:
    arguments = _parser().parse_args()
    precision = precision_of(arguments)
    cases = [
        DecodeCase(
            arguments.shape,
            precision,
            int(batch),
            arguments.context,
            arguments.sampling,
            arguments.numerics,
            int(rows),
            float(accept),
            arguments.text,
            arguments.lookahead_mb,
            arguments.ends,
            arguments.tensor_parallel,
        )
        for batch in arguments.batch.split(",")
        for rows in arguments.rows_per_slot.split(",")
        for accept in arguments.accept.split(",")
    ]
    cases = possible(cases)
    if arguments.lookahead_mb and (arguments.text == RANDOM or arguments.rows_per_slot == "1"):
        sys.exit("bench.decode: a lookahead table needs --text and --rows-per-slot: it is asked for drafts")
    other = arguments.mixed, arguments.churn, arguments.rows_per_slot != "1"
    if arguments.tensor_parallel > 1 and any(other):
        sys.exit("bench.decode: --tensor-parallel measures steps of one row a sequence, all slots busy")
    if arguments.ends and not arguments.lookahead_mb:
        sys.exit("bench.decode: --ends needs --lookahead-mb: outputs are learned by a table")
    with no_tables() if arguments.ignore_tables else nullcontext():
        run_all(cases, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = program_parser("decode", __doc__)
    add_shape_option(parser)
    add_precision_options(parser)
    tuning = parser.add_mutually_exclusive_group()
    tuning.add_argument("--tune", action="store_true", help="first measure the kernels that no table has")
    tuning.add_argument("--ignore-tables", action="store_true", help="as a start that finds no tables")
    parser.add_argument("--batch", default="1,8,32,64,128,256")
    parser.add_argument("--context", type=int, default=1024, help="tokens; 8192, 32768 and 131072 are long")
    parser.add_argument("--sampling", default="greedy", choices=sorted(SAMPLINGS))
    parser.add_argument("--numerics", default="fast", choices=("exact", "fast"))
    parser.add_argument("--seconds", type=float, help="how long a window is")
    parser.add_argument("--churn", action="store_true", help="sequences come and go")
    parser.add_argument("--budget", action="store_true", help="what a step's time goes to")
    parser.add_argument("--mixed", metavar="ROWS,ROWS", help="steps that are part of prefill steps")
    parser.add_argument("--rows-per-slot", default="1", metavar="N,N", help="rows of a sequence in a step")
    parser.add_argument("--accept", default="0", metavar="R,R", help="the share of drafts that are right")
    parser.add_argument("--text", default=RANDOM, metavar="markov:P", help="text that repeats itself")
    parser.add_argument("--lookahead-mb", type=int, default=0, metavar="M", help="of a lookahead table")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs of the engine")
    parser.add_argument("--ends", type=float, default=0, metavar="E", help="outputs learned a second")
    parser.add_argument("--front", action="store_true", help="the front streams every token to a follower")
    parser.add_argument("--burners", type=int, default=0, metavar="N", help="processes that burn a core each")
    parser.add_argument("--json", action="store_true", help="accepted for all measuring programs; always so")
    return parser


def possible(cases: list[DecodeCase]) -> list[DecodeCase]:
    """Selects the cases that one engine, as large as the largest of them, has steps for."""
    from baton.engine.plan.decode_rows import draft_batches_up_to
    from baton.engine.shared_memory.step_shape import StepShape

    slots = max(case.batch for case in cases)
    batches = draft_batches_up_to(StepShape(slots, max(case.rows_per_slot for case in cases)))
    plain = [case for case in cases if case.rows_per_slot == 1 and case.accept == cases[0].accept]
    several = [case for case in cases if case.rows_per_slot > 1]
    return plain + [case for case in several if case.batch * case.rows_per_slot in batches]


def run_all(cases: list[DecodeCase], arguments: argparse.Namespace) -> None:
    """Measures cases of one shape, dtype, context and numerics on one engine, and prints each."""
    import torch

    from baton.engine.tuning.tuner import LIMIT_S
    from bench.decode import churn_plan, mixed
    from bench.decode.engine import DecodeEngine
    from bench.decode.front import Front

    seconds = arguments.seconds or (_BUDGET_S if arguments.budget else None)
    size = churn_plan.engine_size(cases) if arguments.churn else EngineSize.steady(cases, seconds)
    if arguments.mixed:
        size = mixed.engine_size(cases, _rows(arguments))
    lacking = size.lacking(cases[0], torch.cuda.mem_get_info()[0])
    if lacking is not None:
        sys.exit(f"bench.decode: {lacking}")
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    if arguments.tune:
        tune_missing(cases[0], size.slots)
    elif arguments.ignore_tables:
        tune_missing(cases[0], size.slots, LIMIT_S)
    _report(f"{cases[0].shape}, {size.slots} slots of {size.tokens} tokens: weights, KV, graphs")
    front = partial(Front, streams=arguments.front, burners=arguments.burners)
    engine = DecodeEngine(cases[0], size, front, mixes=arguments.mixed)
    try:
        engine.first_token(cases[0])
        gc.collect()
        gc.freeze()  # as an engine does: a look at all that was loaded would hold up the steps
        measure_all(engine, cases, arguments)
    finally:
        _report(f"front: {engine.close()}")


def measure_all(engine: Any, cases: list[DecodeCase], arguments: argparse.Namespace) -> None:
    """Measures each case, or the memory, and finally prints the budgets."""
    from bench.decode import budget, mixed

    if arguments.mixed:
        for case, found in zip(cases, mixed.run(engine, cases, _rows(arguments)), strict=True):
            _print(case, found, arguments)
        return
    results = []
    for case in cases:
        _report(f"batch {case.batch}")
        results.append({"batch": case.batch, **measure_one(engine, case, arguments)})
        _print(case, results[-1], arguments)
    if arguments.budget:
        budget.show(results)


def measure_one(engine: Any, case: DecodeCase, arguments: argparse.Namespace) -> dict[str, Any]:
    from baton.engine.tuning.measurement import graph_us
    from bench.decode import budget, churn, steady

    if case.chance is not None:
        return steady.run_text(engine, case)
    if case.rows_per_slot > 1:
        return steady.run_drafts(engine, case)
    if arguments.churn:
        return churn.run(engine, case, arguments.seconds or _CHURN_S)
    if arguments.budget:
        parts: dict[str, float] = {}
        found = steady.run_seconds(
            engine,
            case,
            arguments.seconds or _BUDGET_S,
            at_end=lambda: parts.update(budget.measure(engine, case, graph_us)),
        )
        return {**found, "budget_us": budget.budget(parts, found["last_ms"] * 1e3, found["tail_us"])}
    if arguments.seconds:
        return steady.run_seconds(engine, case, arguments.seconds)
    found = {**steady.run_tokens(engine, case), **steady.experts_read(engine, case)}
    if case.tensor_parallel > 1:
        at_mean = replace(case, context=found["mean_context"])
        found |= budget.split_cost(engine, at_mean, graph_us)
    return found


def _rows(arguments: argparse.Namespace) -> list[int]:
    """The prompt rows of mixed steps."""
    return [int(rows) for rows in arguments.mixed.split(",")]


def _print(case: DecodeCase, found: dict[str, Any], arguments: argparse.Namespace) -> None:
    import torch
    import triton

    around = {"front": arguments.front, "burners": arguments.burners, "tables": not arguments.ignore_tables}
    versions = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }
    print(json.dumps({**settings_of(case), **found, **around, **versions}), flush=True)


def _report(what: str) -> None:
    from rich.console import Console

    Console(stderr=True, highlight=False).log(what)


if __name__ == "__main__":
    run_program("decode", main)
