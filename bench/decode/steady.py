"""Decode with every slot busy in every step, for fixed steps or for seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from baton.engine.model.layers.experts import ExpertsMlp
from bench.case import FIRST, LAST, SPARE, DecodeCase
from bench.decode.clocks import ROWS, Lines, figures
from bench.decode.engine import DecodeEngine

if TYPE_CHECKING:
    from baton.engine.shared_memory.slot_progress import Progress

# Steps after the first full one that are left out of a window of seconds.
_WARM = 32
_LAST_STEPS = 7


def run_tokens(engine: DecodeEngine, case: DecodeCase) -> dict[str, Any]:
    """Step time over output tokens `FIRST` to `LAST`, at a mean context of `context` + 96."""
    reader = engine.clocks()
    engine.decode(case, LAST + SPARE + 1, LAST + SPARE)
    engine.drain()
    bad = 0 if reader is None else rows_not_numbers(engine, case.batch)
    engine.empty()
    lines = engine.lines_of(reader)
    if lines is None:
        return {}
    # Admitted over several steps; in the middle of that the mean sequence draws its token 1.
    begun = np.flatnonzero(np.diff(lines[:, ROWS], prepend=0) > 0)
    middle = int(begun[0] + begun[-1]) // 2
    window = lines[middle + FIRST - 1 : middle + LAST + 1]
    return {**_figures(case, window, (FIRST + LAST) // 2, engine.read_bytes_s), "rows_not_numbers": bad}


def rows_not_numbers(engine: DecodeEngine, rows: int) -> int:
    """Counts the first `rows` rows whose logits in the last step by graphs are not all finite: such a row's
    time is a row's, but of a mixture all of them take the same experts."""
    loop: Any = engine.loop  # by graphs
    logits: torch.Tensor = loop.step_state.pass_.logits[:rows]
    return int(logits.isfinite().all(1).logical_not().sum())


def experts_read(engine: DecodeEngine, case: DecodeCase) -> dict[str, float]:
    """Experts of a layer, on average, that have rows in one step of the whole batch, beside how many are
    expected where each row draws its own; nothing for a dense model, and where another step came in between.
    Figures of steps whose rows take the same experts are too good."""
    counters = [layer.mlp.taken for layer in engine.decoder.layers if isinstance(layer.mlp, ExpertsMlp)]
    if not counters:
        return {}
    engine.decode(case, LAST + SPARE + 1, FIRST)
    engine.drain()
    before, ended = torch.stack(counters), engine.ended_steps
    engine.turn_until(engine.advance)
    engine.drain()
    rows = torch.stack(counters) - before
    steps = engine.ended_steps - ended
    engine.empty()
    entries = case.batch * int(case.model.config["num_experts_per_tok"])
    if steps != 1 or set(rows.sum(1).tolist()) != {entries}:
        return {}  # not one step of the whole batch
    found, expected = (rows > 0).sum(1).double().mean().item(), case.model.experts_read(case.batch)
    return {"experts_a_layer": round(found, 2), "experts_expected": round(expected, 2)}


def run_seconds(
    engine: DecodeEngine, case: DecodeCase, seconds: float, at_end: Callable[[], None] | None = None
) -> dict[str, Any]:
    """One batch for the whole window: no sequence ends in it; contexts grow from `context` on.

    `at_end` is called after the window, when no step is queued and all slots are still active. `last_ms`: the
    time of a step just before, at the contexts of that time.
    """
    reader = engine.clocks()
    engine.decode(case, engine.size.tokens - case.context, _WARM)
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


def run_drafts(engine: DecodeEngine, case: DecodeCase, count: int = LAST + SPARE) -> dict[str, Any]:
    """Steps of `rows_per_slot` rows a sequence, all but one of drafts: `count` of them, without the first
    `FIRST`. Raises ValueError where the engine has no graph for that number of rows."""
    if engine.oracle is not None:
        engine.oracle.accept(case.accept)
    until = engine.ended_steps + count
    lines, ended = _with_drafts(engine, case, lambda: engine.ended_steps >= until)
    if lines is None:
        return {}
    rows = case.batch * case.rows_per_slot
    full = lines[lines[:, ROWS] == rows][FIRST:]
    return {"rows": rows, "steps": len(full), **_by_token(figures(full), ended)}


def run_text(engine: DecodeEngine, case: DecodeCase, output: int = LAST + SPARE) -> dict[str, Any]:
    """Steps that draw text which repeats itself, with the drafts that a lookup finds, until a sequence has
    `output` more tokens on average; without the first `FIRST` steps. Raises as `run_drafts` does."""
    wanted = engine.loop.tokens_decoded + case.batch * output
    lines, ended = _with_drafts(engine, case, lambda: engine.loop.tokens_decoded >= wanted)
    if lines is None:
        return {}
    drafts, steps = sum(one.drafts for one in ended), sum(one.steps for one in ended)
    return {
        **_by_token(figures(lines[FIRST:]), ended),
        "drafts_a_step": round(drafts / steps, 3),
        "accepted": round(sum(one.accepted for one in ended) / max(drafts, 1), 3),
    }


def _with_drafts(
    engine: DecodeEngine, case: DecodeCase, done: Callable[[], bool]
) -> tuple[Lines | None, list[Progress]]:
    """Runs steps with as many rows as the case's sequences have → the steps' lines, and what became of each
    sequence's drafts."""
    steps, rows = engine.loop.steps, case.batch * case.rows_per_slot
    drafts = case.rows_per_slot > 1
    if drafts and rows not in engine.draft_batches:
        raise ValueError(f"of steps with drafts there are those of {engine.draft_batches} rows, not {rows}")
    steps.draft_batches = (rows,) if drafts else ()
    reader = engine.clocks()
    output = engine.size.tokens - case.context
    keys = [engine.admit(case, index, output) for index in range(case.batch)]
    engine.turn_until(done)
    engine.drain()
    ended = [engine.loop.progress.progress(*key) for key in keys]
    engine.empty()
    steps.draft_batches = ()
    return engine.lines_of(reader), ended


def _by_token(found: dict[str, Any], ended: list[Progress]) -> dict[str, Any]:
    """Figures with the time of a step, and that of a sequence's token."""
    tokens = 1 + sum(one.accepted for one in ended) / sum(one.steps for one in ended)
    step_ms = found.pop("tpot_ms", None)
    times = {} if step_ms is None else {"step_ms": step_ms, "tpot_ms": round(step_ms / tokens, 4)}
    return {"tokens_a_step": round(tokens, 3), **found, **times}


def _figures(case: DecodeCase, lines: Lines, mean_output: float, read_bytes_s: float) -> dict[str, Any]:
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
