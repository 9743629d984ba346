"""Samples of a server's metrics during a run, and the file that stores them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """Metrics of one source at one time."""

    at: float
    source: str
    values: dict[str, float]

    def shifted(self, seconds: float) -> Sample:
        """The sample with its time shifted by `seconds`."""
        return Sample(self.at + seconds, self.source, self.values)


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Writes one line per sample; no file without samples."""
    if not samples:
        return
    with path.open("w") as lines:
        for sample in sorted(samples, key=lambda one: one.at):
            document: dict[str, Any] = {
                "at": round(sample.at, 3),
                "source": sample.source,
                "values": sample.values,
            }
            lines.write(json.dumps(document) + "\n")


def read_samples(path: Path) -> list[Sample]:
    """Reads the samples of a run's folder; empty without a file."""
    if not path.exists():
        return []
    with path.open() as lines:
        return [Sample(one["at"], one["source"], one["values"]) for one in map(json.loads, lines)]
