"""The kernels of a mixture beside its products: the router by every tuning, and by a worker's tuning placing
entries and adding results, and all of a layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from bench.engine_driver import random_model
from bench.shapes import Precision, Shape

if TYPE_CHECKING:
    from torch import Tensor

    from baton.engine.kernels.gpu.experts.route_rows import RouterSpace, RouterTuning

# Bytes of the routers that are launched in turn, more than a second-level cache holds; routers at most.
_READ_BYTES, _MOST_ROUTERS = 128 << 20, 256
# Seconds that compiling all tunings may take.
_COMPILE_S = 60.0
# Layers whose experts are read in turn, which are more than a second-level cache holds; replays compared.
FEW = {"num_hidden_layers": 6, "vocab_size": 512}
_REPLAYS = 50


def tunings(rows: int) -> list[RouterTuning]:
    """The tunings that are tried in passes of `rows` rows, that of a worker first."""
    from baton.engine.forward.layers.experts import router_tuning, router_tuning_of_step
    from baton.engine.kernels.gpu.experts.route_rows import RouterTuning

    mine, tiles = router_tuning_of_step(rows), router_tuning(rows)
    experts = (16, 32) if tiles.rows == 16 else (16, 32, 64)
    others = [
        RouterTuning(tiles.rows, some, width, stages, warps)
        for some, width, stages, warps in product(experts, (64, 128, 256), (2, 3, 4), (4, 8))
    ]
    of_rows = [RouterTuning(rows=1, experts=some) for some in (1, 2, 4, 8)] if tiles.rows == 16 else []
    return list(dict.fromkeys([mine, *of_rows, *others]))


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


class Layers:
    """The mixtures of some layers of random numbers, as a step launches them."""

    def __init__(self, shape: Shape, precision: Precision, device: str) -> None:
        from baton.engine.model.layers.experts import ExpertsMlp

        self.model = random_model(Shape({**shape.config, **FEW}), precision, 64, 64, device)
        self._layers = [layer.mlp for layer in self.model.layers if isinstance(layer.mlp, ExpertsMlp)]
        self._device = device

    def measure(self, rows: int) -> dict[str, Any]:
        """Microseconds of a layer of `rows` random rows with launches that wait, `us`, and that begin early;
        `differing`: results of the latter, of many replays, whose bits are others."""
        import torch

        from bench.decode.timing import microseconds

        hidden = torch.randn(rows, self.model.config.hidden_size, device=self._device)
        hidden = hidden.to(self.model.precision.activations)
        found: list[Tensor] = []
        times = []
        for early in (False, True):
            launch, out = self._launches(hidden, early=early)
            launch()
            found.append(out.clone())
            times.append(round(microseconds(launch, self._device) / len(self._layers), 2))
        differing = 0
        for _ in range(_REPLAYS if self._device == "cuda" else 1):
            launch()
            differing += not torch.equal(out, found[0])
        return {
            "product": "layer", "rows": rows, "us": times[0], "early_us": times[1], "differing": differing,
        }  # fmt: skip

    def _launches(self, hidden: Tensor, *, early: bool) -> tuple[Callable[[], None], Tensor]:
        """Launches all layers over a copy of `hidden` → the call that does so, and the copy."""
        import torch

        from baton.engine.forward.layers.experts import ExpertsSpace, run_experts

        space, out = ExpertsSpace.of(self.model, len(hidden)), torch.empty_like(hidden)
        assert space is not None

        def launch() -> None:
            out.copy_(hidden)
            for layer in self._layers:
                run_experts(space, layer, out, early=early)

        return launch, out
