"""Products of a mixture's experts by every tuning: what `GroupedTuning.of` should choose, for a layer's rows.

    python -m bench.decode experts [--shape qwen3-30b-a3b] [--dtype bf16] [--rows 1,8,64,256,2048] [--json]

Each row draws its experts uniformly. A line a number of rows and product (`gate_up` with its
gate, `down`): microseconds by a worker's tuning (`us`) and by the best one, `tb_s` and `tflop_s` of the
former, and `library_us`, which `torch._grouped_mm` takes for the product alone, of rows that are sorted by
expert already. Several draws of experts are launched in turn, so that weights are not in the GPU's cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from bench.options import numbers, program_parser, show
from bench.shapes import SHAPES, Precision, Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from baton.engine.kernels.fusion import Epilogue
    from baton.engine.kernels.gpu.experts.align_rows import Tiles
    from baton.engine.kernels.gpu.experts.grouped_tile import GroupedTuning
    from baton.engine.kernels.weight_stack import WeightStack

# Bytes that the draws of one measurement read, several times a second-level cache; draws at most.
_READ_BYTES, _MOST_DRAWS = 256 << 20, 16


def main() -> None:
    parser = program_parser("decode", __doc__, "experts")
    mixtures = sorted(name for name, shape in SHAPES.items() if shape.experts)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=mixtures)
    parser.add_argument("--dtype", default="bf16", help="bf16, fp16, fp32 or fp64")
    parser.add_argument("--rows", type=numbers, default=[1, 8, 64, 256, 2048], help="of a step")
    parser.add_argument("--json", action="store_true", help="one object a line")
    arguments = parser.parse_args()
    for found in _lines(arguments):
        show(found, arguments.json)


def _lines(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name in ("gate_up", "down"):
        layer = Experts(SHAPES[arguments.shape], name, Precision(arguments.dtype), "cuda")
        for rows in arguments.rows:
            yield {"shape": arguments.shape, "dtype": arguments.dtype, **layer.measure(rows)}


def tunings() -> list[GroupedTuning]:
    """The tunings that are tried."""
    from baton.engine.kernels.gpu.experts.grouped_tile import GroupedTuning

    return [
        GroupedTuning(columns, width, stages, warps)
        for columns, width, stages, warps in product((16, 32, 64, 128), (64, 128), (2, 3, 4), (4, 8))
    ]


@dataclass(frozen=True, slots=True)
class Draw:
    """Rows' experts as a step has them: `tiles` for the kernel; for the library the ends of each expert's
    rows, and how many experts have any."""

    tiles: Tiles
    ends: Tensor
    taken: int


class Experts:
    """One product of all experts of a layer, of random numbers."""

    def __init__(self, shape: Shape, name: str, precision: Precision, device: str) -> None:
        import torch

        from baton.engine.kernels.fusion import Epilogue
        from baton.engine.kernels.weight_stack import WeightStack

        n, self.k = shape.products()[name]
        self.name, self.experts, self.device = name, shape.experts, device
        self.top_k = int(shape.config["num_experts_per_tok"])
        self.epilogue: Epilogue = Epilogue.SWIGLU if name == "gate_up" else Epilogue.PLAIN
        self.dtype: torch.dtype = getattr(torch, precision.torch_dtype)
        weight = torch.randn(self.experts * n, self.k, dtype=self.dtype, device=device) * 0.02
        self.stack: WeightStack = WeightStack(weight, self.experts)
        self.outputs = n // 2 if self.epilogue.gated else n
        self.nbytes = n * self.k * self.dtype.itemsize

    def measure(self, rows: int) -> dict[str, Any]:
        """Times the products of `rows` rows by every tuning."""
        import torch

        from baton.engine.kernels.gpu.experts.grouped_tile import GroupedTuning
        from bench.decode.timing import microseconds

        first = self.draw(rows)
        count = min(_MOST_DRAWS, -(-_READ_BYTES // (first.taken * self.nbytes)))
        draws = [first, *(self.draw(rows) for _ in range(count - 1 if self.device == "cuda" else 0))]
        places, entries = first.tiles.entry.numel(), rows * self.top_k
        inputs, outputs = (rows, places) if self.epilogue.gated else (places, entries)
        x = torch.randn(inputs, self.k, dtype=self.dtype, device=self.device)
        out = torch.zeros(outputs, self.outputs, dtype=self.dtype, device=self.device)
        chosen = GroupedTuning.of(first.tiles.tile_rows, self.epilogue, self.dtype)
        times = {}
        for tuning in {chosen: None, **dict.fromkeys(tunings())}:
            try:
                took = microseconds(partial(self.launch, draws, x, out, tuning), self.device)
            except Exception:  # more shared memory or registers than this GPU has, say
                continue
            times[tuning] = took / len(draws)
        best = min(times, key=lambda tuning: times[tuning])
        us, read = times[chosen], sum(draw.taken for draw in draws) / len(draws) * self.nbytes
        operations = 2 * rows * self.top_k * self.nbytes / self.dtype.itemsize
        return {
            "product": self.name, "rows": rows, "tile_rows": first.tiles.tile_rows,
            "us": round(us, 2), "tb_s": round(read / us / 1e6, 3), "tflop_s": round(operations / us / 1e6, 1),
            **asdict(chosen), "best_us": round(times[best], 2), "best": asdict(best),
            "library_us": self._library_us(rows, draws, microseconds),
        }  # fmt: skip

    def draw(self, rows: int) -> Draw:
        """Experts of each row, each drawn uniformly, and their tiles."""
        import torch

        from baton.engine.kernels.expert_tiles import own_tile_rows, rows_of_tile
        from baton.engine.kernels.gpu.experts.align_rows import EntryTiles, Tiles, align_rows

        ids = torch.rand(rows, self.experts).topk(self.top_k, 1).indices.int()
        counts = torch.bincount(ids.flatten(), minlength=self.experts)
        there = ids.to(self.device)
        if rows <= own_tile_rows(self.top_k, self.experts):
            tiles = EntryTiles.empty(rows, self.top_k, self.device).of(there)
        else:
            tiles = Tiles.empty(rows, self.top_k, self.experts, self.device, rows_of_tile(rows))
            align_rows(tiles, there, counts.int().to(self.device)[None], rows)
        return Draw(tiles, counts.cumsum(0).int().to(self.device), int((counts > 0).sum()))

    def launch(self, draws: list[Draw], x: Tensor, out: Tensor, tuning: GroupedTuning) -> None:
        """Launches the product of each draw, as a step does."""
        from baton.engine.kernels.gpu.experts.grouped_linear import grouped_linear

        for draw in draws:
            grouped_linear(out, x, self.stack, draw.tiles, self.top_k, self.epilogue, tuning)

    def _library_us(
        self, rows: int, draws: list[Draw], microseconds: Callable[[Callable[[], None], str], float]
    ) -> float | None:
        """The library's time for a draw; None where it has no product of this dtype or device."""
        import torch

        x = torch.randn(rows * self.top_k, self.k, dtype=self.dtype, device=self.device)
        weight = self.stack.weight
        assert isinstance(weight, torch.Tensor)
        matrices = weight.view(self.experts, -1, self.k).transpose(-2, -1)

        def launch() -> None:
            for draw in draws:
                torch._grouped_mm(x, matrices, offs=draw.ends)

        try:
            return round(microseconds(launch, self.device) / len(draws), 2)
        except RuntimeError:
            return None
