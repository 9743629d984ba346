"""Measures the products that no table has, within a time limit, and keeps the results on disk.

    products × rows ─▶ those not in the table ─▶ compile, in parallel ─▶ measure, one after the other ─▶ file

Workers of one machine measure one after another, under a lock: of several that start at the same time the
first measures, and the others find its results.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from baton.device.streams.cuda_stream import on_device
from baton.engine.gemm_dispatch.choice import Choice, Library, ProductKey, W8A8Library, dtype_name
from baton.engine.gemm_dispatch.table import ProductTable, entry_of, key_of, read_entries, tuned_file
from baton.engine.kernels.gpu.gemm.wide_product import WideTuning
from baton.engine.kernels.quantized_weight import QuantizedWeight
from baton.engine.model.layers.linear import Product
from baton.engine.tuning.candidates import BUCKETS, candidates
from baton.engine.tuning.compilation import Variant, compile_all, depth_like
from baton.engine.tuning.measurement import measure

# Seconds that a start may spend on it, two thirds of them on compilation.
LIMIT_S = 60.0
_COMPILE_SHARE = 2 / 3
# A time of `time.monotonic()` decades away; not infinity, which a wait does not take.
_NEVER_S = 1e9
# The order in which rows are measured, where time may not suffice for all.
_IMPORTANCE = (1, 32, 64, 16, 128, 48, 24, 96, 192, 256)
assert sorted(_IMPORTANCE) == sorted(BUCKETS)

Progress = Callable[[str, int, int], None]
"""Called with a phase (`compiling`, `measuring`), what is done, and what there is to do."""


def missing(
    products: Sequence[Product], rows: int, dtype: torch.dtype, table: ProductTable
) -> list[tuple[Product, int]]:
    """Products and numbers of rows, up to `rows`, that the table has no measured choice for."""
    most = next((bucket for bucket in BUCKETS if bucket >= max(16, rows)), BUCKETS[-1])
    buckets = [bucket for bucket in _IMPORTANCE if bucket <= most]
    return [
        (product, bucket)
        for bucket in buckets
        for product in products
        if not table.knows(ProductKey.of(product, bucket, dtype))
    ]


def tune(
    wanted: Sequence[tuple[Product, int]],
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    limit_s: float | None = LIMIT_S,
) -> list[dict[str, Any]]:
    """The table's entries of `wanted`, in that order as far as `limit_s` seconds suffice; None: of all."""
    began = time.monotonic()
    limit_s = _NEVER_S if limit_s is None else limit_s
    compile_kernels(wanted, dtype, device, progress, began + limit_s * _COMPILE_SHARE)
    entries = list(measured(wanted, dtype, device, progress, began + limit_s))
    torch.cuda.empty_cache()
    return entries


def compile_kernels(
    wanted: Sequence[tuple[Product, int]],
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    deadline_s: float = _NEVER_S,
) -> None:
    """Compiles what `measured` will launch, until `time.monotonic()` reaches `deadline_s`."""
    compile_all(
        launched_variants(wanted, dtype), device.index or 0, deadline_s, partial(progress, "compiling")
    )


def measured(
    wanted: Sequence[tuple[Product, int]],
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    deadline_s: float = _NEVER_S,
) -> Iterator[dict[str, Any]]:
    """The table's entries of `wanted`, in that order, until `time.monotonic()` reaches `deadline_s`."""
    for number, (product, rows) in enumerate(wanted):
        if time.monotonic() > deadline_s:
            return
        progress("measuring", number, len(wanted))
        with on_device(device):  # on which Triton launches, wherever the tensors are
            results = measure(product, rows, dtype, device, deadline_s)
        if results:
            microseconds, choice = results[0]
            yield entry_of(ProductKey.of(product, rows, dtype), choice, microseconds)


def launched_variants(wanted: Sequence[tuple[Product, int]], dtype: torch.dtype) -> Iterator[Variant]:
    """Kernels to compile before `wanted` is measured, those that compile as they are measured left out."""
    for product, rows in wanted:
        for choice in candidates(product, rows):
            if not isinstance(choice, Library | WideTuning | W8A8Library):
                yield _variant(product, choice, dtype)


def _variant(product: Product, choice: Choice, dtype: torch.dtype) -> Variant:
    weight, bias = product.linear.weight, product.linear.bias is not None
    weight_format = weight.format if isinstance(weight, QuantizedWeight) else None
    depth = depth_like(product.inputs, choice, weight_format)
    norm = product.norm is not None
    return Variant(choice, depth, product.epilogue, norm, bias, dtype_name(dtype), weight_format)


def save(path: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Adds entries to a table's file, in place of those of the same keys; atomically."""
    table = {key_of(entry): entry for entry in [*read_entries(path), *entries]}
    lines = ",\n".join(" " + json.dumps(entry) for entry in table.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}.tmp")
    new.write_text(f"[\n{lines}\n]\n")
    new.replace(path)


@contextmanager
def tuning_lock(gpu_name: str, timeout_s: float) -> Iterator[bool]:
    """Holds the lock of this machine's tuning; False where another process kept it for `timeout_s`."""
    path = tuned_file(gpu_name).with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    yield False
                    return
                time.sleep(0.2)
            else:
                yield True
                return
