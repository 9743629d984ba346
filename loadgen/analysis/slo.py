"""Decides which requests are good.

A request is good when it succeeded and met every limit of its class. A failed one is a miss, and stays in the
denominator of attainment. A limit on a figure that a request does not have (the TPOT of one token) is met, as
in vLLM. Requests cancelled by their client are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from loadgen.analysis.metrics import Metric, limitable
from loadgen.common.errors import LoadgenError
from loadgen.common.record import Outcome, Record
from loadgen.common.settings import Settings

GOOD_FORMULA = "a request that succeeded and met every limit of its class"
ATTAINMENT_FORMULA = "good / (all that were due, failed ones included, less those cancelled by their client)"


def parse_goodput(items: Sequence[str]) -> dict[str, float]:
    """Parses limits in milliseconds, such as `ttft:300 tpot:30`. Raises LoadgenError for an invalid one."""
    limits: dict[str, float] = {}
    for item in items:
        name, colon, text = item.partition(":")
        try:
            limit = float(text)
        except ValueError:
            limit = -1.0
        if not colon or not 0 < limit < float("inf"):
            raise LoadgenError(f"{item!r} is not a limit (METRIC:MILLISECONDS, such as ttft:300)")
        limits[limitable(name).name] = limit
    return limits


class Judge:
    """Applies the limits of each request's class."""

    def __init__(self, limits: Mapping[str, Mapping[str, float]]) -> None:
        self._limits: dict[str, list[tuple[Metric, float]]] = {
            name: [(limitable(metric), limit / 1e3) for metric, limit in own.items()]
            for name, own in limits.items()
        }

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The limits of each class, or the run's where a class has none."""
        common = settings.judge.goodput
        return cls({one.name: one.goodput or common for one in settings.load.classes})

    def good(self, record: Record) -> bool:
        """True if the request succeeded and met every limit."""
        if record.outcome != Outcome.OK:
            return False
        for metric, limit in self._limits[record.klass]:
            value = metric.of(record)
            if value is not None and value > limit:
                return False
        return True
