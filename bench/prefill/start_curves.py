"""Measurements of a worker's start on one GPU, with token 0 in every row and with random tokens, in turn.

    python -m bench.prefill.start_curves [--shape llama-3.1-8b] [--dtype bf16] [--quantization fp8|int8|int4]
        [--kv-dtype auto|fp8] [--slots 256] [--rows 2048] [--repeats 3]

Random weights. One JSON object: milliseconds by rows, medians of the repeats, of decode steps of each bucket
without attention (`decode_ms`), of a layer's products (`product_ms`) and of prefill steps (`prefill_ms`). A
line has those with token 0, those with random tokens, and by how many per cent the latter are more;
`spread_percent` is how far apart the repeats of one kind are at most.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from baton.device.nvidia_libraries import ENVIRONMENT
from baton.engine.random_tokens import random_tokens
from bench.decode.case import Case, EngineSize
from bench.decode.engine import DecodeEngine
from bench.decode.front import Front
from bench.precision import Precision
from bench.shapes import SHAPES

if TYPE_CHECKING:
    from baton.engine.prefill.gpu_pass import PrefillPass

Curves = dict[str, dict[int, float]]
"""Seconds by rows, by the name of what took them."""

_CONTEXT = 64
# Prefill steps of one measurement, behind one that is not counted.
_STEPS = 5
# Longer than any step; how often its end is looked for.
_MOST_S, _POLL_S = 5.0, 0.0002


class StartCurves:
    """An engine's decode steps and prefill passes, and the measurements of its start."""

    def __init__(self, engine: DecodeEngine, most_rows: int) -> None:
        from baton.engine.prefill.attention import library_rule
        from baton.engine.prefill.gpu_pass import PrefillPass

        self._engine, model = engine, engine.decoder
        rule = library_rule(model, most_rows)
        self._pass: PrefillPass = PrefillPass(model, engine.model.cache, most_rows, rule)
        self._pass.warm()

    def measure(self, tokens: Sequence[int]) -> Curves:
        """The curves with these tokens, one for each row of the largest step."""
        return {
            "decode_ms": self._decode(tokens),
            "product_ms": self._products(tokens),
            "prefill_ms": {rows: self._step_s(tokens[:rows]) for rows in self._step_rows()},
        }

    def _decode(self, tokens: Sequence[int]) -> dict[int, float]:
        import torch

        from baton.engine.executor.graph_decode_loop import GraphDecodeLoop

        loop = self._engine.loop
        assert isinstance(loop, GraphDecodeLoop)
        there = loop.step_state.pass_.inputs.token
        there.copy_(torch.tensor(tokens[: there.numel()], dtype=there.dtype))
        found = loop.bucket_seconds()
        loop.observe()
        return found

    def _products(self, tokens: Sequence[int]) -> dict[int, float]:
        """By products whose inputs a step with these tokens has left."""
        self._step_s(tokens[: self._pass.most_rows])
        self._pass.measure_products()
        times = self._pass.row_times
        return dict(zip(times.rows, times.seconds, strict=True))

    def _step_rows(self) -> list[int]:
        most = self._pass.most_rows
        return [rows for rows in (128, 512, 1024, 2048) if rows < most] + [most]

    def _step_s(self, tokens: Sequence[int]) -> float:
        """The median prefill step behind another one, so that the host's launches take no part."""
        from baton.device.cuda_stream import compute_stream
        from baton.engine.plan.prefill_step import PrefillStep

        model = self._engine.decoder
        step = PrefillStep.on_scratch(model.layout, 0, tokens)
        stream = compute_stream(model.device)
        with stream.activate():
            ends = []
            for _ in range(1 + _STEPS):
                self._pass.forward(step)
                ends.append(stream.record_event())
        until = time.monotonic() + _MOST_S
        while not ends[-1].query():
            if time.monotonic() > until:
                raise TimeoutError(f"a step has not ended after {_MOST_S} s")
            time.sleep(_POLL_S)
        return median(end.seconds_since(begun) for begun, end in pairwise(ends))


def compare(
    measure: Callable[[Sequence[int]], Curves], vocab: int, rows: int, repeats: int
) -> dict[str, Any]:
    """Measures with both kinds of tokens in turn → for each curve, by rows: milliseconds with token 0, with
    random tokens, and per cent more; and the spread of repeats in per cent."""
    kinds = {"token_0": [0] * rows, "random": random_tokens(vocab, rows)}
    found: dict[str, list[Curves]] = {kind: [] for kind in kinds}
    for _ in range(repeats):
        for kind, tokens in kinds.items():
            found[kind].append(measure(tokens))
    return {name: _compared(found, name) for name in found["random"][0]}


def _compared(found: dict[str, list[Curves]], name: str) -> dict[str, Any]:
    by_rows: dict[str, Any] = {}
    spread = 0.0
    for rows in found["random"][0][name]:
        repeats = {
            kind: [curves[name][rows] for curves in measured if rows in curves[name]]
            for kind, measured in found.items()
        }
        if not all(repeats.values()) or not min(map(min, repeats.values())):
            continue  # left out of one of the curves, or the host was disturbed
        zero, drawn = (1e3 * median(repeats[kind]) for kind in ("token_0", "random"))
        spread = max(spread, *(max(each) / min(each) - 1 for each in repeats.values()))
        by_rows[str(rows)] = [round(zero, 4), round(drawn, 4), round(100 * (drawn / zero - 1), 2)]
    return {**by_rows, "spread_percent": round(100 * spread, 2)}


def main() -> None:
    arguments = _parser().parse_args()
    os.environ.update(ENVIRONMENT)  # as an engine is started
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    precision = Precision(arguments.dtype, arguments.quantization, False, arguments.kv_dtype)
    case = Case(arguments.shape, precision, arguments.slots, _CONTEXT, "greedy", "fast")
    engine = DecodeEngine(case, EngineSize.steady([case], None), Front)
    try:
        vocab, rows = engine.decoder.config.vocab_size, max(arguments.rows, arguments.slots)
        curves = StartCurves(engine, arguments.rows)
        found = compare(curves.measure, vocab, rows, arguments.repeats)
    finally:
        engine.close()
    print(json.dumps({"shape": arguments.shape, "device": torch.cuda.get_device_name(), **found}, indent=1))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.prefill.start_curves",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--quantization", choices=("fp8", "int8", "int4"), help="of the weights")
    parser.add_argument("--kv-dtype", default="auto", choices=("auto", "fp8"), help="of the KV cache")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--rows", type=int, default=2048, help="rows of the largest prefill step")
    parser.add_argument("--repeats", type=int, default=3)
    return parser


if __name__ == "__main__":
    main()
