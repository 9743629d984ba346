"""Decides whether a run is valid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from loadgen.analysis.steady import Steadiness, Window
from loadgen.common.settings import JudgeSettings

_BUSY = "more processes, or a less busy machine"
_LIMITED = "a higher limit for its container, or none"


class ReasonKind(StrEnum):
    """The kind of a problem: the first three concern the generator, the others the server or the load."""

    LAG = "lag"
    NOT_SENT = "not sent"
    MISMATCH = "mismatch"
    WINDOW = "window"
    ERRORS = "errors"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason why a run is INVALID, for programs and for people."""

    kind: ReasonKind
    text: str


@dataclass(frozen=True, slots=True)
class Grounds:
    """What validity depends on. Lags are p99 in milliseconds; `throttled_ms` is of each tenth of a second;
    counts are of requests in the window.
    """

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
    """All reasons why the run is INVALID; empty for a valid one."""
    reasons = [*_of_the_generator(grounds, limits), *_of_the_window(grounds.window)]
    if not grounds.ok:
        reasons.append(Reason(ReasonKind.NOTHING, "no request of the window succeeded"))
    failed = sum(grounds.failed.values())
    if failed > limits.max_error_share * grounds.due:
        kinds = ", ".join(f"{count} {kind}" for kind, count in grounds.failed.items())
        text = f"{failed} of {grounds.due} requests failed ({kinds}); allowed: {limits.max_error_share:.0%}"
        reasons.append(Reason(ReasonKind.ERRORS, text))
    return reasons


def _of_the_generator(grounds: Grounds, limits: JudgeSettings) -> list[Reason]:
    reasons: list[Reason] = []
    if grounds.not_sent:
        text = f"{grounds.not_sent} requests exceeded --max-in-flight: use more processes"
        reasons.append(Reason(ReasonKind.NOT_SENT, text))
    lags = (
        ("requests left {} late", grounds.send_lag_ms, limits.max_lag_ms, _BUSY),
        ("tokens were read {} late", grounds.read_lag_ms, limits.max_read_lag_ms, _BUSY),
        ("its event loop was {} late", grounds.loop_lag_ms, limits.max_lag_ms, _BUSY),
        ("it waited {} for a CPU", grounds.cpu_wait_ms, limits.max_lag_ms, _BUSY),
        ("a CPU limit took {} of each tenth of a second", grounds.throttled_ms, limits.max_lag_ms, _LIMITED),
    )
    for what, lag_ms, limit_ms, remedy in lags:
        if lag_ms > limit_ms:
            late = what.format(f"{lag_ms:.1f} ms")
            text = f"the generator lagged: {late} at p99 (at most {limit_ms:g}): {remedy}"
            reasons.append(Reason(ReasonKind.LAG, text))
    if grounds.mismatched > limits.max_mismatch_share * max(1, grounds.ok):
        text = (
            f"{grounds.mismatched} of {grounds.ok} requests had token counts other than requested or reported"
        )
        reasons.append(Reason(ReasonKind.MISMATCH, text))
    return reasons


def _of_the_window(window: Window) -> list[Reason]:
    if window.steadiness is Steadiness.GROWING:
        text = (
            f"the backlog grew by {window.growth:.0f} requests in {window.seconds:.0f} s: the server is past "
            "its capacity, and latencies depend on the duration of the run"
        )
    elif window.steadiness is Steadiness.MOVING:
        text = (
            f"the window is not steady: the backlog moved by {window.growth:+.0f} requests around a mean of "
            f"{window.backlog:.0f}"
        )
    else:
        return []
    return [Reason(ReasonKind.WINDOW, text)]
