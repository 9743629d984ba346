"""When a number is not to be believed, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from loadgen.analysis.steady import Steadiness

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loadgen.analysis.steady import Window
    from loadgen.settings import JudgeSettings


@dataclass(frozen=True, slots=True)
class Grounds:
    """What a run is judged by. Lags are p99 in milliseconds; counts are of the requests in the window."""

    window: Window
    due: int
    ok: int
    failed: Mapping[str, int]
    mismatched: int
    not_sent: int
    send_lag_ms: float
    loop_lag_ms: float


def invalid_because(grounds: Grounds, limits: JudgeSettings) -> list[str]:
    """Every reason why the run says nothing about the server; empty where it does."""
    reasons: list[str] = []
    if grounds.not_sent:
        reasons.append(
            f"the generator had no room for {grounds.not_sent} requests (--max-in-flight): more processes"
        )
    if grounds.send_lag_ms > limits.max_lag_ms:
        reasons.append(
            f"the generator lagged: requests left {grounds.send_lag_ms:.1f} ms late at p99 "
            f"(at most {limits.max_lag_ms:g}): more processes, or a less busy machine"
        )
    if grounds.loop_lag_ms > limits.max_lag_ms:
        reasons.append(
            f"the generator lagged: it took notice of tokens up to {grounds.loop_lag_ms:.1f} ms late at p99 "
            f"(at most {limits.max_lag_ms:g}): more processes, or a less busy machine"
        )
    reasons += _of_the_window(grounds.window)
    if not grounds.ok:
        reasons.append("no request of the window ended well")
    failed = sum(grounds.failed.values())
    if failed > limits.max_error_share * grounds.due:
        kinds = ", ".join(f"{count} {kind}" for kind, count in grounds.failed.items())
        reasons.append(
            f"{failed} of {grounds.due} requests failed ({kinds}); at most {limits.max_error_share:.0%} may"
        )
    if grounds.mismatched > limits.max_mismatch_share * max(1, grounds.ok):
        reasons.append(
            f"{grounds.mismatched} of {grounds.ok} requests had other token counts than were asked for or "
            "told: see `mismatches`"
        )
    return reasons


def _of_the_window(window: Window) -> list[str]:
    if window.steadiness is Steadiness.GROWING:
        return [
            f"the backlog grew by {window.growth:.0f} requests in {window.seconds:.0f} s: the server is past "
            "its capacity, and every latency depends on how long one looks"
        ]
    if window.steadiness is Steadiness.MOVING:
        return [
            f"the window is not steady: the backlog moved by {window.growth:+.0f} requests around a mean of "
            f"{window.backlog:.0f}"
        ]
    return []
