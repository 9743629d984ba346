"""Measures the kernels that may compute each product of a decode step, and writes the table of the fastest.

    python -m bench.decode products --shape NAME,...|all [--dtype bf16]
        [--quantization fp8|int8|int4 [--quantize-head]] [--rows 256] [--only down,...] [--buckets 256,...]
        [--tensor-parallel 1] [--again] [--write | --each | --algorithms]

Shapes that the repository's table of this GPU has already are measured only with --again. --only and
--buckets restrict all to products of those names and to those numbers of rows. With --write that
table, in baton/engine/gemm_dispatch/tables, is completed. One JSON object for each product and number of rows
goes to stdout, progress to stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.device.kernel_files.cache import keep_kernels_in
from baton.model_spec.split import WHOLE, Split, splits
from bench.case import DecodeCase
from bench.options import add_precision_options, precision_of, program_parser
from bench.shapes import SHAPES, Precision

if TYPE_CHECKING:
    import torch

    from baton.engine.model.layers.linear import Product


def main() -> None:
    parser = program_parser("decode", __doc__, "products")
    parser.add_argument("--shape", default="llama-3.1-8b", metavar="NAME,NAME", help="or all")
    add_precision_options(parser, kv=False)
    parser.add_argument("--rows", type=int, default=256, help="most rows")
    parser.add_argument("--only", type=_names, default=(), help="names of products")
    parser.add_argument("--buckets", type=_names, default=(), help="numbers of rows")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="those of one of N GPUs")
    parser.add_argument("--again", action="store_true", help="also what the table has")
    then = parser.add_mutually_exclusive_group()
    then.add_argument("--write", action="store_true", help="complete this GPU's table in the repository")
    then.add_argument("--each", action="store_true", help="print each kernel, not the fastest alone")
    then.add_argument("--algorithms", action="store_true", help="print each algorithm of the library instead")
    arguments = parser.parse_args()
    precision = precision_of(arguments)
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
    if arguments.each or arguments.algorithms:
        for pair in (pair for pairs in wanted.values() for pair in pairs):
            for line in algorithms(*pair) if arguments.algorithms else each_kernel(*pair, kind, device):
                print(json.dumps(line), flush=True)
        return
    began = time.monotonic()
    compile_kernels([pair for pairs in wanted.values() for pair in pairs], kind, device, lambda *_: None)
    _say(f"compiled in {time.monotonic() - began:.1f} s")
    for name, pairs in wanted.items():
        began = time.monotonic()
        entries = list(measured(pairs, kind, device, lambda *_: None))
        torch.cuda.empty_cache()
        _say(f"{name}: {len(entries)} in {time.monotonic() - began:.1f} s")
        for entry in entries:
            print(json.dumps(entry), flush=True)
        if arguments.write:
            save(TABLES / f"{file_stem(gpu)}.json", entries)


def each_kernel(
    product: Product, rows: int, dtype: torch.dtype, device: torch.device
) -> Iterator[dict[str, Any]]:
    """A line for each kernel that may compute the product."""
    from baton.engine.gemm_dispatch.choice import ProductKey
    from baton.engine.gemm_dispatch.table import entry_of
    from baton.engine.tuning.measurement import measure

    for us, choice in measure(product, rows, dtype, device, math.inf):
        yield entry_of(ProductKey.of(product, rows, dtype), choice, us)


def algorithms(product: Product, rows: int) -> Iterator[dict[str, Any]]:
    """A line for each algorithm of the library, among as many weights as do not fit the GPU's cache."""
    from bench.library_algorithms import library_algorithms

    n, k = product.linear.weight.shape
    copies = max(1, int(4e8) // (2 * n * k))
    for line in library_algorithms(rows, n, k, copies):
        yield {"product": product.name, **line}


def wanted_of(
    names: list[str], precision: Precision, arguments: argparse.Namespace, known: list[dict[str, Any]]
) -> dict[str, list[tuple[Product, int]]]:
    """Products to be measured for each shape: those that neither the entries `known` nor a shape before it
    has."""
    import torch

    from baton.engine.gemm_dispatch.choice import Library, ProductKey
    from baton.engine.gemm_dispatch.table import ProductTable, entry_of
    from baton.engine.tuning.tuner import missing

    kind, entries = getattr(torch, precision.torch_dtype), list(known)
    part = splits(arguments.tensor_parallel)[0]
    wanted = {}
    for name in names:
        pairs = missing(products_of(name, precision, part), arguments.rows, kind, ProductTable(entries))
        wanted[name] = [
            (product, rows)
            for product, rows in pairs
            if product.name in (arguments.only or (product.name,))
            and str(rows) in (arguments.buckets or (str(rows),))
        ]
        entries += [entry_of(ProductKey.of(product, rows, kind), Library(), 0.0) for product, rows in pairs]
    return wanted


def products_of(name: str, precision: Precision, split: Split = WHOLE) -> list[Product]:
    """The distinct products of a model of that shape, or of a device's part of it; their tensors have shapes
    and no memory."""
    from bench.engine_driver import random_model

    model = random_model(SHAPES[name], precision, 1, 16, "meta", split=split)
    found: list[Product] = model.product_kinds()
    return found


@contextmanager
def no_tables() -> Iterator[Path]:
    """A start on a GPU that nothing has been measured on: no table from the repository, of this GPU or of
    another one, none of this machine's, and an empty folder for compiled kernels."""
    from baton.engine.gemm_dispatch import table as gemm_table

    shipped = gemm_table.TABLES
    with tempfile.TemporaryDirectory() as folder:
        keep_kernels_in(folder)
        gemm_table.TABLES = Path(folder)
        try:
            yield Path(folder)
        finally:
            gemm_table.TABLES = shipped


def tune_missing(case: DecodeCase, rows: int, limit_s: float | None = None) -> None:
    """Measures what no table has, as a worker's start does; without a limit of time unless it is given."""
    import torch

    from baton.engine.gemm_dispatch.table import ProductTable, tuned_file
    from baton.engine.tuning.tuner import missing, save, tune

    gpu, kind = torch.cuda.get_device_name(), getattr(torch, case.precision.torch_dtype)
    products = products_of(case.shape, case.precision, splits(case.tensor_parallel)[0])
    wanted = missing(products, rows, kind, ProductTable.for_gpu(gpu))
    began = time.monotonic()
    entries = tune(wanted, kind, torch.device("cuda", 0), lambda *_: None, limit_s)
    for entry in entries:
        _say(json.dumps(entry))
    _say(f"{len(entries)} of {len(wanted)} products tuned in {time.monotonic() - began:.1f} s")
    save(tuned_file(gpu), entries)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
