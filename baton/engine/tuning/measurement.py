"""Times the kernels that may compute a product, over weights that are not in the GPU's cache."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from baton.engine.forward.layers.linear import run_product, space_needed
from baton.engine.forward.products.code_products import library_sums
from baton.engine.forward.products.scratch import Scratch
from baton.engine.gemm_dispatch.choice import Choice
from baton.engine.kernels.fusion import Norm
from baton.engine.kernels.quantized_weight import QuantizedWeight, Weight
from baton.engine.model.layers.linear import Linear, Product
from baton.engine.tuning.candidates import candidates

# Bytes of weights that a measurement goes through: several times the second-level cache of an H200.
_ROTATED_BYTES = 400e6
# Most copies of weights that it goes through: where the GPU's cache holds them all, more would take minutes.
_MOST_COPIES = 256
_REPLAYS = 8


def measure(
    product: Product,
    rows: int,
    dtype: torch.dtype,
    device: torch.device,
    deadline_s: float,
    rotated_bytes: float = _ROTATED_BYTES,
) -> list[tuple[float, Choice]]:
    """Times a product's kernels: (microseconds, choice) of each candidate that this GPU can run, fastest
    first; empty where `time.monotonic()` reaches `deadline_s` before all were tried.

    `product` has shapes, epilogue and norms; its weights are not read and may be on the meta device. The norm
    of a product's result is the same whatever computes the product, and is left out.
    """
    n, k = product.linear.weight.shape
    weight_format = (
        product.linear.weight.format if isinstance(product.linear.weight, QuantizedWeight) else None
    )
    nbytes = n * k * dtype.itemsize if weight_format is None else weight_format.nbytes(n, k)
    copies = min(max(1, int(rotated_bytes // nbytes)), _MOST_COPIES)
    x = torch.randn(rows, k, device=device, dtype=dtype)
    out = torch.zeros(rows, product.outputs, device=device, dtype=dtype)
    norm = None if product.norm is None else Norm(torch.ones(k, device=device, dtype=dtype), product.norm.eps)
    bias = None if product.linear.bias is None else torch.zeros(n, device=device, dtype=dtype)

    def drawn() -> Product:
        weight: Weight
        if weight_format is None:
            weight = torch.randn(n, k, device=device, dtype=dtype).mul_(0.02)
        else:
            weight = QuantizedWeight.empty(weight_format, n, k, device)
            weight.randomize_()
        return replace(product, linear=Linear(weight, bias), norm=norm)

    rotated = [drawn() for _ in range(copies)]
    results: list[tuple[float, Choice]] = []
    for choice in candidates(product, rows):
        if time.monotonic() > deadline_s:
            return []
        space = space_needed(rows, product, choice)
        sums = library_sums(rows, product, dtype)
        scratch = Scratch(rows, k, sums, space, device, dtype, codes=2 * k)

        def launch(choice: Choice = choice, scratch: Scratch = scratch) -> None:
            for one in rotated:
                run_product(out, x, one, choice, scratch)

        try:
            results.append((graph_us(launch, _REPLAYS) / copies, choice))
        except Exception:  # more shared memory than this GPU has, say: not a candidate here
            continue
    return sorted(results, key=lambda result: result[0])


def graph_us(launch: Callable[[], None], replays: int = 12) -> float:
    """Microseconds that the launches of `launch` take as a CUDA graph, the median of `replays`."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    events = [
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(replays + 1)
    ]
    for _ in range(3):
        graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(events))
    return float(times[len(times) // 2]) * 1e3
