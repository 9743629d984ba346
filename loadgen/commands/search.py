"""`loadgen search`: finds the highest arrival rate that meets the limits."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from loadgen.analysis import run_folder
from loadgen.analysis.run_folder import Run
from loadgen.commands import flags
from loadgen.common.errors import LoadgenError
from loadgen.common.settings import Settings
from loadgen.generator.interrupt import Interrupt
from loadgen.goodput.campaign import Campaign
from loadgen.goodput.curve import Curve, write_curve
from loadgen.goodput.search import SearchPlan
from loadgen.reports.console import show_curve
from loadgen.reports.write import write_curve_reports, write_rows
from loadgen.targets.preflight import preflight

DESCRIPTION = (
    "Finds the goodput: the highest Poisson arrival rate at which the share of requests that meet every "
    "limit reaches the goal, with an interval. A rate at which the backlog grows is unstable. Exit code "
    "0: found, 1: no rate meets the goal, or all do, 2: nothing could be measured, 3: INVALID."
)
DEFAULT_BUDGET_S = 480.0


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this command."""
    flags.add_target(parser)
    group = parser.add_argument_group("search")
    group.add_argument(
        "--budget",
        type=float,
        default=DEFAULT_BUDGET_S,
        metavar="S",
        help="total time in seconds (default %(default)g)",
    )
    group.add_argument(
        "--start-rate", type=float, metavar="R", help="first rate (default: one request at a time)"
    )
    group.add_argument("--max-rate", type=float, metavar="R", help="highest rate to try")
    flags.add_shared(parser)


def main(arguments: argparse.Namespace) -> int:
    """Runs the search and returns the exit code."""
    settings = flags.settings_of(arguments, {"rate": arguments.start_rate or 1.0, "duration_s": 1.0})
    require_limits(settings)
    if arguments.budget < 10:
        raise LoadgenError("--budget must be 10 s or more")
    path = run_folder.fresh_folder(arguments.out, "search")
    curve = asyncio.run(_search(settings, path, arguments))
    publish(curve, path, settings, as_json=arguments.json)
    if curve.invalid:
        return 3
    return 0 if curve.crossing is not None else 1


def require_limits(settings: Settings) -> None:
    """Raises LoadgenError where there are no limits."""
    if not settings.judge.goodput and not any(one.goodput for one in settings.load.classes):
        raise LoadgenError("--goodput or --preset must define a good request")


async def _search(settings: Settings, path: Path, arguments: argparse.Namespace) -> Curve:
    began = time.monotonic()
    before = await preflight(settings)
    budget = max(1.0, arguments.budget - (time.monotonic() - began))
    start = arguments.start_rate or 1.0 / max(1e-3, before.lone_s)
    plan = SearchPlan(settings.judge.attainment, start, budget, arguments.max_rate)
    with Interrupt() as interrupt:
        campaign = Campaign(before, path, report, interrupt, rows_of(arguments))
        return await campaign.search(plan)


def publish(curve: Curve, path: Path, settings: Settings, *, as_json: bool) -> None:
    """Writes the curve and its reports to the folder, and prints it."""
    write_curve(path, curve)
    write_curve_reports(path, curve)
    if as_json:
        print(json.dumps({"out": str(path), "settings": settings.model_dump(mode="json"), **curve.as_dict()}))
    else:
        show_curve(curve, path, Console(highlight=False))


def rows_of(arguments: argparse.Namespace) -> Callable[[Run], None]:
    """The function that writes additional files of each run."""
    return write_rows if arguments.parquet else lambda run: None


def report(line: str) -> None:
    """Prints a line of progress to stderr."""
    print(f"loadgen: {line}", file=sys.stderr, flush=True)
