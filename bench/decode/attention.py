"""One layer's decode attention alone, by every tuning: what `AttentionTuning.of` should choose.

    python -m bench.decode.attention [--shape llama-3.1-8b] [--dtype bf16] [--kv-dtype auto,fp8]
        [--runs 1x1024,8x1024,64x1024,256x1024,32x8192] [--programs 1,2,4] [--json]

A run is rows x context: so many sequences of so many tokens each. `programs`: rows are cut so that there are
about so many programs for each multiprocessor at least; without it, as a worker cuts them. `tb_s`: bytes of
keys, values and scales, over the time; `chosen`: what a worker uses.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from baton.device.nvidia_libraries import ENVIRONMENT
from bench.case_output import show
from bench.precision import Precision
from bench.shapes import SHAPES

if TYPE_CHECKING:
    from baton.engine.kernels.gpu.attention.items import AttentionTuning

_RUNS = "1x1024,8x1024,64x1024,256x1024,32x8192"
_BLOCK_TOKENS = 64
# So that a few rows' keys and values are read from memory, not from the GPU's cache.
_LAYERS = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.decode.attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--kv-dtype", default="auto,fp8", help="of auto, fp8")
    parser.add_argument("--runs", default=_RUNS)
    parser.add_argument("--programs", help="programs for each multiprocessor, such as 1,2,4")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    several = [None] if arguments.programs is None else [int(n) for n in arguments.programs.split(",")]
    os.environ.update(ENVIRONMENT)  # as an engine is started; torch is imported later
    for text in arguments.runs.split(","):
        rows, context = map(int, text.split("x"))
        for kv_dtype in arguments.kv_dtype.split(","):
            for programs in several:
                precision = Precision(arguments.dtype, kv_dtype=kv_dtype)
                bench = Bench(arguments.shape, precision, rows, context, "cuda", programs)
                for found in bench.measure():
                    show(found, arguments.json)


def tunings() -> list[AttentionTuning]:
    from baton.engine.kernels.gpu.attention.items import AttentionTuning

    found = [AttentionTuning(warps, stages) for warps in (2, 4, 8) for stages in (2, 3, 4, 5)]
    return [*found, *(AttentionTuning(4, stages, 128) for stages in (2, 3))]


class Bench:
    """One run's tensors, of random numbers; blocks dealt out shuffled."""

    def __init__(
        self,
        shape: str,
        precision: Precision,
        rows: int,
        context: int,
        device: str,
        programs: int | None = None,
    ) -> None:
        """`programs`: as many for each multiprocessor, at least; None: as a worker cuts rows."""
        import torch

        from baton.engine.decode.gpu_pass import DecodePass, PassOptions
        from baton.engine.kernels.gpu.attention.items import SplitPolicy
        from baton.engine.memory.kv_cache import KVCache
        from bench.random_model import random_model, randomize
        from bench.shapes import Shape

        small = {"num_hidden_layers": _LAYERS, "vocab_size": 512, "intermediate_size": 256, "eos_token_id": 0}
        reduced = Shape({**SHAPES[shape].config, **small})
        model = random_model(reduced, precision, context, _BLOCK_TOKENS, device)
        self.rows = rows
        self.run = {"shape": shape, "kv_dtype": precision.kv_dtype, "rows": rows, "context": context}
        if programs is not None:
            self.run["programs"] = programs
        width = -(-context // _BLOCK_TOKENS)
        cache = KVCache(model.layout, 1 + rows * width, device)
        randomize(cache)
        table = (1 + torch.randperm(rows * width)).view(rows, width).int().to(device)
        options = PassOptions.of(model, exact=False)
        if programs is not None:
            wanted = options.multiprocessors * programs // model.config.num_kv_heads
            options = replace(options, policy=SplitPolicy(max(1, wanted)))
        self._pass = DecodePass(model, cache, tuple(table for _ in model.layout.groups), rows, options)
        self._attention = [layer.attention for layer in model.layers]
        self._bytes = rows * reduced.kv_elements_read(context) * reduced.kv_element_bytes(precision)
        self._pass.workspace.qkv[:rows].normal_()
        self._pass.inputs.slot.copy_(torch.arange(rows))
        self._pass.inputs.position.fill_(context - 1)
        self._pass.embed(rows, self._pass.workspace)
        self._device = device

    def measure(self) -> list[dict[str, Any]]:
        """A line for each tuning, the chosen one first."""
        found = []
        for tuning in (None, *tunings()):
            self._pass.options = replace(self._pass.options, attention=tuning)
            self._plan()
            try:
                us = microseconds(self._launch, self._device)
            except Exception:  # more shared memory than this GPU has, say
                continue
            by = {"chosen": True} if tuning is None else asdict(tuning)
            layer_us = us / len(self._attention)
            found.append(self.run | by | {"us": round(layer_us, 1), "tb_s": round(self._bytes / us / 1e6, 3)})
        return found

    def _launch(self) -> None:
        for attention in self._attention:
            self._pass.attend(attention, self.rows, self._pass.workspace)

    def _plan(self) -> None:
        """The lists of items, as a step plans them."""
        import torch
        import triton

        from baton.engine.kernels.gpu.attention.items import TILE
        from baton.engine.kernels.gpu.step.plan_items import plan_items
        from baton.engine.kernels.gpu.step.step_kernels import CONTROL_WORDS, ROWS

        control = torch.zeros(CONTROL_WORDS, dtype=torch.int64, device=self._device)
        control[ROWS.value] = self.rows
        inputs, policy = self._pass.inputs, self._pass.policy(self.rows)
        for items, heads in zip(inputs.items, self._pass.heads, strict=True):
            plan_items[(1,)](
                control, inputs.slot, inputs.position, items.count, items.items, heads.seen,
                policy.wanted, policy.shortest, policy.wave,
                ROWS_POWER=triton.next_power_of_2(self.rows), TILE=TILE, FIXED=0,
            )  # fmt: skip


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
