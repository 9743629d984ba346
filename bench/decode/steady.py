"""Decode with every slot busy in every step, for fixed steps or for seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.decode.case import FIRST, LAST, SPARE, Case
from bench.decode.clocks import ROWS, Lines, figures
from bench.decode.engine import DecodeEngine

# Steps after the first full one that are left out of a window of seconds.
_WARM = 32
_LAST_STEPS = 7


def run_tokens(engine: DecodeEngine, case: Case) -> dict[str, Any]:
    """Step time over output tokens `FIRST` to `LAST`, at a mean context of `context` + 96."""
    reader = engine.clocks()
    before = engine.loop.tokens_decoded
    for index in range(case.batch):
        engine.admit(case, index, LAST + SPARE + 1)
    wanted = before + case.batch * (LAST + SPARE)
    engine.turn_until(lambda: engine.loop.tokens_decoded >= wanted)
    engine.empty()
    lines = engine.lines_of(reader)
    if lines is None:
        return {}
    # Admitted over several steps; in the middle of that the mean sequence draws its token 1.
    begun = np.flatnonzero(np.diff(lines[:, ROWS], prepend=0) > 0)
    middle = int(begun[0] + begun[-1]) // 2
    window = lines[middle + FIRST - 1 : middle + LAST + 1]
    return _figures(case, window, (FIRST + LAST) // 2, engine.read_bytes_s)


def run_seconds(
    engine: DecodeEngine, case: Case, seconds: float, at_end: Callable[[], None] | None = None
) -> dict[str, Any]:
    """One batch for the whole window: no sequence ends in it; contexts grow from `context` on.

    `at_end` is called after the window, when no step is queued and all slots are still active. `last_ms`: the
    time of a step just before, at the contexts of that time.
    """
    reader = engine.clocks()
    for index in range(case.batch):
        engine.admit(case, index, engine.size.tokens - case.context)
    tokens = engine.loop.tokens_decoded
    wanted = tokens + case.batch * _WARM
    engine.turn_until(lambda: engine.loop.tokens_decoded >= wanted)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        engine.turn()
        if reader is not None:
            reader.look(engine.ended_steps)
    ended = engine.ended_steps
    engine.drain()
    last = engine.ended_steps
    if at_end is not None:
        at_end()
    engine.empty()
    lines = engine.lines_of(reader)
    if reader is None or lines is None:
        return {}
    joined = int(np.flatnonzero(lines[:, ROWS] == case.batch)[0])
    first, end = joined + _WARM, ended - reader.first
    found = _figures(case, lines[first:end], (first + end) / 2 - joined, engine.read_bytes_s)
    return {**found, "last_ms": figures(lines[: last - reader.first][-_LAST_STEPS:]).get("tpot_ms")}


def _figures(case: Case, lines: Lines, mean_output: float, read_bytes_s: float) -> dict[str, Any]:
    rows = sorted(set(lines[:, ROWS].tolist()))
    if rows != [case.batch]:
        raise RuntimeError(f"steps of {rows} rows, not of {case.batch}")
    found = figures(lines)
    if "tpot_ms" not in found:
        return found
    floor_ms = case.floor_ms(case.context + mean_output, read_bytes_s)
    return {
        **found,
        "floor_ms": round(floor_ms, 3),
        "of_floor": round(floor_ms / found["tpot_ms"], 3),
        "mean_context": round(case.context + mean_output),
    }
