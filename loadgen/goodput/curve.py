"""The curve of attainment over rate that a search or sweep writes to its folder."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.analysis.run_folder import Run
from loadgen.analysis.slo import Judge
from loadgen.analysis.steady import Steadiness
from loadgen.common.errors import LoadgenError
from loadgen.common.record import Outcome, Record
from loadgen.goodput.crossing import FORMULA, Crossing
from loadgen.goodput.probe import Probe, Verdict
from loadgen.goodput.search import Goodput

CURVE = "curve.json"


@dataclass(frozen=True, slots=True)
class Point:
    """A probe, the folder of its run, and some of its figures (milliseconds)."""

    probe: Probe
    folder: str
    invalid: tuple[str, ...]
    good_rate: float
    figures: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Curve:
    """Points ordered by rate. `crossing` is the goodput, if found; `finding` describes it, and `confirmed` is
    the folder of the run that confirmed it.
    """

    kind: str
    target: str
    goal: float
    limits_ms: dict[str, float]
    points: tuple[Point, ...]
    finding: str = ""
    crossing: Crossing | None = None
    confirmed: str | None = None
    seconds: float = 0.0
    invalid: tuple[str, ...] = ()
    formula: str = field(default=FORMULA)

    def as_dict(self) -> dict[str, Any]:
        """The curve as JSON values."""
        return {"valid": not self.invalid, **dataclasses.asdict(self)}


def probe_of(run: Run, rate: float) -> Probe:
    """The probe of a run at `rate`. Requests in flight when a run was stopped early count as never ended:
    they are part of the backlog, and the run had already failed.
    """
    judge = Judge.of(run.settings)
    judged = [record for record in run.records if record.outcome != Outcome.CANCELLED]
    scheduled = np.array([record.scheduled for record in judged])
    ended = np.array([_end(record) for record in judged])
    good = np.array([judge.good(record) for record in judged], np.bool_)
    starts = np.array([record.scheduled for record in judged if record.turn == 0])
    return Probe.of(rate, run.settings.judge.attainment, scheduled, ended, good, starts)


def point_of(run: Run, probe: Probe) -> Point:
    """The curve's point for a run."""
    quantities = run.summary.quantities
    figures = {
        f"{name}_p{percentile}": quantities[name].at(percentile)
        for name in ("ttft", "tpot", "itl", "e2el")
        for percentile in ("50", "90", "99")
    }
    return Point(
        probe,
        run.path.name,
        tuple(reason.text for reason in run.summary.invalid),
        run.summary.throughput.good,
        figures,
    )


def _end(record: Record) -> float:
    return np.inf if record.ended is None or record.outcome == Outcome.STOPPED else record.ended


def outcome_of(result: Goodput) -> str:
    """The finding as text, with the rate that it depends on."""
    rates = [probe.rate for probe in result.probes]
    if result.crossing is not None or not rates:
        return result.finding.value
    at = min(rates) if "no rate" in result.finding.value else max(rates)
    return f"{result.finding.value} ({at:g}/s)"


def write_curve(path: Path, curve: Curve) -> None:
    """Writes the curve to the folder of the search or sweep."""
    (path / CURVE).write_text(json.dumps(curve.as_dict(), indent=1) + "\n")


def read_curve(path: Path) -> Curve:
    """Reads the curve. Raises LoadgenError where the folder has none."""
    try:
        document = json.loads((path / CURVE).read_text())
        document.pop("valid")
        points = tuple(
            Point(**(one | {"probe": _probe(one["probe"]), "invalid": tuple(one["invalid"])}))
            for one in document.pop("points")
        )
        crossing = document.pop("crossing")
        invalid = tuple(document.pop("invalid"))
        return Curve(
            **document,
            points=points,
            invalid=invalid,
            crossing=None if crossing is None else Crossing(**crossing),
        )
    except OSError as error:
        raise LoadgenError(f"{path} is no search or sweep: {error.strerror}") from None
    except (ValueError, TypeError, KeyError) as error:
        raise LoadgenError(f"{path} is no search or sweep of this version: {type(error).__name__}") from None


def _probe(document: dict[str, Any]) -> Probe:
    return Probe(
        **(
            document
            | {"verdict": Verdict(document["verdict"]), "steadiness": Steadiness(document["steadiness"])}
        )
    )
