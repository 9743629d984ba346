"""What to do so that the wanted workers run: a pure function of what is wanted, what is seen, and the time.

A worker that ended is started again: at once if it had run for long, else after a pause that doubles with
each start of the last minute. One that hangs is killed, and so becomes one that ended. One that refused to
start (`INVALID`: its model folder is away, a file is damaged) is tried again after longer pauses, since what
it lacks may come back. Only one whose name a newer start of the same worker has taken stays down.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from baton.cluster.report import Phase

# Starts that are younger count; so no worker is started more than MAX_STARTS times in such a window.
WINDOW_S = 60.0
FIRST_PAUSE_S = 0.5
MAX_STARTS = 8
# Pauses after consecutive refusals, which double up to the longest.
FIRST_REFUSED_PAUSE_S, LONGEST_REFUSED_PAUSE_S = 2.0, 30.0
_MOST_DOUBLINGS = 16
# A home is busy with little else than answering, but not on any request's path: it is given longer.
HOME_PATIENCE = 2.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One worker as last reported.

    `starts` are the times it was started at, oldest first; `refusals` counts its latest starts that were
    refused one after the other, the last of them at `refused_at`. `replaced`: a newer start of the same
    worker has its name.
    """

    phase: Phase
    silent_s: float = 0.0
    replaced: bool = False
    refusals: int = 0
    refused_at: float = 0.0
    starts: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process for this worker, with a home if it has none."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the worker's process; with `home`, its home too, which hangs itself."""

    name: str
    home: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Remove:
    """Let it end, and its home with it: nobody wants it any more."""

    name: str


Action = Start | Kill | Remove


def plan(
    wanted: Collection[str], live: Mapping[str, Seen], now: float, hang_timeout_s: float
) -> list[Action]:
    """The actions that are due, at most one a worker; nothing where all is well. `live` holds every worker
    that was ever seen; one without an entry has never been started."""
    actions: list[Action] = [Remove(name) for name in live if name not in wanted]
    for name in wanted:
        action = _due(name, live.get(name, Seen(Phase.MISSING)), now, hang_timeout_s)
        if action is not None:
            actions.append(action)
    return actions


def _due(name: str, seen: Seen, now: float, hang_timeout_s: float) -> Action | None:
    match seen.phase:
        case Phase.STARTING:
            return None  # its home judges how long that may take
        case Phase.SERVING:
            if seen.silent_s > hang_timeout_s:
                return Kill(name, home=False, reason=f"it has not answered for {seen.silent_s:.1f} s")
            return None
        case Phase.UNKNOWN:
            if seen.silent_s > hang_timeout_s * HOME_PATIENCE:
                return Kill(name, home=True, reason=f"its actor has not answered for {seen.silent_s:.1f} s")
            return None
    if seen.replaced:
        return None
    due_at = start_at(seen.starts, now)
    if seen.refusals:
        due_at = max(due_at, refused_until(seen.refusals, seen.refused_at))
    return Start(name) if now >= due_at else None


def refused_until(refusals: int, refused_at: float) -> float:
    """When a worker is tried again whose latest `refusals` (>= 1) starts were refused, the last at
    `refused_at`."""
    doublings = min(refusals - 1, _MOST_DOUBLINGS)  # 2.0 ** 1024 would overflow
    return refused_at + min(FIRST_REFUSED_PAUSE_S * 2.0**doublings, LONGEST_REFUSED_PAUSE_S)


def start_at(starts: tuple[float, ...], now: float) -> float:
    """When a worker that does not run may be started: now or earlier if it may at once."""
    recent = [start for start in starts if start > now - WINDOW_S]
    if len(recent) < 2:
        return now  # its first failure for long may well be its last
    if len(recent) >= MAX_STARTS:
        return recent[-MAX_STARTS] + WINDOW_S
    return recent[-1] + FIRST_PAUSE_S * 2.0 ** (len(recent) - 2)
