"""Measures the kernels that may compute each product of a decode step, and writes the table of the fastest.

    python -m bench.decode.tune_products --shape NAME,...|all [--dtype bf16]
        [--quantization fp8|int8|int4 [--quantize-head]] [--rows 256] [--only down,...] [--buckets 256,...]
        [--again] [--write]

Shapes that the repository's table of this GPU has already are measured only with --again. --only and
--buckets restrict all to products of those names and to those numbers of rows. With --write that
table, in baton/engine/gemm_dispatch/tables, is completed. One JSON object for each product and number of rows
goes to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from baton.device.nvidia_libraries import ENVIRONMENT
from bench.precision import Precision
from bench.shapes import SHAPES

if TYPE_CHECKING:
    from baton.engine.model.layers.linear import Product


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.1-8b", help="names, or all")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--quantization", choices=("fp8", "int8", "int4"), help="of the weights")
    parser.add_argument("--quantize-head", action="store_true", help="with --quantization: lm_head too")
    parser.add_argument("--rows", type=int, default=256, help="most rows")
    parser.add_argument("--only", type=_names, default=(), help="names of products")
    parser.add_argument("--buckets", type=_names, default=(), help="numbers of rows")
    parser.add_argument("--again", action="store_true", help="also what the table has")
    parser.add_argument("--write", action="store_true", help="complete this GPU's table in the repository")
    arguments = parser.parse_args()
    try:
        precision = Precision(arguments.dtype, arguments.quantization, arguments.quantize_head)
    except ValueError as error:
        sys.exit(f"bench.decode.tune_products: {error}")
    os.environ.update(ENVIRONMENT)
    names = sorted(set(SHAPES) - {"tiny"}) if arguments.shape == "all" else arguments.shape.split(",")
    run(names, precision, arguments)


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def run(names: list[str], precision: Precision, arguments: argparse.Namespace) -> None:
    """Measures shape after shape, and writes after each."""
    import torch

    from baton.engine.gemm_dispatch.table import TABLES, file_stem, shipped_entries
    from baton.engine.tuning.tuner import compile_kernels, measured, save

    gpu, kind = torch.cuda.get_device_name(), getattr(torch, precision.torch_dtype)
    device = torch.device("cuda", 0)
    known = [] if arguments.again else shipped_entries(gpu)
    wanted = wanted_of(names, precision, arguments, known)
    began = time.monotonic()
    compile_kernels([pair for pairs in wanted.values() for pair in pairs], kind, device, lambda *_: None)
    print(f"compiled in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    for name, pairs in wanted.items():
        began = time.monotonic()
        entries = list(measured(pairs, kind, device, lambda *_: None))
        torch.cuda.empty_cache()
        print(f"{name}: {len(entries)} in {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        for entry in entries:
            print(json.dumps(entry), flush=True)
        if arguments.write:
            save(TABLES / f"{file_stem(gpu)}.json", entries)


def wanted_of(
    names: list[str], precision: Precision, arguments: argparse.Namespace, known: list[dict[str, Any]]
) -> dict[str, list[tuple[Product, int]]]:
    """What is to be measured for each shape: what neither the entries `known` nor a shape before it has."""
    import torch

    from baton.engine.gemm_dispatch.choice import Library, ProductKey
    from baton.engine.gemm_dispatch.table import ProductTable, entry_of
    from baton.engine.tuning.tuner import missing

    kind, entries = getattr(torch, precision.torch_dtype), list(known)
    wanted = {}
    for name in names:
        pairs = missing(products_of(name, precision), arguments.rows, kind, ProductTable(entries))
        wanted[name] = [
            (product, rows)
            for product, rows in pairs
            if product.name in (arguments.only or (product.name,))
            and str(rows) in (arguments.buckets or (str(rows),))
        ]
        entries += [entry_of(ProductKey.of(product, rows, kind), Library(), 0.0) for product, rows in pairs]
    return wanted


def products_of(name: str, precision: Precision) -> list[Product]:
    """The distinct products of a model of that shape; their tensors have shapes and no memory."""
    from bench.random_model import random_model

    model = random_model(SHAPES[name], precision, 1, 16, "meta")
    found: list[Product] = model.product_kinds()
    return found


if __name__ == "__main__":
    main()
