"""Formats numbers for all outputs."""

from __future__ import annotations

import math


def number(value: float | None, digits: int = 3) -> str:
    """Formats the value with `digits` significant digits and no exponent; a dash for None."""
    if value is None or math.isnan(value):
        return "–"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{places}f}"


def percent(share: float | None) -> str:
    """A share as a percentage with one decimal place."""
    return "–" if share is None else f"{share * 100:.1f} %"


def interval(low: float | None, high: float | None) -> str:
    """`[low, high]`, or an empty string."""
    return "" if low is None or high is None else f"[{number(low)}, {number(high)}]"


def counts(by_kind: dict[str, int]) -> str:
    """`3 TIMEOUT, 1 HTTP_503`, or `none`."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(by_kind.items())) or "none"


def limits(by_metric: dict[str, float]) -> str:
    """Limits as users write them: `ttft:300 tpot:30`."""
    return " ".join(f"{name}:{limit:g}" for name, limit in by_metric.items())
