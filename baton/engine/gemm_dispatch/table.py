"""The table of product choices: by GPU, dtype and shape.

    exact    one choice for all, so that a row's sums are made in one order
    fast     measured on this machine (`baton.engine.tuning`) > the table of this GPU in the repository >
             the most similar shape in it > the table of another GPU of its generation, likewise > a rule

`tables/*.json`, one file a GPU: a list of
    {"product": "qkv", "rows": 8, "n": 6144, "k": 4096, "dtype": "bfloat16", "kind": "skinny", "tuning": {…}}
where `rows` is the bucket, n and k are the shape of W, and "dtype" is that of W and x; where W is quantised
there are "weight_dtype", its format's name, and "act_dtype" instead. A bucket takes the entry of its own
rows, else that of the power of two above; 17 to 24 rows, 33 to 48 and so on take that of 24, 48, 96 or 192
before it. `python -m bench.decode products` makes the repository's tables; a worker's start keeps what
it measures in a file of the same form, beside the compiled kernels.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from baton.device.kernel_files.cache import kernel_cache
from baton.engine.gemm_dispatch.choice import (
    Choice,
    DigitsTuning,
    Library,
    ProductKey,
    RowCodesTuning,
    W8A8Library,
    W8A8Tuning,
)
from baton.engine.kernels.gpu.gemm.gemv import GemvTuning
from baton.engine.kernels.gpu.gemm.skinny_linear import SkinnyTuning
from baton.engine.kernels.gpu.gemm.streamed_product import StreamedTuning
from baton.engine.kernels.gpu.gemm.wide_product import WideTuning, runs_here

TABLES = Path(__file__).with_name("tables")
_KINDS: dict[str, type[Choice]] = {
    "gemv": GemvTuning,
    "skinny": SkinnyTuning,
    "wide": WideTuning,
    "streamed": StreamedTuning,
    "library": Library,
    "w8a8": W8A8Tuning,
    "w8a8-library": W8A8Library,
    "digits": DigitsTuning,
    "w8a8-rows": RowCodesTuning,
}
# Kinds of kernels in CUDA C++, for Hopper.
_IN_CUDA = ("wide", "streamed")
# Tiles of mode `exact` for every number of rows, so that the order of a row's sums is fixed.
EXACT = SkinnyTuning(rows=16, columns=64, width=64, splits=1, stages=4)
EXACT_QUANTIZED = SkinnyTuning(rows=16, columns=64, width=128, splits=1, stages=4)
_MOST_SKINNY_ROWS = 64
# Above, dequantising takes less than what two digits cost.
_MOST_DIGIT_ROWS = 256
# The GPU whose table stands in for one of its generation that has none, by compute capability.
_STAND_INS = {(9, 0): "NVIDIA H100 80GB HBM3"}
# Shapes count as similar where W's rows, and its columns, differ by less than this factor.
_SIMILAR = 2.5
_KERNELS = Path(__file__).parents[1] / "kernels" / "gpu" / "gemm"


def entry_of(key: ProductKey, choice: Choice, microseconds: float) -> dict[str, Any]:
    """Returns the element of a table's file for one choice."""
    kind = next(name for name, cls in _KINDS.items() if type(choice) is cls)
    named = asdict(key)
    if key.weight_dtype == key.act_dtype:
        del named["weight_dtype"], named["act_dtype"]
        named["dtype"] = key.act_dtype
    return {**named, "kind": kind, "tuning": asdict(choice), "us": round(microseconds, 2)}


def key_of(entry: dict[str, Any]) -> ProductKey:
    """The key of an element of a table's file."""
    weight, act = (entry.get(name, entry.get("dtype")) for name in ("weight_dtype", "act_dtype"))
    return ProductKey(entry["product"], entry["rows"], entry["n"], entry["k"], str(weight), str(act))


class ProductTable:
    """Measured choices by product key; in mode `exact` one choice for all."""

    def __init__(
        self,
        entries: Sequence[dict[str, Any]],
        *,
        exact: bool = False,
        similar: Sequence[dict[str, Any]] = (),
    ) -> None:
        """`similar`: entries that stand in for shapes like theirs alone, such as those of another GPU."""
        self._exact = exact
        self._choices = _choices(entries)
        self._similar = (self._choices, _choices(similar))
        # What stands in for products that were not measured: every launch asks, and searching takes time.
        self._found: dict[ProductKey, Choice] = {}

    @classmethod
    def for_gpu(
        cls, name: str, *, exact: bool = False, tuned: bool = True, capability: tuple[int, int] | None = None
    ) -> ProductTable:
        """The table of the GPU that torch names `name`. `tuned`: with what this machine has measured, which
        goes first. `capability`: the GPU's, for the table of another one of its generation."""
        stand_in = _STAND_INS.get(capability) if capability is not None else None
        other = shipped_entries(stand_in) if stand_in not in (None, name) else []
        measured = read_entries(tuned_file(name)) if tuned and not exact else []
        return cls([*shipped_entries(name), *measured], exact=exact, similar=other)

    def knows(self, key: ProductKey) -> bool:
        """True if there is a measured choice for this very shape, or none is needed."""
        return self._exact or self._measured(key) is not None

    def choice(self, key: ProductKey) -> Choice:
        """The table's choice, or what stands in for a product that was not measured."""
        if self._exact:
            return EXACT if key.weight_dtype == key.act_dtype else EXACT_QUANTIZED
        measured = self._measured(key)
        if measured is not None:
            return measured
        if key not in self._found:
            self._found[key] = self._of_similar(key) or _default(key)
        return self._found[key]

    def _measured(self, key: ProductKey) -> Choice | None:
        for rows in _entries_for(key.rows):
            choice = self._choices.get(replace(key, rows=rows))
            if choice is not None:
                return choice
        return None

    def _of_similar(self, key: ProductKey) -> Choice | None:
        """The choice for the most similar shape of the same product, rows and dtypes."""
        for choices in self._similar:
            for rows in _entries_for(key.rows):
                near = [(_distance(key, other), other) for other in choices if _alike(key, other, rows)]
                distance, other = min(near, key=lambda pair: pair[0], default=(math.inf, key))
                if distance < math.log(_SIMILAR):
                    return choices[other]
        return None


def read_entries(path: Path) -> list[dict[str, Any]]:
    """A table's file; empty where there is none, without kernels that cannot run here."""
    try:
        entries: list[dict[str, Any]] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):  # a damaged file is measured again
        return []
    return entries if runs_here() else [entry for entry in entries if entry["kind"] not in _IN_CUDA]


def shipped_entries(gpu_name: str) -> list[dict[str, Any]]:
    """The repository's table of a GPU; empty where there is none."""
    return read_entries(TABLES / f"{file_stem(gpu_name)}.json")


def tuned_file(gpu_name: str) -> Path:
    """Returns the file in which this machine keeps what it measured with these kernels on that GPU.

    Raises OSError if the folder of compiled kernels cannot be written.
    """
    return kernel_cache() / "baton-products" / f"{file_stem(gpu_name)}-{_kernels_digest()}.json"


@cache
def _kernels_digest() -> str:
    """Digest of all that a measurement depends on but the GPU."""
    digest = hashlib.sha256(f"{torch.__version__} {triton.__version__}".encode())
    for path in sorted(_KERNELS.iterdir()):
        if path.suffix in (".py", ".cu"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _choices(entries: Sequence[dict[str, Any]]) -> dict[ProductKey, Choice]:
    return {key_of(entry): _KINDS[entry["kind"]](**entry["tuning"]) for entry in entries}


def _alike(key: ProductKey, other: ProductKey, rows: int) -> bool:
    """True if both are of one product and of the same dtypes, and `other` of `rows` rows."""
    return (
        other.rows == rows
        and other.product == key.product
        and other.weight_dtype == key.weight_dtype
        and other.act_dtype == key.act_dtype
    )


def _distance(key: ProductKey, other: ProductKey) -> float:
    """Distance of two shapes: the larger of the logarithms of their sides' ratios."""
    return max(abs(math.log(key.n / other.n)), abs(math.log(key.k / other.k)))


def file_stem(gpu_name: str) -> str:
    """Returns the name of a GPU's file: "NVIDIA H100 80GB HBM3" → "nvidia-h100-80gb-hbm3"."""
    return "-".join(gpu_name.lower().split())


def _default(key: ProductKey) -> Choice:
    """Memory-bound products go through W once by our own kernels; wide ones are the library's."""
    rows, dtype = key.rows, key.act_dtype
    if key.weight_dtype != dtype:
        return _default_of_quantized(key)
    if rows == 1:
        return GemvTuning()
    if dtype == "float32":  # the matrix units have no IEEE float32, and the library's code for it is good
        return Library()
    if rows <= _MOST_SKINNY_ROWS:
        return SkinnyTuning(rows=_row_tile(rows), columns=64, width=128, splits=2, stages=4)
    return Library()


def _default_of_quantized(key: ProductKey) -> Choice:
    """Codes are multiplied as codes where their format allows it, else they are dequantised in registers."""
    rows, by_rows, by_int4 = (
        key.rows,
        key.weight_dtype in ("fp8", "int8"),
        key.weight_dtype.startswith("int4"),
    )
    if rows == 1 and (by_rows or by_int4):
        return GemvTuning() if by_rows else GemvTuning(width=2048)
    if by_rows and rows > _MOST_SKINNY_ROWS:
        return W8A8Library() if key.weight_dtype == "fp8" else W8A8Tuning()
    if by_rows and key.act_dtype != "float32":
        return W8A8Tuning(rows=_row_tile(rows), columns=64, stages=5, warps=4)
    if key.act_dtype != "float32" and by_int4 and rows <= _MOST_DIGIT_ROWS:
        return DigitsTuning(rows=min(128, _row_tile(rows)), splits=2)
    if rows <= _MOST_SKINNY_ROWS:
        return SkinnyTuning(rows=_row_tile(rows), columns=64, width=128, splits=2, stages=4)
    return Library()


def _entries_for(rows: int) -> tuple[int, ...]:
    """The rows of the entries that serve a product of `rows` rows, the best first."""
    power = _row_tile(rows)
    between = power * 3 // 4
    return (rows, between, power) if power // 2 < rows < between else (rows, power)


def _row_tile(rows: int) -> int:
    """The power of two that holds the rows, 16 at least."""
    return max(16, 1 << (rows - 1).bit_length())
