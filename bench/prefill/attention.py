"""A layer's prompt attention alone, each way that there is: what the paged kernel's tuning and the
library's rule should be. Where layers differ by their windows, the mean of one period of them.

    python -m bench.prefill.attention [--shape llama-3.1-8b] [--dtype bf16] [--runs 0+8192,0+1024,7168+1024]
        [--json]

A run is start+rows: rows of one sequence behind so many cached tokens. For each: the paged kernel by every
tuning, and the library (its prefix gathered and joined) by the rule; `plan_s`: how long the library took to
plan its shapes, which is done only at the start.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from baton.device.nvidia_libraries import ENVIRONMENT
from bench.case_output import show
from bench.precision import Precision
from bench.shapes import SHAPES

if TYPE_CHECKING:
    from baton.engine.kernels.gpu.attention.prompt_items import PromptTuning
    from baton.engine.prefill.attention_plan import LibraryRule

_RUNS = "0+1024,0+2048,0+8192,6144+512,4096+1024,7168+1024,16384+2048,16384+8192,7168+128"
_BLOCK_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.prefill.attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--runs", default=_RUNS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)  # as an engine is started; torch is imported later
    for text in arguments.runs.split(","):
        start, rows = map(int, text.split("+"))
        bench = Bench(arguments.shape, arguments.dtype, start, rows, arguments.device)
        for found in bench.measure():
            show({"shape": arguments.shape, "dtype": arguments.dtype, **found}, arguments.json)


def tunings() -> list[PromptTuning]:
    """What is tried."""
    from baton.engine.kernels.gpu.attention.prompt_items import PromptTuning

    return [
        PromptTuning(queries=128, tile=64, warps=8, stages=3),
        PromptTuning(queries=128, tile=64, warps=8, stages=2),
        PromptTuning(queries=128, tile=64, warps=8, stages=4),
        PromptTuning(queries=128, tile=32, warps=8, stages=4),
        PromptTuning(queries=64, tile=64, warps=4, stages=2),
        PromptTuning(queries=64, tile=64, warps=4, stages=3),
        PromptTuning(queries=64, tile=32, warps=4, stages=3),
    ]


class Bench:
    """One run's tensors, of random numbers: a prompt of `start + rows` tokens, blocks dealt out shuffled."""

    def __init__(
        self, shape: str, dtype: str, start: int, rows: int, device: str, rule: LibraryRule | None = None
    ) -> None:
        import torch

        from baton.engine.memory.kv_cache import KVCache
        from baton.engine.prefill.attention import prompt_workspace
        from baton.engine.prefill.attention_plan import KeySplit, LibraryRule
        from baton.engine.sequence import Limits, SamplingParams, Sequence
        from bench.random_model import random_model, randomize
        from bench.shapes import Shape

        config = SHAPES[shape].config
        layers = config["sliding_window_pattern"] if config.get("sliding_window") else 1
        small = {"num_hidden_layers": layers, "vocab_size": 512, "intermediate_size": 256, "eos_token_id": 0}
        config = {**config, **small}
        self.start, self.rows = start, rows
        self.decoder = random_model(Shape(config), Precision(dtype), start + rows + 1, _BLOCK_TOKENS, device)
        # Whatever the rule thinks worth it: that is to be found out.
        self.rule = rule or replace(
            LibraryRule.of(rows), least_rows=1, least_alone=1, least_prefix=2048, least_pairs=1
        )
        blocks = -(-(start + rows) // _BLOCK_TOKENS)
        self.cache = KVCache(self.decoder.layout, 1 + blocks, device)
        randomize(self.cache)
        self.sequence = Sequence((1,) * (start + rows), start + rows, SamplingParams(), Limits(1))
        table = tuple((1 + torch.randperm(blocks)).tolist())
        self.sequence.blocks = (table,) * len(self.decoder.layout.groups)
        self.workspace = prompt_workspace(self.decoder, rows, self.rule, KeySplit())
        self.workspace.qkv[:rows].normal_()

    def measure(self) -> list[dict[str, Any]]:
        """A line for each tuning, and one for the library."""
        found: list[dict[str, Any]] = []
        for tuning in tunings():
            name = f"{tuning.queries}x{tuning.tile}, {tuning.warps} warps, {tuning.stages} stages"
            launch, _ = self.launch(None, tuning)
            found.append({"by": f"paged {name}", **self._timed(launch)})
        launch, plan_s = self.launch(self.rule, tunings()[0])
        found.append({"by": "library", **self._timed(launch), "plan_s": round(plan_s, 2)})
        return found

    def launch(self, rule: LibraryRule | None, tuning: PromptTuning) -> tuple[Callable[[], None], float]:
        """The run's attention in all layers, and the seconds that making it ready took."""
        import torch

        from baton.device.upload import put_ints
        from baton.engine.plan.step_plan import Chunk, step_of
        from baton.engine.prefill.attention import PlannedRows, PromptAttention
        from baton.engine.prefill.attention_plan import KeySplit
        from baton.engine.prefill.step_inputs import StepInputs

        begun = time.perf_counter()
        attention = PromptAttention(self.decoder, self.cache, self.workspace, self.rows, rule, KeySplit())
        ready = time.perf_counter() - begun
        plans = [attention.plan([(self.start, self.rows)], heads, tuning) for heads in attention.heads]
        if rule is not None and not any(plan.attention.by_library for plan in plans):
            print(f"{self.start}+{self.rows}: the library takes nothing of it", file=sys.stderr)
        step = StepInputs(step_of([Chunk(self.sequence, self.start, self.rows)]), self.rows, plans)
        there = torch.empty(step.layout.size, dtype=torch.int32, device=self.decoder.device)
        put_ints(step.values(step.layout), there)
        places = step.layout.places(there)
        groups = [
            PlannedRows(plan, group, places.tables, lines)
            for plan, group, lines in zip(plans, places.groups, step.lines, strict=True)
        ]
        layers = [layer.attention for layer in self.decoder.layers]

        def run() -> None:
            for layer in layers:
                attention.run(layer, self.rows, groups[layer.group])

        return run, ready

    def _timed(self, launch: Callable[[], None]) -> dict[str, Any]:
        c, layers = self.decoder.config, self.decoder.layers
        windows = [self.decoder.layout.groups[layer.attention.group].window for layer in layers]
        seen = sum(self.pairs(window) for window in windows) / len(layers)
        us = microseconds(launch, self.decoder.device.type) / len(layers)
        tflops = 4.0 * c.num_heads * c.head_dim * seen / us / 1e6
        return {"start": self.start, "rows": self.rows, "us": round(us, 1), "tflop_s": round(tflops, 1)}

    def pairs(self, window: int | None) -> float:
        """Pairs of a row and a key that it sees, in one layer."""
        if window is None:
            return (self.start + (self.rows + 1) / 2) * self.rows
        return sum(min(position + 1, window) for position in range(self.start, self.start + self.rows))


def microseconds(launch: Callable[[], None], device: str) -> float:
    """Duration of one launch: the median of a graph's replays; on a CPU it runs once."""
    if device == "cuda":
        from baton.engine.tuning.measurement import graph_us

        return graph_us(launch)
    begun = time.perf_counter()
    launch()
    return (time.perf_counter() - begun) * 1e6


if __name__ == "__main__":
    main()
