"""Kernels of a mixture by every tuning: what `GroupedTuning.of` should choose for products, and the router.

    python -m bench.decode experts [--shape qwen3-30b-a3b] [--dtype bf16] [--quantization fp8|int4]
        [--rows 1,4,8,32,64,128,256,1024,8192] [--tile-rows 128] [--json]

Each row draws its experts uniformly. A line a number of rows and product (`gate_up` with its
gate, `down`): microseconds by a worker's tuning (`us`) and by the best one, `tb_s` and `tflop_s` of the
former, and `library_us`, which `torch._grouped_mm` takes for the product alone, of rows that are sorted by
expert already. With fp8 there is a line more, of rows that are `codes`: `quantize_us` is the launch that
makes those, and the library's product is `torch._scaled_grouped_mm`. Several draws of experts are launched in
turn, so that weights are not in the GPU's cache.

Numbers of rows that steps compute entry by entry have a line more (`by_entry`), whose `down` also adds up
results, beside those of tiles. Then a line a product and tile of rows: the tunings with the smallest
`over_best`, the geometric mean, over those numbers of rows, of a tuning's time over the best
one's: columns, width, stages, warps, and that mean. Then a line a number of rows of the router, beside what
places entries into tiles (`align_us`) and adds up results (`combine_us`). Last, a line a number of rows of a
whole layer, with launches that begin early (`early_us`) and without.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from baton.engine.kernels.weight_format import FORMATS
from bench.decode import router
from bench.options import add_precision_options, numbers, precision_of, program_parser, show
from bench.shapes import SHAPES, Precision, Shape

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from baton.engine.kernels.fusion import Epilogue
    from baton.engine.kernels.gpu.experts.align_rows import Tiles
    from baton.engine.kernels.gpu.experts.grouped_tile import GroupedTuning
    from baton.engine.kernels.gpu.gemm.gemv import GemvTuning
    from baton.engine.kernels.weight_stack import WeightStack

    Times = dict[GroupedTuning, float]
    """Microseconds by tuning."""

# Bytes that the draws of one measurement read, several times a second-level cache; draws at most.
_READ_BYTES, _MOST_DRAWS = 256 << 20, 16
# Seconds that compiling all tunings of a product may take, and tunings of a last line.
_COMPILE_S, _SHOWN = 120.0, 4


def main() -> None:
    parser = program_parser("decode", __doc__, "experts")
    mixtures = sorted(name for name, shape in SHAPES.items() if shape.experts)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=mixtures)
    add_precision_options(parser, kv=False)
    rows = [1, 4, 8, 32, 64, 128, 256, 1024, 8192]
    parser.add_argument("--rows", type=numbers, default=rows, metavar="N,N", help="of a step")
    parser.add_argument("--tile-rows", type=int, help="of an expert's tile (default: a worker's)")
    parser.add_argument("--json", action="store_true", help="one object a line")
    arguments = parser.parse_args()
    for found in _lines(arguments):
        show(found, arguments.json)


def _lines(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    shape, precision = SHAPES[arguments.shape], precision_of(arguments)
    of_all = {"shape": arguments.shape, "dtype": arguments.dtype, "quantization": arguments.quantization}
    codes = (False, True) if precision.quantization == "fp8" else (False,)
    ways = [Way(each, arguments.tile_rows) for each in codes]
    for name, way in product(("gate_up", "down"), ways):
        _compile_all(shape, name, precision, arguments.rows, way)
        layer = Experts(shape, name, precision, "cuda", way)
        gc.freeze()  # each capture looks at all that is not
        times: dict[int, list[Times]] = {}
        for rows in arguments.rows:
            found, mine = layer.measure(rows)
            times.setdefault(found["tile_rows"], []).append(mine)
            yield of_all | found
            if layer.by_entry(rows) and not way.codes:
                yield of_all | layer.measure_entries(rows)
        for tile_rows, each in times.items():
            kind = {"product": name, "codes": way.codes, "tile_rows": tile_rows}
            yield of_all | kind | {"over_best": best_of_all(each)}
    router.compile_all(shape, precision, arguments.rows)
    for rows in arguments.rows:
        yield of_all | router.Router(shape, precision, rows, "cuda").measure()
    layers = router.Layers(shape, precision, "cuda")
    for rows in arguments.rows:
        yield of_all | layers.measure(rows)


def best_of_all(times: Sequence[Times]) -> list[list[float]]:
    """The tunings that come closest to the best one of each number of rows: columns, width, stages, warps,
    and the geometric mean of the ratios. `times`: by tuning, for each number of rows."""
    everywhere = [tuning for tuning in times[0] if all(tuning in each for each in times)]
    logs = {
        tuning: sum(math.log(each[tuning] / min(each.values())) for each in times) / len(times)
        for tuning in everywhere
    }
    first = sorted(logs, key=lambda tuning: logs[tuning])[:_SHOWN]
    return [[*asdict(tuning).values(), round(math.exp(logs[tuning]), 3)] for tuning in first]


@dataclass(frozen=True, slots=True)
class Way:
    """Operands and tiles of a product. `codes`: rows are codes, as experts in fp8 are; `tile_rows`: of an
    expert's tile; None: a worker's."""

    codes: bool = False
    tile_rows: int | None = None

    def tile(self, rows: int) -> int:
        """Rows of a tile in passes of `rows` rows."""
        from baton.engine.kernels.expert_tiles import rows_of_tile

        return self.tile_rows or rows_of_tile(rows)


WORKERS = Way()


def _compile_all(shape: Shape, name: str, precision: Precision, rows: Sequence[int], way: Way) -> None:
    """Compiles all tunings of a product in several processes at once, for each tile of rows."""
    from baton.engine.tuning.compilation import compile_each

    begun = time.monotonic()
    tiles = {way.tile(each): each for each in reversed(rows)}
    wanted = [(some, tuning) for some in tiles.values() for tuning in tunings()]
    one = partial(compile_tuning, shape, name, precision, way=way)
    compile_each(one, wanted, begun + _COMPILE_S, lambda done, total: None)
    print(f"{name}: {len(wanted)} compiled in {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)


def compile_tuning(
    shape: Shape,
    name: str,
    precision: Precision,
    wanted: tuple[int, GroupedTuning],
    device: str = "cuda",
    way: Way = WORKERS,
) -> None:
    """Launches a product of few experts once, of as many rows and by the tuning that are `wanted`."""
    rows, tuning = wanted
    few = Shape({key: value for key, value in shape.config.items() if key != "num_local_experts"})
    few.config["num_experts"] = shape.config["num_experts_per_tok"]
    layer = Experts(few, name, precision, device, way)
    draw = layer.draw(rows)
    layer.launch([draw], *layer.operands(draw, rows), tuning)


def tunings() -> list[GroupedTuning]:
    """The tunings that are tried."""
    from baton.engine.kernels.gpu.experts.grouped_tile import GroupedTuning

    return [
        GroupedTuning(columns, width, stages, warps)
        for columns, width, stages, warps in product((16, 32, 64, 128), (64, 128, 256), (2, 3, 4), (4, 8))
    ]


def entry_tunings() -> list[GemvTuning]:
    """The tunings that are tried for entries one by one."""
    from baton.engine.kernels.gpu.gemm.gemv import GemvTuning

    return [
        GemvTuning(rows, width, warps)
        for rows, width, warps in product((4, 8, 16), (256, 512, 1024), (2, 4, 8))
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

    def __init__(
        self, shape: Shape, name: str, precision: Precision, device: str, way: Way = WORKERS
    ) -> None:
        import torch

        from baton.engine.kernels.fusion import Epilogue
        from baton.engine.kernels.quantized_weight import QuantizedWeight, Weight
        from baton.engine.kernels.weight_stack import WeightStack

        n, self.k = shape.products()[name]
        self.name, self.experts, self.device, self.way = name, shape.experts, device, way
        self.top_k = int(shape.config["num_experts_per_tok"])
        self.epilogue: Epilogue = Epilogue.SWIGLU if name == "gate_up" else Epilogue.PLAIN
        self.dtype: torch.dtype = getattr(torch, precision.torch_dtype)
        weight: Weight
        if precision.quantization is None:
            weight = torch.randn(self.experts * n, self.k, dtype=self.dtype, device=device).mul_(0.02)
        else:
            form = FORMATS[precision.quantization]
            weight = QuantizedWeight.empty(form, self.experts * n, self.k, device)
            weight.randomize_()
        self.stack: WeightStack = WeightStack(weight, self.experts)
        self.x_scales: Tensor | None = None
        self.outputs = n // 2 if self.epilogue.gated else n
        self.elements, self.nbytes = n * self.k, precision.weight_bytes(n, self.k)

    def operands(self, draw: Draw, rows: int) -> tuple[Tensor, Tensor]:
        """The product's input, random, and memory for its output."""
        import torch

        places, entries = draw.tiles.entry.numel(), rows * self.top_k
        inputs, outputs = (rows, places) if self.epilogue.gated else (places, entries)
        x = torch.randn(inputs, self.k, dtype=self.dtype, device=self.device)
        if self.way.codes:
            x, self.x_scales = x.to(torch.float8_e4m3fn), torch.ones(inputs, device=self.device)
        return x, torch.zeros(outputs, self.outputs, dtype=self.dtype, device=self.device)

    def measure(self, rows: int) -> tuple[dict[str, Any], Times]:
        """Times the products of `rows` rows by every tuning → their figures, and microseconds by tuning."""
        from baton.engine.kernels.gpu.experts.grouped_linear import chosen_tuning
        from bench.decode.timing import microseconds

        first = self.draw(rows)
        count = min(_MOST_DRAWS, -(-_READ_BYTES // (first.taken * self.nbytes)))
        draws = [first, *(self.draw(rows) for _ in range(count - 1 if self.device == "cuda" else 0))]
        x, out = self.operands(first, rows)
        chosen = chosen_tuning(x, self.stack.weight, first.tiles, self.epilogue)
        times: Times = {}
        for tuning in {chosen: None, **dict.fromkeys(tunings())}:
            try:
                took = microseconds(partial(self.launch, draws, x, out, tuning), self.device)
            except Exception:  # more shared memory or registers than this GPU has, say
                continue
            times[tuning] = took / len(draws)
        best = min(times, key=lambda tuning: times[tuning])
        us, read = times[chosen], sum(draw.taken for draw in draws) / len(draws) * self.nbytes
        operations = 2 * rows * self.top_k * self.elements
        found = {
            "product": self.name, "codes": self.way.codes, "rows": rows, "tile_rows": first.tiles.tile_rows,
            "us": round(us, 2), "tb_s": round(read / us / 1e6, 3), "tflop_s": round(operations / us / 1e6, 1),
            **asdict(chosen), "best_us": round(times[best], 2), "best": asdict(best),
            "library_us": self._library_us(rows, draws, microseconds),
            **({"quantize_us": self._quantize_us(len(x), microseconds)} if self.way.codes else {}),
        }  # fmt: skip
        return found, times

    def by_entry(self, rows: int) -> bool:
        """True if steps of `rows` rows compute entries one by one."""
        from baton.engine.kernels.expert_tiles import rows_by_entry

        return rows <= rows_by_entry(self.top_k, self.experts)

    def measure_entries(self, rows: int) -> dict[str, Any]:
        """Microseconds of the entries of `rows` rows, one by one, by a worker's tuning and by the best."""
        import torch

        from baton.engine.kernels.gpu.experts.entry_products import down_tuning, gate_up_tuning
        from bench.decode.timing import microseconds

        draws = [self.experts_of(rows) for _ in range(_MOST_DRAWS if self.device == "cuda" else 1)]
        gated = self.epilogue.gated
        x = torch.randn(rows if gated else rows * self.top_k, self.k, dtype=self.dtype, device=self.device)
        out = x.new_zeros(rows * self.top_k if gated else rows, self.outputs)
        chosen = gate_up_tuning() if gated else down_tuning(self.stack.weight, rows)
        times = {}
        for tuning in {chosen: None, **dict.fromkeys(entry_tunings())}:
            try:
                took = microseconds(partial(self.launch_entries, draws, x, out, tuning), self.device)
            except Exception:  # more registers than this GPU has, say
                continue
            times[tuning] = took / len(draws)
        best = min(times, key=lambda tuning: times[tuning])
        return {
            "product": self.name, "by_entry": True, "rows": rows, "us": round(times[chosen], 2),
            "chosen": asdict(chosen), "best_us": round(times[best], 2), "best": asdict(best),
        }  # fmt: skip

    def launch_entries(self, draws: list[Tensor], x: Tensor, out: Tensor, tuning: GemvTuning) -> None:
        """Launches the product of each draw's entries, as a step does."""
        import torch

        from baton.engine.kernels.gpu.experts.entry_products import add_down_entries, gate_up_entries

        weights = torch.ones(draws[0].shape, device=self.device)
        for ids in draws:
            if self.epilogue.gated:
                gate_up_entries(out, x, ids, self.stack, self.epilogue, tuning)
            else:
                add_down_entries(out, x, ids, weights, self.stack, tuning)

    def experts_of(self, rows: int) -> Tensor:
        """Experts of each row, drawn uniformly [R, k] int32."""
        import torch

        ids = torch.rand(rows, self.experts).topk(self.top_k, 1).indices
        return ids.to(self.device, torch.int32)

    def draw(self, rows: int) -> Draw:
        """Experts of each row, each drawn uniformly, and their tiles."""
        import torch

        from baton.engine.kernels.gpu.experts.align_rows import Tiles, align_rows

        ids = self.experts_of(rows)
        counts = torch.bincount(ids.flatten(), minlength=self.experts)
        tiles = Tiles.empty(rows, self.top_k, self.experts, self.device, self.way.tile(rows))
        align_rows(tiles, ids, counts.int()[None], rows)
        return Draw(tiles, counts.cumsum(0).int(), int((counts > 0).sum()))

    def launch(self, draws: list[Draw], x: Tensor, out: Tensor, tuning: GroupedTuning) -> None:
        """Launches the product of each draw, as a step does."""
        from baton.engine.kernels.gpu.experts.grouped_linear import grouped_linear

        how = self.top_k, self.epilogue, tuning
        for draw in draws:
            grouped_linear(out, x, self.stack, draw.tiles, *how, x_scales=self.x_scales)

    def _library_us(
        self, rows: int, draws: list[Draw], microseconds: Callable[[Callable[[], None], str], float]
    ) -> float | None:
        """The library's time for a draw; None where it has no product of this format, dtype or device."""
        import torch

        weight, kept = self.stack.weight, (self.experts, -1, self.k)
        x = torch.randn(rows * self.top_k, self.k, dtype=self.dtype, device=self.device)
        if isinstance(weight, torch.Tensor):
            one = partial(torch._grouped_mm, x, weight.view(kept).transpose(-2, -1))
        elif self.way.codes:
            codes, matrices = x.to(torch.float8_e4m3fn), weight.codes.view(kept).transpose(-2, -1)
            scales = torch.ones(len(x), device=self.device), weight.scales.view(self.experts, -1)
            one = partial(torch._scaled_grouped_mm, codes, matrices, *scales, out_dtype=self.dtype)
        else:
            return None

        def launch() -> None:
            for draw in draws:
                one(offs=draw.ends)

        try:
            return round(microseconds(launch, self.device) / len(draws), 2)
        except RuntimeError:
            return None

    def _quantize_us(self, rows: int, microseconds: Callable[[Callable[[], None], str], float]) -> float:
        """Microseconds of the launch that makes codes of `rows` rows."""
        import torch

        from baton.engine.kernels.gpu.gemm.quantize_rows import quantize_rows

        x = torch.randn(rows, self.k, dtype=self.dtype, device=self.device)
        codes, scales = x.to(torch.float8_e4m3fn), torch.ones(rows, device=self.device)
        return round(microseconds(lambda: quantize_rows(codes, scales, x), self.device), 2)
