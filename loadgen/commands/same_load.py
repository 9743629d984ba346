"""Sends another server the load of a run: the same arrivals and the same prompts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from loadgen.analysis import run_folder
from loadgen.analysis.run_folder import Run
from loadgen.commands.run import execute
from loadgen.common.settings import Settings
from loadgen.reports.write import write_reports

SCHEMES = ("grpc://", "grpcs://", "http://", "https://")


def is_target(text: str) -> bool:
    """True for a server's address, False for a folder."""
    return text.startswith(SCHEMES)


def send_same_load(first: Run, url: str, model: str, parent: Path | None) -> Run:
    """Sends the load of `first` to another server, writes a folder within `parent`, and returns the run.

    `model`: empty: the one that the server serves. Raises LoadgenError where it does not answer.
    """
    path = run_folder.fresh_folder(None, "run", parent)
    run = asyncio.run(execute(settings_for(first.settings, url, model), path))
    write_reports(run, parquet=False)
    return run


def settings_for(settings: Settings, url: str, model: str) -> Settings:
    """The settings of a run for another server: without what its preflight learned of the first, and without
    the first's admin and metrics addresses."""
    target = {"url": url, "model": model, "admin": "", "extensions": "all"}
    return settings.model_copy(
        update={
            "target": settings.target.model_copy(update=target),
            "generator": settings.generator.model_copy(update={"metrics_urls": ()}),
        }
    )
