"""Compiles the kernels that will be measured into Triton's cache, in several processes at once: a kernel
takes a second or two, and a model needs about a hundred."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as FuturesTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from baton.device.nvidia_libraries import EAGER_LOADING
from baton.engine.gemm_dispatch.choice import Choice, DigitsTuning
from baton.engine.kernels.fusion import Epilogue
from baton.engine.kernels.gpu.gemm.streamed_product import StreamedTuning
from baton.engine.kernels.weight_format import INT4_SPAN, WeightFormat

_MOST_PROCESSES = 14
# W [rows, K] of a compilation, and rows of x: any that kernels are not specialized for (K: `depth_like`).
_ROWS, _DEPTH = 256, 4096
# Triton compiles a kernel separately for integers that are multiples of this, and for those that are not.
_MULTIPLE = 16
_One = TypeVar("_One")


@dataclass(frozen=True, slots=True)
class Variant:
    """The variant of a kernel that is compiled, beside its tiles. `depth`: K of the compilation
    (`depth_like`); `dtype` as torch spells it; `weight_format`: of a quantised weight."""

    choice: Choice
    depth: int
    epilogue: Epilogue
    norm: bool
    bias: bool
    dtype: str
    weight_format: WeightFormat | None = None


def depth_like(depth: int, choice: Choice, weight_format: WeightFormat | None) -> int:
    """A K for which a choice's kernel is compiled as it is for `depth`, the same for all that are alike: code
    depends on whether K is whole tiles, and whether K and the number of its groups are multiples of 16."""
    group = weight_format.scale_columns if weight_format is not None else 0
    width = INT4_SPAN if isinstance(choice, DigitsTuning) else getattr(choice, "width", 1)

    def traits(k: int) -> tuple[bool, ...]:
        groups = -(-k // group) if group else 0
        return k % width == 0, k % _MULTIPLE == 0, group > 0 and k % group == 0, groups % _MULTIPLE == 0

    if isinstance(choice, StreamedTuning):  # CUDA C++, which is compiled for any K
        return _DEPTH
    return next((k for k in range(_DEPTH, 4 * _DEPTH, 8) if traits(k) == traits(depth)), depth)


def compile_all(
    variants: Iterable[Variant], device: int, deadline_s: float, progress: Callable[[int, int], None]
) -> None:
    """Compiles until all are done or `time.monotonic()` reaches `deadline_s`; the rest is compiled where it
    is first used. `progress` is called with variants done and in total. A variant that does not compile
    on this GPU is skipped; its first launch raises the error."""
    compile_each(partial(_compile, device=device), list(dict.fromkeys(variants)), deadline_s, progress)


def compile_each(
    compile_one: Callable[[_One], None],
    wanted: Sequence[_One],
    deadline_s: float,
    progress: Callable[[int, int], None],
) -> None:
    """Calls `compile_one` with each of `wanted` in one of several processes, into which both are sent, until
    all are done or `time.monotonic()` reaches `deadline_s`. What it raises is dropped. `progress` is called
    with those done and in total."""
    workers = min(_MOST_PROCESSES, max(1, (os.cpu_count() or 2) - 2), max(1, len(wanted)))
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=load_lazily)
    try:
        jobs = [pool.submit(compile_one, one) for one in wanted]
        with suppress(FuturesTimeoutError):
            left = max(0.0, deadline_s - time.monotonic())
            for done, job in enumerate(as_completed(jobs, timeout=left), 1):
                job.exception()
                progress(done, len(jobs))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def load_lazily() -> None:
    """Makes CUDA, which this process has not called yet, load a kernel when it is first launched. An engine
    of several devices loads all of them at once; each of its processes would do so again."""
    os.environ[EAGER_LOADING[0]] = "LAZY"


def _compile(variant: Variant, device: int) -> None:
    """Runs the kernel once on small operands."""
    import torch

    from baton.engine.forward.layers.linear import run_product, space_needed
    from baton.engine.forward.products.code_products import library_sums
    from baton.engine.forward.products.scratch import Scratch
    from baton.engine.kernels.fusion import Norm
    from baton.engine.kernels.gpu.gemm.gemv import GemvTuning
    from baton.engine.kernels.quantized_weight import QuantizedWeight, Weight
    from baton.engine.model.layers.linear import Linear, Product

    torch.cuda.set_device(device)
    dtype, place = getattr(torch, variant.dtype), torch.device("cuda", device)
    rows = 1
    if not isinstance(variant.choice, GemvTuning):
        rows = getattr(variant.choice, "rows", _ROWS)
    gated = 2 if variant.epilogue.gated else 1
    x, out = (torch.zeros(rows, width, device=place, dtype=dtype) for width in (variant.depth, _ROWS))
    bias = torch.zeros(gated * _ROWS, device=place, dtype=dtype) if variant.bias else None
    weight: Weight = torch.zeros(gated * _ROWS, variant.depth, device=place, dtype=dtype)
    if variant.weight_format is not None:
        weight = QuantizedWeight.empty(variant.weight_format, gated * _ROWS, variant.depth, place)
        weight.randomize_()
    norm = Norm(torch.ones(variant.depth, device=place, dtype=dtype), 1e-5) if variant.norm else None
    product = Product("", Linear(weight, bias), variant.epilogue, norm)
    space = space_needed(rows, product, variant.choice)
    sums = library_sums(rows, product, dtype)
    run_product(
        out,
        x,
        product,
        variant.choice,
        Scratch(rows, variant.depth, sums, space, place, dtype, codes=2 * variant.depth),
    )
    torch.cuda.synchronize()
