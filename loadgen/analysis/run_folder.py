"""The folder of a run. Everything in it can be computed again from the raw record.

settings.json    the settings of the run
about.json       time, versions, and the state of the generator's processes
requests.jsonl   the raw record, one line per request
metrics.jsonl    samples of the server's own metrics, where available
summary.json     the figures; report.html and report.md show them
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pydantic

from loadgen.analysis.summary import Summary, summarize
from loadgen.common.errors import LoadgenError
from loadgen.common.record import Measured, Record
from loadgen.common.settings import Settings

SETTINGS, ABOUT, REQUESTS, SUMMARY = "settings.json", "about.json", "requests.jsonl", "summary.json"
METRICS = "metrics.jsonl"
_PARTS = ("baton-serve", "numpy", "grpcio", "httptools", "uvloop")


@dataclass(frozen=True, slots=True)
class Run:
    """A run with its settings, record and summary."""

    path: Path
    settings: Settings
    records: Sequence[Record]
    summary: Summary
    about: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The summary as JSON values, for --json and summary.json."""
        return {
            "out": str(self.path),
            "settings": self.settings.model_dump(mode="json"),
            "about": self.about,
            **self.summary.as_dict(),
        }


def fresh_folder(wanted: str | None, kind: str, parent: Path | None = None) -> Path:
    """Creates the folder `wanted`, or one named by the time within `parent` (None: `loadgen-runs`). Raises
    LoadgenError where it already contains a run."""
    named = f"{kind}-{datetime.now():%Y%m%d-%H%M%S-%f}"
    path = Path(wanted) if wanted else (parent or Path("loadgen-runs")) / named
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoadgenError(f"{path}: {error.strerror}") from None
    if (path / SETTINGS).exists():
        raise LoadgenError(f"{path} contains a run already")
    return path


def keep(path: Path, settings: Settings, measured: Measured, more: dict[str, Any]) -> Run:
    """Writes the folder of a run and returns the run."""
    about = {
        "started_at": datetime.fromtimestamp(measured.started_at, UTC).isoformat(),
        # Offset of the machine's monotonic clock, from which the records count.
        "started_monotonic": measured.started_monotonic,
        "stopped": measured.stopped,
        "processes": measured.processes,
        "versions": versions(),
        **more,
    }
    summary = summarize(measured.records, settings, measured.processes, stopped=measured.stopped)
    run = Run(path, settings, measured.records, summary, about)
    (path / SETTINGS).write_text(settings.model_dump_json(indent=1) + "\n")
    (path / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
    with (path / REQUESTS).open("wb") as lines:
        lines.writelines(record.to_line() for record in measured.records)
    (path / SUMMARY).write_text(json.dumps(run.as_dict(), indent=1) + "\n")
    return run


def load(path: Path) -> Run:
    """Reads a run from its folder and summarises it again. Raises LoadgenError where the folder contains
    none."""
    try:
        settings = Settings.model_validate_json((path / SETTINGS).read_text())
        about = json.loads((path / ABOUT).read_text())
        with (path / REQUESTS).open("rb") as lines:
            records = [Record.from_line(line) for line in lines]
    except OSError as error:
        raise LoadgenError(f"{path} is not a run: {error.strerror}: {error.filename}") from None
    except (ValueError, TypeError, pydantic.ValidationError) as error:
        raise LoadgenError(f"{path} is not a run of this version: {type(error).__name__}") from None
    summary = summarize(records, settings, about["processes"], stopped=about["stopped"])
    return Run(path, settings, records, summary, about)


def versions() -> dict[str, str]:
    """Versions and platform of the generator."""
    found = {"python": platform.python_version(), "machine": platform.platform()}
    for part in _PARTS:
        try:
            found[part] = metadata.version(part)
        except metadata.PackageNotFoundError:
            continue
    return found
