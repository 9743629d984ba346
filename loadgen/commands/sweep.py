"""`loadgen sweep`: measures attainment and latency at several rates."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from loadgen.analysis import run_folder
from loadgen.commands import flags
from loadgen.commands.search import publish, report, rows_of
from loadgen.common.errors import LoadgenError
from loadgen.common.settings import Settings
from loadgen.generator.interrupt import Interrupt
from loadgen.goodput.campaign import Campaign
from loadgen.goodput.curve import Curve
from loadgen.targets.preflight import preflight

DESCRIPTION = (
    "Measures each rate in a run of its own, and reports the curve. Exit code 0: done, 2: nothing could be "
    "measured, 3: every run is INVALID."
)


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this command."""
    flags.add_target(parser)
    group = parser.add_argument_group("sweep")
    group.add_argument(
        "--rates", type=float, nargs="+", required=True, metavar="R", help="requests per second"
    )
    group.add_argument(
        "--duration", type=float, default=60.0, metavar="S", help="seconds per rate (default %(default)g)"
    )
    flags.add_shared(parser)


def main(arguments: argparse.Namespace) -> int:
    """Runs the sweep and returns the exit code."""
    if min(arguments.rates) <= 0:
        raise LoadgenError("--rates must be positive")
    # The highest rate is what the warm-up must be wide enough for.
    settings = flags.settings_of(arguments, {"rate": max(arguments.rates), "duration_s": arguments.duration})
    path = run_folder.fresh_folder(arguments.out, "sweep")
    curve = asyncio.run(_sweep(settings, path, arguments))
    publish(curve, path, settings, as_json=arguments.json)
    return 3 if all(point.invalid for point in curve.points) else 0


async def _sweep(settings: Settings, path: Path, arguments: argparse.Namespace) -> Curve:
    before = await preflight(settings)
    with Interrupt() as interrupt:
        campaign = Campaign(before, path, report, interrupt, rows_of(arguments))
        return await campaign.sweep(arguments.rates, arguments.duration)
