"""Decode on one GPU: step time, gaps and tail, by the GPU's own clock, while another process reads the ring.

    python -m bench.decode --shape llama-3.1-8b --dtype bf16 --batch 1,8,64 --context 1024
        [--sampling greedy|temperature|filters|penalties|logprobs] [--numerics exact|fast] [--json]
        [--quantization fp8|int8|int4 [--quantize-head]] [--tune | --ignore-tables] [--seconds S] [--churn]
        [--budget] [--mixed ROWS,ROWS] [--memory [--cold]] [--front] [--burners N]

Random weights and KV. One JSON object a batch goes to stdout.

    (as it is)   every sequence starts with `context` tokens; step time over output tokens 33 to 160, so at a
                 mean context of context + 96
    --seconds S  the same batch for S seconds: no sequence ends meanwhile, contexts grow by one a step
    --churn      sequences join (Poisson), end (16 to 256 tokens), are cancelled (1 in 10) and grow for
                 --seconds (10), at the rate that keeps about `batch` slots busy; each one's KV is scattered
                 from staging first, by --scatter
    --budget     a table of what a step's time goes to, after a second of steady steps
    --mixed R,R  a step that is part of a prefill step of so many rows (`engine.mixed_steps`), beside both by
                 themselves
    --memory     instead of all that: GPU memory of an engine of the largest batch, and its start's seconds

--ignore-tables: products run by the kernels that a worker's start finds where it has no table: neither the
repository's tables nor this machine's are read, the cache of compiled kernels is empty, and tuning ends at
the limit of a worker's start; stderr says what it measured, in how many seconds. Without it, the same steps
with the tables: so a table's gain over tuning at start is measured. Attention has no table.

floor_ms: bytes that a step must read, over the bandwidth that is measured at the start. gap: end of a step's
last kernel to start of the next step's first. busy: 1 - gaps / window. tail_us: end of the head's product to
the end of the step.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from baton.device.nvidia_libraries import ENVIRONMENT
from bench.case_output import settings_of
from bench.decode.case import SAMPLINGS, Case, EngineSize
from bench.decode.no_tables import empty_kernel_cache, no_tables
from bench.precision import Precision
from bench.shapes import SHAPES

_CHURN_S = 10.0
_BUDGET_S = 1.0


def main() -> None:
    arguments = _parser().parse_args()
    try:
        precision = Precision(
            arguments.dtype, arguments.quantization, arguments.quantize_head, arguments.kv_dtype
        )
    except ValueError as error:
        sys.exit(f"bench.decode: {error}")
    cases = [
        Case(
            arguments.shape,
            precision,
            int(batch),
            arguments.context,
            arguments.sampling,
            arguments.numerics,
        )
        for batch in arguments.batch.split(",")
    ]
    os.environ.update(ENVIRONMENT)  # as an engine is started; torch is imported later
    with _tables_and_kernels(arguments):
        run_all(cases, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.decode",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--quantization", choices=("fp8", "int8", "int4"), help="of the weights")
    parser.add_argument("--quantize-head", action="store_true", help="with --quantization: lm_head too")
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "fp8"), help="of the KV cache")
    tuning = parser.add_mutually_exclusive_group()
    tuning.add_argument("--tune", action="store_true", help="first measure the kernels that no table has")
    tuning.add_argument("--ignore-tables", action="store_true", help="as a start that finds no tables")
    parser.add_argument("--batch", default="1,8,32,64,128,256")
    parser.add_argument("--context", type=int, default=1024, help="tokens; 8192, 32768 and 131072 are long")
    parser.add_argument("--sampling", default="greedy", choices=sorted(SAMPLINGS))
    parser.add_argument("--numerics", default="fast", choices=("exact", "fast"))
    parser.add_argument("--seconds", type=float, help="how long a window is")
    parser.add_argument("--churn", action="store_true", help="sequences come and go")
    parser.add_argument(
        "--scatter", default="staged", choices=("staged", "pinned", "pieces"), help="with --churn: from where"
    )
    parser.add_argument("--budget", action="store_true", help="what a step's time goes to")
    parser.add_argument("--mixed", metavar="ROWS,ROWS", help="steps that are part of prefill steps")
    parser.add_argument("--memory", action="store_true", help="where the memory goes; start-up")
    parser.add_argument("--cold", action="store_true", help="with an empty cache of compiled kernels")
    parser.add_argument("--front", action="store_true", help="the front streams every token to a follower")
    parser.add_argument("--burners", type=int, default=0, metavar="N", help="processes that burn a core each")
    parser.add_argument("--json", action="store_true", help="accepted for all measuring programs; always so")
    return parser


def _tables_and_kernels(arguments: argparse.Namespace) -> AbstractContextManager[object]:
    """The tables and compiled kernels that the run finds: those there are, unless it shall have none."""
    if arguments.ignore_tables:
        return no_tables()
    return empty_kernel_cache() if arguments.cold else nullcontext()


def run_all(cases: list[Case], arguments: argparse.Namespace) -> None:
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


def tune_missing(case: Case, rows: int, limit_s: float | None = None) -> None:
    """Measures what no table has, as a worker's start does; without a limit of time unless it is given."""
    import torch

    from baton.engine.gemm_dispatch.table import ProductTable, tuned_file
    from baton.engine.tuning.tuner import missing, save, tune
    from bench.decode.tune_products import products_of

    gpu, kind = torch.cuda.get_device_name(), getattr(torch, case.precision.torch_dtype)
    products = products_of(case.shape, case.precision)
    wanted = missing(products, rows, kind, ProductTable.for_gpu(gpu))
    began = time.monotonic()
    entries = tune(wanted, kind, torch.device("cuda", 0), lambda *_: None, limit_s)
    for entry in entries:
        _report(json.dumps(entry))
    _report(f"{len(entries)} of {len(wanted)} products tuned in {time.monotonic() - began:.1f} s")
    save(tuned_file(gpu), entries)


def measure_all(engine: Any, cases: list[Case], arguments: argparse.Namespace) -> None:
    """Measures each case, or the memory, and finally prints the budgets."""
    from bench.decode import budget, memory, mixed

    if arguments.mixed:
        for case, found in zip(cases, mixed.run(engine, cases, _rows(arguments)), strict=True):
            _print(case, found, arguments)
        return
    if arguments.memory:
        case = max(cases, key=lambda case: case.batch)
        _print(case, memory.memory_use(engine) | {"cold": arguments.cold}, arguments)
        return
    results = []
    for case in cases:
        _report(f"batch {case.batch}")
        results.append({"batch": case.batch, **measure_one(engine, case, arguments)})
        _print(case, results[-1], arguments)
    if arguments.budget:
        budget.show(results)


def measure_one(engine: Any, case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    from bench.decode import budget, churn, steady

    if arguments.churn:
        return churn.run(engine, case, arguments.seconds or _CHURN_S, arguments.scatter)
    if arguments.budget:
        from baton.engine.tuning.measurement import graph_us

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
    return steady.run_tokens(engine, case)


def _rows(arguments: argparse.Namespace) -> list[int]:
    """The prompt rows of mixed steps."""
    return [int(rows) for rows in arguments.mixed.split(",")]


def _print(case: Case, found: dict[str, Any], arguments: argparse.Namespace) -> None:
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
    main()
