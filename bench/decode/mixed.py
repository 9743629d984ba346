"""Decode steps that are part of prefill steps (`engine.mixed_steps`), beside both by themselves.

By the GPU's own events: a step of the batch, a prefill step from a prompt's beginning on, and
one step of both. What prompts cost beside the batch is the difference to the first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from baton.engine.plan.decode_rows import rows_to_mix
from bench.case import SPARE, DecodeCase, EngineSize
from bench.decode.engine import DecodeEngine
from bench.engine_driver import decode_step

if TYPE_CHECKING:
    import torch

    from baton.engine.forward.joined_rows import JoinedRows
    from baton.engine.prefill.gpu_pass import PrefillPass

# Steps of each kind: beforehand, and measured.
_WARM, _COUNT = 3, 20
# Longer than any step; how often its end is looked for.
_MOST_S, _POLL_S = 5.0, 0.0002


class MixedSteps:
    """An engine's prefill pass that decode steps may join."""

    def __init__(self, engine: DecodeEngine, most_rows: int, warm: int = _WARM, count: int = _COUNT) -> None:
        """`warm`, `count`: steps of each kind beforehand, and measured."""
        import torch

        from baton.device.streams.cuda_stream import compute_stream
        from baton.engine.prefill.attention import library_rule
        from baton.engine.prefill.gpu_pass import PrefillPass

        self._engine, model = engine, engine.decoder
        self._warm, self._steps = warm, warm + count
        rule = library_rule(model, most_rows)
        joined = tuple(engine.loop.mixed.values())
        cache = engine.model.cache.ranks[0]
        self._pass: PrefillPass = PrefillPass(model, cache, most_rows, rule, joined=joined)
        self._pass.warm()
        self._pass.measure_products()
        begun, free = time.perf_counter(), _free_bytes(model.device)
        self._pass.capture()
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        self.capture_s = time.perf_counter() - begun
        self.capture_mb = (free - _free_bytes(model.device)) / 1e6
        self.uncaptured = self._pass.uncaptured
        self._stream = engine.loop.stream or compute_stream(model.device)

    def run(self, case: DecodeCase, rows: Sequence[int]) -> dict[str, Any]:
        """Milliseconds of steps with a batch of `case.batch` sequences, for each number of prompt rows. The
        batch ends with it."""
        engine = self._engine
        before = engine.ended_steps
        for index in range(case.batch):
            engine.admit(case, index, _output(case, rows))
        engine.turn_until(lambda: engine.ended_steps > before + case.batch)
        engine.drain()
        found: dict[str, Any] = {"context": case.context, "decode_ms": self._decode_ms()}
        for count in rows:
            alone, both = self._ms(count, joins=False), self._ms(count, joins=True)
            found[f"{count}_rows"] = {
                "prefill_ms": alone,
                "mixed_ms": both,
                "beside_ms": round(both - found["decode_ms"], 3),
            }
        engine.empty()
        return found

    def _ms(self, rows: int, *, joins: bool) -> float:
        """A prefill step of so many rows, behind another one, so that the host's launches take no part."""
        from baton.engine.plan.prefill_step import PrefillStep
        from baton.engine.random_tokens import random_tokens

        model = self._engine.decoder
        tokens = random_tokens(model.config.vocab_size, rows)
        step = PrefillStep.on_scratch(model.layout, 0, tokens)
        took = []
        for _ in range(self._steps):
            self._read()
            joined = self._joined() if joins else None
            with self._stream.activate():
                self._pass.forward(step)
                begun = self._stream.record_event()
                self._pass.forward(step, joined)
                end = self._stream.record_event()
            self._await(end)
            took.append(end.seconds_since(begun))
        return round(1e3 * median(took[self._warm :]), 3)

    def _joined(self) -> JoinedRows:
        loop = self._engine.loop
        loop.observe()
        rows = rows_to_mix(loop.steps)
        joined = None if rows is None else loop.launch_mixed(rows)
        if joined is None:
            raise RuntimeError("no decode step joins")
        return joined

    def _decode_ms(self) -> float:
        took = []
        for _ in range(self._steps):
            self._read()
            with self._stream.activate():
                begun = self._stream.record_event()
            decode_step(self._engine.loop)
            with self._stream.activate():
                end = self._stream.record_event()
            self._await(end)
            took.append(end.seconds_since(begun))
        return round(1e3 * median(took[self._warm :]), 3)

    def _read(self) -> None:
        """Waits until nothing is enqueued; the front reads the ring meanwhile."""
        self._engine.drain()
        self._engine.front.ended()

    def _await(self, end: Any) -> None:
        until = time.monotonic() + _MOST_S
        while not end.query():
            if time.monotonic() > until:
                raise TimeoutError(f"a step has not ended after {_MOST_S} s")
            time.sleep(_POLL_S)


def _output(case: DecodeCase, rows: Sequence[int]) -> int:
    """Tokens that a sequence must be able to decode: while the batch is admitted, and in what is measured."""
    return 2 * case.batch + (2 + len(rows)) * (_WARM + _COUNT)


def _free_bytes(device: torch.device) -> int:
    """Free bytes of the device's memory; 0 on a CPU."""
    import torch

    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


def engine_size(cases: Sequence[DecodeCase], rows: Sequence[int]) -> EngineSize:
    """The size for all cases, one after the other."""
    output = max(_output(case, rows) for case in cases)
    return EngineSize(max(case.batch for case in cases), cases[0].context + output + SPARE + 1)


def run(
    engine: DecodeEngine,
    cases: Sequence[DecodeCase],
    rows: Sequence[int],
    warm: int = _WARM,
    count: int = _COUNT,
) -> list[dict[str, Any]]:
    """Each case's figures, in their order. `warm`, `count`: see `MixedSteps`, no more than the defaults."""
    steps = MixedSteps(engine, max(rows), warm, count)
    start = {
        "capture_s": round(steps.capture_s, 1),
        "capture_mb": round(steps.capture_mb),
        "uncaptured": steps.uncaptured,
    }
    return [start | steps.run(case, rows) for case in cases]
