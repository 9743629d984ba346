"""Samples of a server's metrics during a run, and the file that keeps them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Sample:
    """One source at one time."""

    at: float
    source: str
    values: dict[str, float]

    def shifted(self, seconds: float) -> Sample:
        """The same on a clock that is so much ahead."""
        return Sample(self.at + seconds, self.source, self.values)


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """A line a sample; no file where there is none."""
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
    """Those of a run's folder; none where there is no file."""
    if not path.exists():
        return []
    with path.open() as lines:
        return [Sample(one["at"], one["source"], one["values"]) for one in map(json.loads, lines)]
