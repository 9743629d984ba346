"""The kernels of a mixture beside its products: the router by every tuning, and by a worker's tuning placing
entries and adding results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from bench.shapes import Precision, Shape

if TYPE_CHECKING:
    from baton.engine.kernels.gpu.experts.route_rows import RouterSpace, RouterTuning

# Bytes of the routers that are launched in turn, more than a second-level cache holds; routers at most.
_READ_BYTES, _MOST_ROUTERS = 128 << 20, 256
# Seconds that compiling all tunings may take.
_COMPILE_S = 60.0


def tunings(rows: int) -> list[RouterTuning]:
    """The tunings that are tried in passes of `rows` rows, that of a worker first."""
    from baton.engine.forward.layers.experts import router_tuning
    from baton.engine.kernels.gpu.experts.route_rows import RouterTuning

    mine = router_tuning(rows)
    experts = (16, 32) if mine.rows == 16 else (16, 32, 64)
    others = [
        RouterTuning(mine.rows, some, width, stages, warps)
        for some, width, stages, warps in product(experts, (64, 128, 256), (2, 3, 4), (4, 8))
    ]
    return list(dict.fromkeys([mine, *others]))


def compile_all(shape: Shape, precision: Precision, rows: Sequence[int]) -> None:
    """Compiles the router by all tunings in several processes at once."""
    from baton.engine.tuning.compilation import compile_each

    wanted = {tuning: each for each in rows for tuning in tunings(each)}
    one = partial(compile_one, shape, precision)
    compile_each(one, list(wanted.items()), time.monotonic() + _COMPILE_S, lambda done, total: None)


def compile_one(
    shape: Shape, precision: Precision, wanted: tuple[RouterTuning, int], device: str = "cuda"
) -> None:
    """Launches the router once, by the tuning and of as many rows as are `wanted`."""
    tuning, rows = wanted
    layer = Router(shape, precision, rows, device, most_routers=1)
    layer.route(layer.space(tuning))


class Router:
    """Routers of random numbers, and a step's rows."""

    def __init__(
        self, shape: Shape, precision: Precision, rows: int, device: str, most_routers: int = _MOST_ROUTERS
    ) -> None:
        import torch

        from baton.engine.kernels.fusion import Norm

        width, experts = int(shape.config["hidden_size"]), shape.experts
        self.rows, self.experts, self.device = rows, experts, device
        self.top_k = int(shape.config["num_experts_per_tok"])
        dtype = getattr(torch, precision.torch_dtype)
        count = min(most_routers, _READ_BYTES // (experts * width * dtype.itemsize))
        self.routers = torch.randn(count, experts, width, dtype=dtype, device=device).mul_(width**-0.5)
        self.hidden = torch.randn(rows, width, dtype=dtype, device=device)
        self.norm = Norm(torch.ones(width, dtype=dtype, device=device), 1e-6)
        self.normed = torch.zeros_like(self.hidden)
        self.ids = torch.zeros(rows, self.top_k, dtype=torch.int32, device=device)
        self.weights = torch.zeros(rows, self.top_k, device=device)
        self.present = torch.zeros(rows, dtype=torch.int32, device=device)
        self.taken = torch.zeros(experts, dtype=torch.int64, device=device)
        self.results = torch.zeros(rows * self.top_k, width, dtype=dtype, device=device)

    def space(self, tuning: RouterTuning) -> RouterSpace:
        """The router's memory by a tuning."""
        from baton.engine.kernels.gpu.experts.route_rows import RouterSpace

        return RouterSpace.empty(self.rows, self.experts, self.device, tuning)

    def route(self, space: RouterSpace) -> None:
        """Launches every router by the tuning of `space`, one behind the other."""
        from baton.engine.kernels.gpu.experts.route_rows import route_rows

        for router in self.routers:
            route_rows(
                self.normed, self.ids, self.weights, self.hidden, self.norm, router, self.present, self.taken,
                space, normalise=True,
            )  # fmt: skip

    def measure(self) -> dict[str, Any]:
        """Microseconds of the router by a worker's tuning and by the best one, and of what follows it."""
        from baton.engine.kernels.expert_tiles import rows_of_tile
        from baton.engine.kernels.gpu.experts.align_rows import Tiles, align_rows
        from baton.engine.kernels.gpu.experts.combine_rows import combine_rows
        from bench.decode.timing import microseconds

        chosen, *others = tunings(self.rows)
        times = {}
        for tuning in (*others, chosen):  # the last one's counts are those that are aligned
            space = self.space(tuning)
            try:
                times[tuning] = microseconds(partial(self.route, space), self.device) / len(self.routers)
            except Exception:  # more shared memory than this GPU has, say
                continue
        best = min(times, key=lambda tuning: times[tuning])
        tiles = Tiles.empty(self.rows, self.top_k, self.experts, self.device, rows_of_tile(self.rows))
        align = partial(align_rows, tiles, self.ids, space.counts, chosen.rows)
        combine = partial(combine_rows, self.hidden, self.results, self.ids, self.weights)
        return {
            "product": "router", "rows": self.rows, "us": round(times[chosen], 2),
            "chosen": asdict(chosen), "best_us": round(times[best], 2), "best": asdict(best),
            "align_us": round(microseconds(align, self.device), 2),
            "combine_us": round(microseconds(combine, self.device), 2),
        }  # fmt: skip
