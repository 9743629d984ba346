"""When a number is not to be believed, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from loadgen.analysis.steady import Steadiness

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loadgen.analysis.steady import Window
    from loadgen.common.settings import JudgeSettings


_BUSY = "more processes, or a less busy machine"
_LIMITED = "a higher limit for its container, or none"


class ReasonKind(StrEnum):
    """What is wrong: the first three are the generator's, the others the server's or the load's."""

    LAG = "lag"
    NOT_SENT = "not sent"
    MISMATCH = "mismatch"
    WINDOW = "window"
    ERRORS = "errors"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a run is INVALID, for programs and for people."""

    kind: ReasonKind
    text: str


@dataclass(frozen=True, slots=True)
class Grounds:
    """What a run is judged by. Lags are p99 in milliseconds, `throttled_ms` of what a CPU limit took from
    each tenth of a second; counts are of the requests in the window."""

    window: Window
    due: int
    ok: int
    failed: Mapping[str, int]
    mismatched: int
    not_sent: int
    send_lag_ms: float
    read_lag_ms: float
    loop_lag_ms: float
    cpu_wait_ms: float
    throttled_ms: float


def invalid_because(grounds: Grounds, limits: JudgeSettings) -> list[Reason]:
    """Every reason why the run says nothing about the server; empty where it does."""
    reasons = [*_of_the_generator(grounds, limits), *_of_the_window(grounds.window)]
    if not grounds.ok:
        reasons.append(Reason(ReasonKind.NOTHING, "no request of the window ended well"))
    failed = sum(grounds.failed.values())
    if failed > limits.max_error_share * grounds.due:
        kinds = ", ".join(f"{count} {kind}" for kind, count in grounds.failed.items())
        text = f"{failed} of {grounds.due} requests failed ({kinds}); {limits.max_error_share:.0%} may"
        reasons.append(Reason(ReasonKind.ERRORS, text))
    return reasons


def _of_the_generator(grounds: Grounds, limits: JudgeSettings) -> list[Reason]:
    reasons: list[Reason] = []
    if grounds.not_sent:
        text = f"the generator had no room for {grounds.not_sent} requests (--max-in-flight): more processes"
        reasons.append(Reason(ReasonKind.NOT_SENT, text))
    lags = (
        ("requests left {} late", grounds.send_lag_ms, limits.max_lag_ms, _BUSY),
        ("tokens had come {} before they were read", grounds.read_lag_ms, limits.max_read_lag_ms, _BUSY),
        ("its event loop was {} late", grounds.loop_lag_ms, limits.max_lag_ms, _BUSY),
        ("it waited {} for a CPU", grounds.cpu_wait_ms, limits.max_lag_ms, _BUSY),
        ("a CPU limit took {} of a tenth of a second", grounds.throttled_ms, limits.max_lag_ms, _LIMITED),
    )
    for what, lag_ms, limit_ms, remedy in lags:
        if lag_ms > limit_ms:
            late = what.format(f"{lag_ms:.1f} ms")
            text = f"the generator lagged: {late} at p99 (at most {limit_ms:g}): {remedy}"
            reasons.append(Reason(ReasonKind.LAG, text))
    if grounds.mismatched > limits.max_mismatch_share * max(1, grounds.ok):
        text = f"{grounds.mismatched} of {grounds.ok} requests had other token counts than asked for or told"
        reasons.append(Reason(ReasonKind.MISMATCH, text))
    return reasons


def _of_the_window(window: Window) -> list[Reason]:
    if window.steadiness is Steadiness.GROWING:
        text = (
            f"the backlog grew by {window.growth:.0f} requests in {window.seconds:.0f} s: the server is past "
            "its capacity, and every latency depends on how long one looks"
        )
    elif window.steadiness is Steadiness.MOVING:
        text = (
            f"the window is not steady: the backlog moved by {window.growth:+.0f} requests around a mean of "
            f"{window.backlog:.0f}"
        )
    else:
        return []
    return [Reason(ReasonKind.WINDOW, text)]
