"""`loadgen run`: one load against one target."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from loadgen.analysis import run_folder
from loadgen.analysis.run_folder import Run
from loadgen.commands import flags
from loadgen.common.settings import Settings
from loadgen.generator.interrupt import Interrupt
from loadgen.generator.one_run import run_once
from loadgen.load.traces import sniff
from loadgen.reports.console import show_run
from loadgen.reports.write import write_reports
from loadgen.targets.preflight import preflight

DESCRIPTION = (
    "Sends requests in an open loop (Poisson by default) or a closed loop, and reports the results. Latency "
    "counts from the scheduled send. Failed requests are counted and never retried. Exit code 0: all "
    "succeeded, 1: some failed, 2: nothing could be measured, 3: the run is INVALID."
)
DEFAULT_REQUESTS = 20


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this command."""
    flags.add_target(parser)
    when = parser.add_argument_group("when requests are sent").add_mutually_exclusive_group()
    when.add_argument("--rate", type=float, help="requests (or conversations) per second (default 1)")
    when.add_argument("--concurrency", type=int, metavar="N", help="closed loop of N clients")
    when.add_argument(
        "--stages",
        nargs="+",
        metavar="STAGE",
        help="SECONDS:RATE, SECONDS:FROM-TO (linear), SECONDS:FROM~TO (exponential)",
    )
    when.add_argument("--trace", metavar="FILE", help="recorded load: Mooncake JSONL, Azure or BurstGPT CSV")
    until = parser.add_argument_group("end of the load")
    until.add_argument(
        "--num-requests", type=int, metavar="N", help=f"number of requests (default {DEFAULT_REQUESTS})"
    )
    until.add_argument("--duration", dest="duration_s", type=float, metavar="S", help="duration in seconds")
    until.add_argument("--speed", type=float, default=1.0, help="speed of a trace (default 1)")
    until.add_argument(
        "--length-scale", type=float, default=1.0, help="factor of a trace's lengths (default 1)"
    )
    flags.add_shared(parser)


def main(arguments: argparse.Namespace) -> int:
    """Runs the load and returns the exit code."""
    settings = settings_of(arguments)
    path = run_folder.fresh_folder(arguments.out, "run")
    run = asyncio.run(execute(settings, path))
    write_reports(run, parquet=arguments.parquet)
    if arguments.json:
        print(json.dumps(run.as_dict()))
    else:
        show_run(run, Console(highlight=False))
    return exit_code(run)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings of a single load."""
    load: dict[str, Any] = {}
    if arguments.trace is not None:
        load["trace"] = {
            "file": str(Path(arguments.trace).absolute()),
            "format": sniff(arguments.trace),
            "speed": arguments.speed,
            "length_scale": arguments.length_scale,
        }
    elif not arguments.stages:
        if arguments.rate is None and arguments.concurrency is None:
            load["rate"] = 1.0
        if arguments.num_requests is None and arguments.duration_s is None:
            load["num_requests"] = DEFAULT_REQUESTS
    return flags.settings_of(arguments, load)


async def execute(settings: Settings, path: Path) -> Run:
    """Runs preflight and load, and writes the folder."""
    before = await preflight(settings)
    print(
        f"loadgen: a single request takes {before.lone_s * 1e3:.0f} ms; {before.warmups} warm-up requests",
        file=sys.stderr,
    )
    with Interrupt() as interrupt:
        return await run_once(before, path, "run", lambda _: not interrupt.asked)


def exit_code(run: Run) -> int:
    """3 for an INVALID run, 1 if requests failed, else 0."""
    if not run.summary.valid:
        return 3
    return 1 if run.summary.failed else 0
