"""The loads of the table in docs/kubernetes.md, and the table.

    python -m tests.scaling.scenarios        prints it, in about ten minutes

A worker serves half a prompt a second. `step`: from 0.3 to 2 times what four workers serve, for fifteen
minutes, and back. `flash`: six times the load for three minutes. `day`: a sine between 0.2 and 1.8 times what
four serve.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.scaling.autoscaler import (
    TOLERANCE,
    Autoscaler,
    Trigger,
    decode_triggers,
    former_decode_triggers,
    former_prefill_triggers,
    prefill_triggers,
)
from tests.scaling.modelled_scaling import Load, Run, Shape, simulate

PREFILL_USE, DECODE_USE = 0.7, 0.8
MOST = 24
_PREFILL_S, _DECODE_S, _SEQUENCES = 2.0, 20.0, 10
# What a worker of each role serves, in requests a second.
PER_WORKER = {"prefill": 1 / _PREFILL_S, "decode": _SEQUENCES / _DECODE_S}
STEP_AT, STEP_END, STEP_OVER = 300.0, 1200.0, 2400.0
FLASH_AT, FLASH_END = 300.0, 480.0
DAY = 86_400.0

_COLUMNS: tuple[str, ...] = ("load", "role", "start", "triggers", "asked after", "most", "needed", "refused")
_COLUMNS += ("hours", "known", "reversals", "unsafe")

Triggers = Callable[[str], Sequence[Trigger]]


def chart(role: str) -> Sequence[Trigger]:
    """The triggers of the chart."""
    return prefill_triggers(PREFILL_USE) if role == "prefill" else decode_triggers(DECODE_USE)


def former(role: str) -> Sequence[Trigger]:
    """The triggers of chart 0.1.0 for a role."""
    return former_prefill_triggers() if role == "prefill" else former_decode_triggers()


def needed(role: str, rate: float) -> int:
    """Workers that a rate keeps busy as far as they should be."""
    use = PREFILL_USE if role == "prefill" else DECODE_USE
    return max(1, math.ceil(rate / PER_WORKER[role] / use - 1e-9))


def enough(role: str, rate: float) -> int:
    """The number of pods that the autoscaler leaves as they are: fewer than `needed` by its tolerance."""
    return needed(role, rate / (1 + TOLERANCE))


def rates(name: str, role: str) -> tuple[Callable[[float], float], float, float]:
    """The rate by time, its highest value, and the length."""
    four = 4 * PER_WORKER[role]
    if name == "step":
        return lambda t: four * (2.0 if STEP_AT <= t < STEP_END else 0.3), 2 * four, STEP_OVER
    if name == "flash":
        return lambda t: four * (1.8 if FLASH_AT <= t < FLASH_END else 0.3), 1.8 * four, 3600.0
    return lambda t: four * (1 - 0.8 * math.cos(2 * math.pi * t / DAY)), 1.8 * four, DAY


@dataclass(frozen=True)
class Outcome:
    """A run, and the least hours of a scaler that knows the rate."""

    run: Run
    known_hours: float


def outcome(
    name: str, role: str, start_s: float, triggers: Triggers = chart, slots: int = _SEQUENCES
) -> Outcome:
    """Runs one scenario. `slots`: of a decode worker, which has KV blocks for ten sequences."""
    rate, most, seconds = rates(name, role)
    load = Load(rate, most, seconds, prefill_s=_PREFILL_S, decode_s=_DECODE_S)
    if role == "decode":
        load = Load(rate, most, seconds, prefill_s=0.001, decode_s=_DECODE_S)
    scaler = Autoscaler(triggers(role), 1, MOST, needed(role, rate(0.0)))
    run = simulate(load, Shape(role, start_s, sequences=_SEQUENCES, slots=slots), scaler)
    known = sum(needed(role, rate(float(at))) for at in range(0, int(seconds), 60)) / 60
    return Outcome(run, known)


def main() -> None:
    """Prints the table of all scenarios."""
    print("| " + " | ".join(_COLUMNS) + " |")
    print("|---" * len(_COLUMNS) + "|")
    names = sys.argv[1:] or ("step", "flash", "day")
    for name in names:
        for role in ("prefill", "decode"):
            for start_s in (120.0,) if name == "day" else (60.0, 120.0, 300.0):
                for what, triggers in (("chart", chart), ("0.1.0", former)):
                    print(row(name, role, start_s, what, triggers), flush=True)


def row(name: str, role: str, start_s: float, what: str, triggers: Triggers) -> str:
    """A line of the table."""
    found = outcome(name, role, start_s, triggers, slots=2 * _SEQUENCES)
    run, rate = found.run, rates(name, role)[0]
    at = {"step": STEP_AT, "flash": FLASH_AT, "day": DAY / 2}[name]
    wanted = needed(role, rate(at))
    reached = next(
        (t - at for t, number in run.changes if t >= at and number >= enough(role, rate(at))), None
    )
    asked = "" if name == "day" else "never" if reached is None else f"{reached:.0f} s"
    share = run.unserved / max(1, run.unserved + run.served)
    cells = [name, role, f"{start_s:.0f} s", what, asked, run.most(0.0, DAY), wanted, f"{share:.1%}"]
    cells += [f"{run.hours:.1f}", f"{found.known_hours:.1f}", run.reversals, run.unsafe]
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
