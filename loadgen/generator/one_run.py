"""One run from preflight to folder: load and scraping at the same time, then the leak check."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from loadgen.analysis import run_folder
from loadgen.analysis.run_folder import Run
from loadgen.common.server_samples import write_samples
from loadgen.generator.processes import Progress, measure
from loadgen.generator.progress import ProgressView
from loadgen.generator.scrape import Scraper
from loadgen.targets.leak_check import check_leaks
from loadgen.targets.preflight import Preflight

Decide = Callable[[Progress], bool]


async def run_once(before: Preflight, path: Path, title: str, go_on: Decide = lambda _: True) -> Run:
    """Runs the load with the settings of the preflight, and writes the folder.

    `go_on` may stop the run early. Raises LoadgenError where the target is lost or a process dies.
    """
    settings = before.settings
    origin = time.monotonic()
    scraper = Scraper(settings.generator.metrics_urls, settings.target, lambda: time.monotonic() - origin)
    scraping = asyncio.create_task(scraper.run())
    try:
        with ProgressView(settings, title, go_on) as view:
            measured = await measure(settings, path, view.watch)
    finally:
        scraping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await scraping
    leaks = await check_leaks(settings.target)
    # The scraper started before the processes; shifted to the run's own start.
    shift = measured.started_monotonic - origin
    write_samples(path / run_folder.METRICS, [sample.shifted(-shift) for sample in scraper.samples])
    more = {"lone_s": before.lone_s, "warmups": before.warmups, **leaks.as_dict()}
    return run_folder.keep(path, settings, measured, more)
