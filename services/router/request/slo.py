"""Service level objectives that a client states for its request.

HTTP has the headers `x-slo-ttft-ms` and `x-slo-tpot-ms`, gRPC the fields `ttft_slo_ms` and `tpot_slo_ms`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from baton.base.errors import FieldError

TTFT_HEADER, TPOT_HEADER = "x-slo-ttft-ms", "x-slo-tpot-ms"
# In milliseconds: the longest is about a day; below the shortest, a rate would be infinite.
_SHORTEST_MS, _LONGEST_MS = 1e-3, 1e8


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds: of the time to the first token, counted from the request's arrival, and of the mean
    time per output token after it. None: no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def missed(self, latencies: Mapping[str, float]) -> str:
        """Names the limits that a request missed that had these latencies in seconds, by name, and ended:
        `none`, `ttft`, `tpot` or `both`. One token has no time per output token."""
        limits = {"ttft": self.ttft_s, "tpot": self.tpot_s}
        missed = [
            name
            for name, limit_s in limits.items()
            if limit_s is not None and latencies.get(name, 0.0) > limit_s
        ]
        return "both" if len(missed) == 2 else "".join(missed) or "none"


class Due(NamedTuple):
    """The time at which a first token is due: in `left_s`, of `limit_s` that there were at the request's
    arrival, None where its deadline alone says so."""

    left_s: float
    limit_s: float | None = None


def slo_of_headers(headers: Mapping[str, str]) -> Slo | None:
    """The limits in a request's headers; None without any. Raises FieldError where a value is out of
    bounds."""
    return slo_of(TTFT_HEADER, headers.get(TTFT_HEADER), TPOT_HEADER, headers.get(TPOT_HEADER))


def slo_of(
    ttft_name: str, ttft_ms: str | float | None, tpot_name: str, tpot_ms: str | float | None
) -> Slo | None:
    """The limits given in milliseconds; None without any. Raises FieldError with the value's name where it is
    out of bounds."""
    ttft_s, tpot_s = _seconds(ttft_name, ttft_ms), _seconds(tpot_name, tpot_ms)
    return None if ttft_s is None and tpot_s is None else Slo(ttft_s, tpot_s)


def _seconds(name: str, milliseconds: str | float | None) -> float | None:
    if milliseconds is None:
        return None
    try:
        value = float(milliseconds)
    except ValueError:
        value = math.nan
    if not _SHORTEST_MS <= value <= _LONGEST_MS:
        raise FieldError(f"{name} must be from {_SHORTEST_MS:g} to {_LONGEST_MS:g} milliseconds", param=name)
    return value / 1e3
