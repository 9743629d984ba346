"""Measures every way to compute each product of a decode step, and writes the table of the fastest.

    python -m bench.decode.tune_products --shape llama-3.1-8b --dtype bf16 [--rows 1,8,64] [--write]

Weights rotate among copies larger than the GPU's L2 cache. With --write the table of this GPU in
baton/engine/forward/gemm_tables is updated; one JSON object per product and bucket goes to stdout.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.device.nvidia_libraries import ENVIRONMENT
from bench.shapes import SHAPES, Shape, torch_dtype

if TYPE_CHECKING:
    from baton.engine.model.modules import Product

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_TABLES = Path(__file__).parents[2] / "baton" / "engine" / "forward" / "gemm_tables"
_ROTATED_BYTES = 400e6
_COMPILERS = 14


def candidates(product: str, rows: int) -> list[Any]:
    """The candidates for a product and bucket."""
    from baton.engine.forward.gemm import Library
    from baton.engine.kernels.gpu.gemm.gemv import GemvTuning
    from baton.engine.kernels.gpu.gemm.skinny_linear import SkinnyTuning
    from baton.engine.kernels.gpu.gemm.wide_product import runs_here

    found: list[Any] = [Library()]
    if rows > 128 and runs_here():
        found += _wide(product)
    if rows == 1:
        shapes = (
            (2, 1024),
            (4, 512),
            (4, 1024),
            (8, 512),
            (16, 256),
            (2, 2048),
            (1, 4096),
            (2, 4096),
            (4, 2048),
        )
        found += [GemvTuning(n, k, warps) for n, k in shapes for warps in (4, 8)]
        ahead = (
            (8, 512, 3),
            (8, 512, 4),
            (16, 256, 4),
            (16, 512, 3),
            (32, 256, 3),
            (4, 1024, 3),
            (4, 512, 4),
        )
        found += [GemvTuning(n, k, 4, stages) for n, k, stages in ahead]
    tile = max(16, 1 << (rows - 1).bit_length())
    found += [SkinnyTuning(*shape) for shape in (_few(tile) if tile <= 64 else _many(tile))]
    return found


def _wide(product: str) -> list[Any]:
    """Tiles shared by two multiprocessors; those with splits use the multiprocessors (of 132) that the
    columns leave idle."""
    from baton.engine.kernels.gpu.gemm.wide_product import WideTuning

    if product == "gate_up":
        return [WideTuning(112), WideTuning(128, 3, 5), WideTuning(96, 4, 6)]
    if product == "head":
        return [WideTuning(256, 4, 5), WideTuning(224, 4, 5), WideTuning(224, 3, 6), WideTuning(192, 4, 6)]
    if product == "qkv":
        return [WideTuning(192, 4, 6, 2), WideTuning(192, 3, 7, 2), WideTuning(96, 4, 12)]
    shapes = ((256, 4, 5, 4), (256, 3, 5, 4), (192, 4, 6, 3), (192, 3, 7, 3), (128, 4, 9, 2), (128, 6, 8, 2))
    return [WideTuning(*shape) for shape in shapes]


def _few(tile: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """(rows, columns, width, splits, stages, warps) where the bytes of W limit."""
    wide = 256 if tile <= 32 else 64
    for splits in (1, 2, 4):
        yield tile, 64, 128, splits, 4, 4
        yield tile, 64, 128, splits, 5, 4
        yield tile, 64, wide, splits, 3 if wide == 256 else 6, 4
        yield tile, 128, 128, splits, 3, 4
        yield tile, 128, 64, splits, 5, 8
    yield tile, 64, 128, 8, 4, 4
    yield tile, 128, 128, 2, 3, 8


def _many(tile: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """The same where arithmetic limits as well."""
    for rows in {128, tile}:
        for splits in (1, 2, 4):
            yield rows, 64, 64, splits, 4, 4
            yield rows, 64, 64, splits, 4, 8
            yield rows, 128, 64, splits, 3, 8
            yield rows, 128, 64, splits, 4, 8
    yield 128, 64, 64, 1, 6, 4
    yield 128, 64, 64, 2, 6, 4
    yield 128, 64, 128, 1, 3, 4


def model_products(shape: Shape, dtype: str) -> list[Product]:
    """The distinct products of a model of that shape; their tensors have shapes and no memory."""
    from bench.random_model import random_model

    found: list[Product] = random_model(shape, dtype, 1, 16, "meta").product_kinds()
    return found


def warm(job: tuple[Any, int, str]) -> None:
    """Compiles one variant into the cache on disk, in a process of its own."""
    import torch

    from baton.engine.forward.gemm import Scratch, run_product
    from baton.engine.kernels.fusion import Epilogue, Norm
    from baton.engine.model.modules import Linear, Product

    choice, epilogue, dtype = job
    kind, device, k = getattr(torch, dtype), torch.device("cuda"), 4096
    rows = choice.rows if hasattr(choice, "splits") else 1
    double = 2 if Epilogue(epilogue).gated else 1
    out, x = (torch.zeros(rows, n, device=device, dtype=kind) for n in (256, k))
    weight = torch.zeros(256 * double, k, device=device, dtype=kind)
    scratch = Scratch(rows, k, 2 * 256, (1 << 22, 64), device, kind)
    norm = None if epilogue == Epilogue.RESIDUAL else Norm(x[0], 1e-5)
    try:
        run_product(out, x, Product("", Linear(weight, None), Epilogue(epilogue), norm), choice, scratch)
    except Exception as error:  # a tile that does not fit this GPU: measured as such later
        print(f"does not compile: {choice}: {str(error)[:80]}", file=sys.stderr)


def warm_all(products: list[Product], rows: tuple[int, ...], dtype: str) -> None:
    """Compiles every candidate of Triton's, many at once."""
    from baton.engine.kernels.gpu.gemm.gemv import GemvTuning
    from baton.engine.kernels.gpu.gemm.skinny_linear import SkinnyTuning

    found = {c for product in products for count in rows for c in candidates(product.name, count)}
    choices = [c for c in found if isinstance(c, GemvTuning | SkinnyTuning)]
    epilogues = sorted({int(product.epilogue) for product in products})
    jobs = [(choice, epilogue, dtype) for choice in choices for epilogue in epilogues]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_COMPILERS, mp_context=context) as pool:
        list(pool.map(warm, jobs, chunksize=2))


def measure(product: Product, rows: int, dtype: str) -> list[tuple[float, Any]]:
    """(microseconds, choice) of each candidate, fastest first."""
    import torch

    from baton.engine.forward.gemm import Scratch, run_product, space_needed
    from baton.engine.kernels.fusion import Norm
    from baton.engine.model.modules import Linear
    from bench.gpu_timing import graph_us

    kind, device = getattr(torch, dtype), torch.device("cuda")
    n, k = product.linear.weight.shape
    copies = max(1, int(_ROTATED_BYTES // (n * k * kind.itemsize)))
    x, out = (
        torch.randn(rows, k, device=device, dtype=kind),
        torch.zeros(rows, product.outputs, device=device, dtype=kind),
    )
    norm = None if product.norm is None else Norm(torch.ones(k, device=device, dtype=kind), product.norm.eps)

    def drawn() -> Product:
        weight = torch.randn(n, k, device=device, dtype=kind) * 0.02
        return replace(product, linear=Linear(weight, None), norm=norm)

    rotated = [drawn() for _ in range(copies)]
    results: list[tuple[float, Any]] = []
    for choice in candidates(product.name, rows):
        space = space_needed(rows, product, choice)
        scratch = Scratch(rows, k, 2 * product.outputs, space, device, kind)

        def launch(choice: Any = choice, scratch: Scratch = scratch) -> None:
            for one in rotated:
                run_product(out, x, one, choice, scratch)

        try:
            results.append((graph_us(launch) / copies, choice))
        except Exception as error:  # too much shared memory for this GPU, say
            print(f"{product.name} {rows}: {choice}: {str(error)[:80]}", file=sys.stderr)
    return sorted(results, key=lambda result: result[0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.1-8b", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--rows", default=",".join(map(str, BUCKETS)))
    parser.add_argument("--write", action="store_true", help="complete this GPU's table in the repository")
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    rows = tuple(int(part) for part in arguments.rows.split(","))
    dtype = torch_dtype(arguments.dtype)
    entries = tune(model_products(SHAPES[arguments.shape], dtype), rows, dtype)
    if arguments.write:
        write(entries)


def tune(products: list[Product], rows: tuple[int, ...], dtype: str) -> list[dict[str, Any]]:
    """Measures all; prints a line each; returns the table's entries."""
    import torch

    from baton.engine.forward.gemm import ProductKey
    from baton.engine.forward.gemm_table import entry_of

    warm_all(products, rows, dtype)
    entries = []
    for product in products:
        for count in rows:
            results = measure(product, count, dtype)
            best, choice = results[0]
            entries.append(entry_of(ProductKey.of(product, count, getattr(torch, dtype)), choice, best))
            library = next(us for us, c in results if type(c).__name__ == "Library")
            print(
                json.dumps({**entries[-1], "library_us": round(library, 2), "tried": len(results)}),
                flush=True,
            )
    return entries


def write(entries: list[dict[str, Any]]) -> None:
    """Replaces these entries in this GPU's file and keeps the others."""
    import torch

    from baton.engine.forward.gemm_table import file_stem, key_of

    path = _TABLES / f"{file_stem(torch.cuda.get_device_name())}.json"
    old = json.loads(path.read_text()) if path.is_file() else []
    table = {key_of(entry): entry for entry in [*old, *entries]}
    lines = ",\n".join(" " + json.dumps(entry) for entry in table.values())
    path.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
