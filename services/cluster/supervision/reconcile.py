"""Decides which workers to start, kill or remove: a pure function of the wanted and observed workers and the
time.

A worker that ended is restarted: at once if it had run for long, else after a pause that doubles with each
start of the last minute. A hung worker is killed, and then counts as ended; one that is starved is not hung
(`baton/base/process_watch.py`). One that refused to start (`INVALID`: its model folder is missing, a file is
damaged) is tried again after longer pauses, since the cause may be temporary. A worker whose name was taken
by a newer start is not restarted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from baton.base.process_watch import hangs
from services.cluster.supervision.report import Phase

# Only starts in this window count; no worker is started more than MAX_STARTS times within it.
WINDOW_S = 60.0
FIRST_PAUSE_S = 0.5
MAX_STARTS = 8
# Pauses after consecutive refusals; they double up to the longest.
FIRST_REFUSED_PAUSE_S, LONGEST_REFUSED_PAUSE_S = 2.0, 30.0
_MOST_DOUBLINGS = 16
# Multiplies the hang timeout for an actor, which is on no request's path.
ACTOR_TIMEOUT_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class Observed:
    """One worker as last reported.

    `silent_s` and `ran_s` are those of its `Report`. `starts` are the times of its starts, oldest first;
    `refusals` counts its latest consecutive refused starts, the last of them at `refused_at`. `replaced`: a
    newer start of the same worker has its name.
    """

    phase: Phase
    silent_s: float = 0.0
    ran_s: float = 0.0
    replaced: bool = False
    refusals: int = 0
    refused_at: float = 0.0
    starts: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process for this worker."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the worker's process; with `actor`, the actor that runs it too, since that one hangs."""

    name: str
    actor: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Drain and remove a worker that is no longer wanted."""

    name: str


Action = Start | Kill | Remove


def plan(
    wanted: Collection[str], live: Mapping[str, Observed], now: float, hang_timeout_s: float
) -> list[Action]:
    """The actions that are due, at most one per worker. `live` has every worker that was ever observed; one
    without an entry has never been started."""
    actions: list[Action] = [Remove(name) for name in live if name not in wanted]
    for name in wanted:
        action = _due(name, live.get(name, Observed(Phase.MISSING)), now, hang_timeout_s)
        if action is not None:
            actions.append(action)
    return actions


def _due(name: str, observed: Observed, now: float, hang_timeout_s: float) -> Action | None:
    match observed.phase:
        case Phase.STARTING:
            return None  # `WorkerProcess` enforces the start timeout
        case Phase.SERVING:
            if hangs(observed.silent_s, observed.ran_s, hang_timeout_s):
                return Kill(name, actor=False, reason=f"it has not answered for {observed.silent_s:.1f} s")
            return None
        case Phase.UNKNOWN:
            if observed.silent_s > hang_timeout_s * ACTOR_TIMEOUT_FACTOR:
                return Kill(
                    name, actor=True, reason=f"its actor has not answered for {observed.silent_s:.1f} s"
                )
            return None
    if observed.replaced:
        return None
    due_at = start_at(observed.starts, now)
    if observed.refusals:
        due_at = max(due_at, refused_until(observed.refusals, observed.refused_at))
    return Start(name) if now >= due_at else None


def refused_until(refusals: int, refused_at: float) -> float:
    """The time of the next start after `refusals` (>= 1) consecutive refused starts, the last at
    `refused_at`."""
    doublings = min(refusals - 1, _MOST_DOUBLINGS)  # 2.0 ** 1024 would overflow
    return refused_at + min(FIRST_REFUSED_PAUSE_S * 2.0**doublings, LONGEST_REFUSED_PAUSE_S)


def start_at(starts: tuple[float, ...], now: float) -> float:
    """The earliest time to restart a worker that ended; at most `now` where it may start at once."""
    recent = [start for start in starts if start > now - WINDOW_S]
    if len(recent) < 2:
        return now  # no other start in the window
    if len(recent) >= MAX_STARTS:
        return recent[-MAX_STARTS] + WINDOW_S
    return recent[-1] + FIRST_PAUSE_S * 2.0 ** (len(recent) - 2)
