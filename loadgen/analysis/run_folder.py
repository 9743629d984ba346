"""The folder of a run. The raw record is the truth; everything else can be made from it again.

settings.json    what was asked for
about.json       when, with what versions, how the generator's processes fared
requests.jsonl   the raw record, a line a request
metrics.jsonl    what the server's own metrics said meanwhile, where they were asked
summary.json     the numbers; report.html and report.md show them
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic

from loadgen.analysis.summary import Summary, summarize
from loadgen.common.errors import LoadgenError
from loadgen.common.record import Record
from loadgen.common.settings import Settings

if TYPE_CHECKING:
    from loadgen.common.measured import Measured

SETTINGS, ABOUT, REQUESTS, SUMMARY = "settings.json", "about.json", "requests.jsonl", "summary.json"
METRICS = "metrics.jsonl"
_PARTS = ("baton-serve", "numpy", "grpcio", "httptools", "uvloop")


@dataclass(frozen=True, slots=True)
class Run:
    """A run as its folder has it."""

    path: Path
    settings: Settings
    records: Sequence[Record]
    summary: Summary
    about: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """What --json prints and summary.json holds."""
        return {
            "out": str(self.path),
            "settings": self.settings.model_dump(mode="json"),
            "about": self.about,
            **self.summary.as_dict(),
        }


def fresh_folder(wanted: str | None, kind: str) -> Path:
    """The folder that was asked for, or a new one named by the time; LoadgenError where it has a run."""
    path = Path(wanted) if wanted else Path("loadgen-runs") / f"{kind}-{datetime.now():%Y%m%d-%H%M%S-%f}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoadgenError(f"{path}: {error.strerror}") from None
    if (path / SETTINGS).exists():
        raise LoadgenError(f"{path} holds a run already")
    return path


def keep(path: Path, settings: Settings, measured: Measured, more: dict[str, Any]) -> Run:
    """Writes a run's folder and returns what it holds."""
    about = {
        "started_at": datetime.fromtimestamp(measured.started_at, UTC).isoformat(),
        # Of the machine's monotonic clock, which the records count from.
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
    """A run from its folder, summed up anew from the raw record; LoadgenError where it is none."""
    try:
        settings = Settings.model_validate_json((path / SETTINGS).read_text())
        about = json.loads((path / ABOUT).read_text())
        with (path / REQUESTS).open("rb") as lines:
            records = [Record.from_line(line) for line in lines]
    except OSError as error:
        raise LoadgenError(f"{path} is no run: {error.strerror}: {error.filename}") from None
    except (ValueError, TypeError, pydantic.ValidationError) as error:
        raise LoadgenError(f"{path} is no run of this version: {type(error).__name__}") from None
    summary = summarize(records, settings, about["processes"], stopped=about["stopped"])
    return Run(path, settings, records, summary, about)


def versions() -> dict[str, str]:
    """Of what measures."""
    found = {"python": platform.python_version(), "machine": platform.platform()}
    for part in _PARTS:
        try:
            found[part] = metadata.version(part)
        except metadata.PackageNotFoundError:
            continue
    return found
