"""Goodput of serving arrangements on the same GPUs: requests a second and GPU that meet limits of latency.

    python -m bench.goodput --arm vllm --arm 'vllm-8k=vllm --max-num-batched-tokens 8192' --arm 2both
        --arm 1p1d --workload 1k-256 --rates 4,8,12,16,20 [--tpot 6,8,12,20,30] [--ttft 500]
        [--attainment 0.9] [--seconds 60] [--ideal 8b-h200] [--at-once] [--seed 0] [--shape llama-3.1-8b]
        [--dtype bf16] [--device cuda|cpu] [--gpus N] [--vllm PYTHON] [--vllm-site DIR] [--slo-headers]
        [--overload RATE] [--protocol http|grpc] [--processes 1] [--text markov:P [--new-share S]]
        [--images DIR] [--out DIR]

Each arm is started, gets Poisson arrivals at every rate (of each GPU that it has) for --seconds by `loadgen
run`, and is stopped. Every limit is judged on the same runs; a rate has the same seed in all arms. Rates in
tables and plots are of the requests that did arrive. For each run it prints the clocks of the GPUs, the
processors that were busy and that the host gave to others, the first gap (from first to second token) and
inter-token latencies, in ms and steps; with --protocol grpc also what the router saw of first gaps: until the
handoff's report, and from there. The table has the rate per GPU at which attainment crosses its goal,
interpolated between the rates measured on both sides, which it names; DIR has goodput.md, goodput.json,
goodput.html with one plot a limit, and each run's folder. `python -m bench.goodput report` makes the table
again, of several commands together or of one that was cut off.

    --arm           [NAME=]KIND[ FLAGS]: vllm (one GPU), both, 2both, 1p1d, 2p1d, 1p1both, ...; FLAGS go to
                    `baton up` or to `vllm serve`. vllm@URL: a server that runs already, whose model is
                    named `random`. An arm that needs more GPUs than there are, or does not come up, is
                    skipped, and the table says why
    --ideal PROFILE adds, for each arm of Baton, what the same arrivals would get from
                    the step costs of PROFILE (as in `loadgen size`) and no other cost
    --at-once       arms run at the same time as far as there are GPUs for them
    --slo-headers   requests state --ttft and --tpot, which is one limit then, as theirs. The part `report`
                    joins such runs of an arm into one curve a limit
    --overload      last, this rate (of each GPU) is doubled for --overload-seconds, between 20 s of it alone:
                    goodput before and during, time until latencies are normal, refusals
                    (with --slo-headers: a request without limits is not refused early)
    --processes     of loadgen. Where some percent of tokens come with the one before, one core is too few
                    for loadgen, or for the router (`--router-processes` of `baton up`)
    --text          prompts and answers that repeat themselves (`bench.goodput.texts`), of a model that is
                    written for all arms first (16 GB for 8B); with --new-share that share of the requests
                    asks for text that does not, and both are counted apart, too
    --vllm-site     folder with vLLM's packages, where PYTHON has them not
    --images        writes each plot as an SVG file into this folder too

Weights are random, and dummy ones of vLLM, except with --text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from baton.perf_model.profile import ProfileError, read_profile
from baton.perf_model.step_costs import StepCosts
from bench.goodput.arms import KINDS_HELP, WORKLOADS, Arm, Workload, parse_arm
from bench.goodput.observed import server_times, stream_figures
from bench.goodput.report import Comparison, Curve, curves_of, write_arms
from bench.goodput.runs import (
    Limits,
    Load,
    Overload,
    judged,
    judged_by_class,
    measure,
    numbers,
    overload,
)
from bench.goodput.servers import (
    GpuPool,
    NotServedError,
    Setup,
    Target,
    clocks_between,
    gpu_samples,
    serve,
    until_terminated,
    visible_gpus,
)
from bench.goodput.texts import RepeatingText, add_text_options, model_of
from bench.options import add_shape_option, program_parser, run_program
from bench.processes import Usage
from loadgen.analysis import run_folder
from loadgen.analysis.run_folder import Run
from loadgen.common.server_samples import read_samples

# Prompts are of ids below it, which every tokenizer has.
_VOCAB = 256
# In the folder of the results.
_GPU_SAMPLES = "gpus.csv"
# Between the seeds of two rates: loadgen derives others from each.
_SEED_STEP = 1000


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements of every arm; rates are per GPU."""

    workload: Workload
    rates: tuple[float, ...]
    seconds: float
    seed: int
    limits: tuple[Limits, ...]
    slo: Limits | None
    ideal: StepCosts | None
    out: Path
    overload: float | None = None
    overload_s: float = 60.0
    processes: int = 1
    text: RepeatingText | None = None


def main() -> None:
    arguments = _parser().parse_args()
    try:
        ideal = read_profile(arguments.ideal).costs if arguments.ideal else None
    except ProfileError as error:
        sys.exit(f"bench.goodput: {error}")
    limits = tuple(Limits(arguments.ttft, tpot, arguments.attainment) for tpot in arguments.tpot)
    if arguments.slo_headers and len(limits) != 1:
        sys.exit("bench.goodput: --slo-headers states one limit: --tpot has several")
    slo = limits[0] if arguments.slo_headers else None
    out = Path(arguments.out or f"goodput-{datetime.now():%Y%m%d-%H%M%S}")
    out.mkdir(parents=True, exist_ok=True)
    workload = WORKLOADS[arguments.workload]
    try:
        text = RepeatingText.of(arguments, [workload])
    except ValueError as error:
        sys.exit(f"bench.goodput: {error}")
    plan = Plan(
        workload, tuple(arguments.rates), arguments.seconds, arguments.seed, limits, slo, ideal, out,
        arguments.overload, arguments.overload_seconds, arguments.processes, text,
    )  # fmt: skip
    comparison = Comparison(workload.name, about(arguments))
    write_arms(out, comparison, arguments.arm, slo)
    with tempfile.TemporaryDirectory() as folder:
        tokens = workload.tokens + 2
        setup = Setup(
            arguments.shape, arguments.dtype, arguments.device, tokens, arguments.vllm, Path(folder),
            arguments.vllm_site, arguments.protocol, model_of(text, arguments, Path(folder)),
        )  # fmt: skip
        work = compare(plan, arguments.arm, setup, comparison, gpus_of(arguments), arguments.at_once)
        asyncio.run(until_terminated(work))
    comparison.write(out, Path(arguments.images) if arguments.images else None)
    print(comparison.table())


def _parser() -> argparse.ArgumentParser:
    parser = program_parser("goodput", __doc__)
    parser.add_argument("--arm", action="append", required=True, type=_arm, help=KINDS_HELP)
    parser.add_argument("--workload", default="1k-256", choices=sorted(WORKLOADS))
    parser.add_argument("--rates", required=True, type=numbers, help="requests a second and GPU")
    parser.add_argument("--tpot", default=[6, 8, 12, 20, 30], type=numbers, help="limits in ms")
    parser.add_argument("--ttft", default=500.0, type=float, help="limit in ms")
    parser.add_argument("--attainment", default=0.9, type=float, help="share of requests that meet both")
    parser.add_argument("--seconds", default=60.0, type=float, help="of each rate")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--ideal", metavar="PROFILE", help="file, or name of a shipped profile")
    parser.add_argument("--at-once", action="store_true", help="several arms at the same time")
    parser.add_argument("--slo-headers", action="store_true", help="requests state --ttft and --tpot")
    add_shape_option(parser)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gpus", type=int, help="how many to use (default: all; on a CPU 1)")
    parser.add_argument("--vllm", default="python3", metavar="PYTHON", help="a Python that has vLLM")
    parser.add_argument("--vllm-site", default="", metavar="DIR", help="folder with vLLM's packages")
    parser.add_argument("--protocol", default="http", choices=("http", "grpc"), help="that Baton is asked by")
    parser.add_argument(
        "--overload", type=float, metavar="RATE", help="rate a GPU that is doubled for a while"
    )
    parser.add_argument("--overload-seconds", type=float, default=60.0)
    parser.add_argument("--processes", type=int, default=1, help="of loadgen")
    add_text_options(parser)
    parser.add_argument("--images", metavar="DIR", help="for the plots as SVG files")
    parser.add_argument("--out", metavar="DIR")
    return parser


def _arm(text: str) -> Arm:
    try:
        return parse_arm(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def gpus_of(arguments: argparse.Namespace) -> list[str]:
    """The GPUs to use; on a CPU their places only limit what runs at a time."""
    if arguments.device == "cpu":
        return [str(number) for number in range(arguments.gpus or 1)]
    return visible_gpus()[: arguments.gpus]


def about(arguments: argparse.Namespace) -> dict[str, Any]:
    """Hardware, command and date, for the reports."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
        hardware = "; ".join(sorted(set(found.stdout.splitlines())))
    except (OSError, subprocess.SubprocessError):
        hardware = "no GPU"
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "hardware": f"{hardware}, {os.cpu_count()} processors",
        "model": f"{arguments.shape} {arguments.dtype}, random weights",
        "limits": f"TTFT {arguments.ttft:g} ms, {arguments.attainment:.0%} of requests",
        "command": shlex.join(["python", "-m", "bench.goodput", *sys.argv[1:]]),
    }


async def compare(
    plan: Plan, arms: Sequence[Arm], setup: Setup, comparison: Comparison, gpus: list[str], at_once: bool
) -> None:
    """Measures every arm; results are added in the arms' order."""
    plan.out.mkdir(parents=True, exist_ok=True)
    async with gpu_samples(plan.out / _GPU_SAMPLES):
        results = await _results(plan, arms, setup, gpus, at_once)
    for arm, result in zip(arms, results, strict=True):
        if isinstance(result, str):
            print(f"bench.goodput: {arm.name} skipped: {result}", file=sys.stderr)
            comparison.skip(arm, plan.limits, result)
        else:
            comparison.curves += result


async def _results(
    plan: Plan, arms: Sequence[Arm], setup: Setup, gpus: list[str], at_once: bool
) -> list[list[Curve] | str]:
    """Returns the curves of each arm, or the reason why it was skipped."""
    pool = GpuPool(gpus)

    async def one(arm: Arm) -> list[Curve] | str:
        if arm.gpus > pool.size:
            return f"needs {arm.gpus} GPUs, {pool.size} here"
        async with pool.take(arm.gpus) as taken:
            try:
                return await measure_arm(plan, arm, setup, taken)
            except NotServedError as error:
                return str(error)

    if at_once:
        return await asyncio.gather(*map(one, arms))
    return [await one(arm) for arm in arms]


async def measure_arm(plan: Plan, arm: Arm, setup: Setup, gpus: Sequence[str]) -> list[Curve]:
    """The arm's curve under each limit, and the ideal ones; writes what its streams and the overload showed.
    Raises NotServedError."""
    runs: list[tuple[float, Run]] = []
    streams: dict[str, Any] = {}
    servers: dict[str, Any] = {}
    of_classes: dict[str, Any] = {}
    async with serve(arm, setup, gpus) as target:
        for number, each in enumerate(plan.rates):
            rate = each * arm.gpus
            seed = plan.seed + _SEED_STEP * number
            load = Load(
                plan.workload, rate, plan.seconds, seed, plan.slo, plan.processes, text=plan.text
            )  # fmt: skip
            begun, usage = datetime.now(), Usage({})
            run = await measure(load, target, plan.out / arm.name / f"{each:g}", _VOCAB)
            runs.append((rate, run))
            if clocks := clocks_between(plan.out / _GPU_SAMPLES, gpus, begun, datetime.now()):
                _say(f"{arm.name} at {each:g}/s/GPU: {clocks}")
            cpus = usage.shares()
            of_cpus = f"{cpus['others']:.1f} processors busy, {cpus['stolen']:.2f} taken by the host"
            _say(f"{arm.name} at {each:g}/s/GPU: {of_cpus}")
            shown = [f"{judged(run, rate, limits).attainment:.0%}" for limits in plan.limits]
            figures = stream_figures(run.records)
            _say(f"{arm.name} at {each:g}/s/GPU: {' '.join(shown)}; {figures or 'no streams'}")
            for limits in plan.limits:
                if of_class := judged_by_class(run, rate, limits):
                    of_classes[f"{each:g} {limits.tpot_ms:g}"] = of_class
                    parts = ", ".join(f"{name} {share:.0%}" for name, share in of_class.items())
                    _say(f"{arm.name} at {each:g}/s/GPU, {limits.tpot_ms:g} ms: {parts}")
            streams[f"{each:g}"] = None if figures is None else asdict(figures)
            if arm.kind == "baton":
                times = server_times(read_samples(run.path / run_folder.METRICS))
                _say(f"{arm.name} at {each:g}/s/GPU: {times}")
                servers[f"{each:g}"] = times.as_dict()
        overloads = await _overloads(plan, arm, target)
    found = {
        "streams_ms": streams, "servers": servers, "classes": of_classes,
        "overloads": [one.as_dict() for one in overloads],
    }  # fmt: skip
    (plan.out / f"{arm.name}.json").write_text(json.dumps(found, indent=1) + "\n")
    return curves_of(arm, runs, plan.limits, plan.ideal)


async def _overloads(plan: Plan, arm: Arm, target: Target) -> list[Overload]:
    """Runs the overload and judges it by each limit; returns nothing where none is asked for."""
    if plan.overload is None:
        return []
    seed = plan.seed + _SEED_STEP * len(plan.rates)
    rate = plan.overload * arm.gpus
    load = Load(plan.workload, rate, plan.overload_s, seed, plan.slo, plan.processes, text=plan.text)
    seen = await overload(load, target, plan.out / arm.name / "overload", _VOCAB)
    found = [seen.judged(limits) for limits in plan.limits]
    for one in found:
        _say(f"{arm.name}, twice {plan.overload:g}/s/GPU: {one}")
    return found


def _say(words: str) -> None:
    print(f"bench.goodput: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_program("goodput", main)
