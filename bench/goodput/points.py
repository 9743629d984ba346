"""One arm at rates of its own under each limit, on one cluster: for comparisons with predictions.

    python -m bench.goodput points --arm '2p2d --router-processes 2' --points 1k-256:6:9.4,10.4,11.5
        [--points 1k-256:12:17.5,19.4,21.3:90] [--unstated] [--ttft 500] [--attainment 0.9] [--seconds 45]
        [--seed 0] [--processes 1] [--shape llama-3.1-8b] [--dtype bf16] [--device cuda|cpu]
        [--protocol http|grpc] [--text markov:P [--new-share S]] [--vllm PYTHON] [--vllm-site DIR]
        [--out FILE]

--points WORKLOAD:TPOT:RATES[:SECONDS], once a limit: rates in requests a second and GPU, limits in ms,
SECONDS of each rate where they are not those of --seconds. Requests state
--ttft and the limit as theirs, but with --unstated. Every run has a seed of its own (--seed and 1000 more
each time). A line a run says the rate that was asked for, the one that arrived, and the share of requests in
time; as soon as the run has ended, --out gets the same as a line of JSON, with the gaps at the clients and
how busy the workers were, and with --new-share the share in time of each class of requests. --text: as of
`bench.goodput`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.goodput.arms import KINDS_HELP, WORKLOADS, Arm, Workload, parse_arm
from bench.goodput.observed import server_times, stream_figures
from bench.goodput.runs import Limits, Load, judged, judged_by_class, measure, numbers
from bench.goodput.servers import NotServedError, Setup, serve, until_terminated, visible_gpus
from bench.goodput.texts import RepeatingText, add_text_options, model_of
from bench.options import add_shape_option, program_parser
from loadgen.analysis import run_folder
from loadgen.common.record import NO_FAILURE
from loadgen.common.server_samples import read_samples

# Prompts are of ids below it, which every tokenizer has.
VOCAB = 256
# Requests before each run, as many as the model has whose predictions are compared
# (tests.router.processes.predicted_goodput).
_WARM_UP = 24
# Between the seeds of two runs: loadgen derives others from each.
_SEED_STEP = 1000


@dataclass(frozen=True, slots=True)
class Points:
    """Rates of one workload, a second and GPU, under one TPOT limit in ms; `seconds` of each, None: as
    others."""

    workload: Workload
    tpot_ms: float
    rates: tuple[float, ...]
    seconds: float | None = None


def parse_points(text: str) -> Points:
    """Parses `WORKLOAD:TPOT:RATES[:SECONDS]`, such as `1k-256:6:9.4,10.4`. Raises ValueError."""
    parts = text.split(":")
    if len(parts) not in (3, 4) or parts[0] not in WORKLOADS:
        names = ", ".join(WORKLOADS)
        raise ValueError(f"{text!r} is not WORKLOAD:TPOT:RATES[:SECONDS] with a workload of {names}")
    try:
        tpot_ms, rates = float(parts[1]), tuple(numbers(parts[2]))
        seconds = float(parts[3]) if parts[3:] else None
    except ValueError:
        raise ValueError(f"{text!r}: limit, rates with commas between them and seconds are numbers") from None
    if not rates or min(tpot_ms, *rates, 1.0 if seconds is None else seconds) <= 0:
        raise ValueError(f"{text!r}: at least one rate, and all numbers above 0")
    return Points(WORKLOADS[parts[0]], tpot_ms, rates, seconds)


def main() -> None:
    arguments = _parser().parse_args()
    sys.exit(asyncio.run(until_terminated(run(arguments))))


def _parser() -> argparse.ArgumentParser:
    parser = program_parser("goodput", __doc__, "points")
    add_server_options(parser)
    parser.add_argument(
        "--points",
        action="append",
        required=True,
        type=checked(parse_points),
        help="WORKLOAD:TPOT:RATES[:SECONDS]",
    )
    parser.add_argument("--unstated", action="store_true", help="requests do not state their limits")
    parser.add_argument("--seconds", default=45.0, type=float, help="of each rate")
    parser.add_argument("--protocol", default="http", choices=("http", "grpc"), help="that Baton is asked by")
    add_text_options(parser)
    parser.add_argument("--vllm", default="python3", metavar="PYTHON", help="a Python that has vLLM")
    parser.add_argument("--vllm-site", default="", metavar="DIR", help="folder with vLLM's packages")
    return parser


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Adds what a program of one arm needs: the arm, its model and GPUs, limits, clients, and --out."""
    parser.add_argument("--arm", required=True, type=checked(parse_arm), help=KINDS_HELP)
    parser.add_argument("--ttft", default=500.0, type=float, help="limit in ms")
    parser.add_argument("--attainment", default=0.9, type=float, help="share of requests that meet both")
    parser.add_argument("--seed", default=0, type=int)
    parser.add_argument("--processes", type=int, default=1, help="of loadgen")
    add_shape_option(parser)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, metavar="FILE", help="lines of JSON are appended to it")


def checked(parse: Any) -> Any:
    """Returns `parse` as a type of argparse, whose message is that of the ValueError."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def gpus_of(arm: Arm, arguments: argparse.Namespace) -> list[str]:
    """The GPUs of the arm, none on a CPU. Raises NotServedError where there are too few."""
    if arguments.device == "cpu":
        return []
    found = visible_gpus()
    if len(found) < arm.gpus:
        raise NotServedError(f"needs {arm.gpus} GPUs, {len(found)} here")
    return found[: arm.gpus]


async def run(arguments: argparse.Namespace) -> str | None:
    """Measures all points of the arm, one after the other; returns why it could not."""
    arm, points = arguments.arm, arguments.points
    tokens = max(one.workload.tokens for one in points) + 2
    try:
        text = RepeatingText.of(arguments, [one.workload for one in points])
    except ValueError as error:
        return f"bench.goodput points: {error}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        setup = Setup(
            arguments.shape, arguments.dtype, arguments.device, tokens, arguments.vllm, folder / "servers",
            arguments.vllm_site, arguments.protocol, model_of(text, arguments, folder),
        )  # fmt: skip
        try:
            async with serve(arm, setup, gpus_of(arm, arguments)) as target:
                for number, (each, limits, load) in enumerate(loads(arm, points, arguments, text)):
                    found = await measure(load, target, folder / f"run-{number}", VOCAB)
                    show(_found(arm, each, limits, load, found), arguments.out)
        except NotServedError as error:
            return f"bench.goodput points: {arm.name}: {error}"
    return None


def loads(
    arm: Arm, points: Sequence[Points], arguments: argparse.Namespace, text: RepeatingText | None = None
) -> Iterator[tuple[float, Limits, Load]]:
    """Yields rate a second and GPU, limits and load of each run, in order."""
    number = 0
    for one in points:
        limits = Limits(arguments.ttft, one.tpot_ms, arguments.attainment)
        for rate in one.rates:
            seed = arguments.seed + _SEED_STEP * number
            stated = None if arguments.unstated else limits
            total, processes = rate * arm.gpus, arguments.processes
            seconds = one.seconds or arguments.seconds
            load = Load(one.workload, total, seconds, seed, stated, processes, _WARM_UP, text)
            yield rate, limits, load
            number += 1


def _found(arm: Arm, rate: float, limits: Limits, load: Load, run: run_folder.Run) -> dict[str, Any]:
    probe, streams = judged(run, load.rate, limits), stream_figures(run.records)
    return {
        "arm": arm.name,
        "workload": load.workload.name,
        "tpot_ms": limits.tpot_ms,
        "ttft_ms": limits.ttft_ms,
        "stated": load.slo is not None,
        "asked": rate,
        "arrived": round(probe.offered / arm.gpus, 3),
        "attainment": round(probe.attainment, 4),
        "judged": probe.requests,
        "judged_s": round(probe.seconds, 1),
        "verdict": str(probe.verdict),
        "classes": judged_by_class(run, load.rate, limits),
        "failed": sum(one.outcome not in NO_FAILURE for one in run.records),
        "seed": load.seed,
        "streams_ms": None if streams is None else asdict(streams),
        "servers": server_times(read_samples(run.path / run_folder.METRICS)).as_dict(),
    }


def show(found: dict[str, Any], out: Path | None) -> None:
    """Prints a run as one line, and appends it to `out` as JSON."""
    print(
        f"{found['arm']} {found['workload']} {found['tpot_ms']:g} ms: asked {found['asked']:g}, "
        f"arrived {found['arrived']:g} a second and GPU: {found['attainment']:.1%} of {found['judged']} in "
        f"time, {found['verdict']}, {found['failed']} failed",
        flush=True,
    )
    append(found, out)


def append(found: dict[str, Any], out: Path | None) -> None:
    """Appends a line of JSON to `out`, where there is one."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(json.dumps(found) + "\n")
