"""The table of product choices: by GPU, dtype and shape, made by `python -m bench.decode.tune_products`.

`gemm_tables/*.json`, one file a GPU: a list of
    {"product": "qkv", "rows": 8, "n": 6144, "k": 4096, "dtype": "bfloat16", "kind": "skinny", "tuning": {…}}
where `rows` is the bucket, n and k are the shape of W, and "dtype" is that of W and x; where these differ
there are "weight_dtype" and "act_dtype" instead. A bucket takes the entry of its own rows, else that of the
power of two above.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from baton.engine.forward.gemm import Choice, Library, ProductKey
from baton.engine.kernels.gpu.gemm.gemv import GemvTuning
from baton.engine.kernels.gpu.gemm.skinny_linear import SkinnyTuning
from baton.engine.kernels.gpu.gemm.wide_product import WideTuning, runs_here

_TABLES = Path(__file__).with_name("gemm_tables")
_KINDS: dict[str, type[Choice]] = {
    "gemv": GemvTuning,
    "skinny": SkinnyTuning,
    "wide": WideTuning,
    "library": Library,
}
# Mode `exact`: whatever the rows, so that a row's sums are made in one order.
EXACT = SkinnyTuning(rows=16, columns=64, width=64, splits=1, stages=4)
_MOST_SKINNY_ROWS = 64


def entry_of(key: ProductKey, choice: Choice, microseconds: float) -> dict[str, Any]:
    """One element of a table's file."""
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

    def __init__(self, entries: list[dict[str, Any]], *, exact: bool = False) -> None:
        self._exact = exact
        self._choices: dict[ProductKey, Choice] = {
            key_of(entry): _KINDS[entry["kind"]](**entry["tuning"]) for entry in entries
        }

    @classmethod
    def for_gpu(cls, name: str, *, exact: bool = False) -> ProductTable:
        """The table of the GPU that torch names `name`; an empty one where none was measured."""
        path = _TABLES / f"{file_stem(name)}.json"
        entries = json.loads(path.read_text()) if path.is_file() else []
        if any(entry["kind"] == "wide" for entry in entries) and not runs_here():
            entries = [entry for entry in entries if entry["kind"] != "wide"]
        return cls(entries, exact=exact)

    def choice(self, key: ProductKey) -> Choice:
        """The table's choice, or the default for a product that was not measured."""
        if self._exact:
            return EXACT
        for rows in (key.rows, _row_tile(key.rows)):
            choice = self._choices.get(replace(key, rows=rows))
            if choice is not None:
                return choice
        return _default(key.rows, key.act_dtype)


def file_stem(gpu_name: str) -> str:
    """ "NVIDIA H100 80GB HBM3" → "nvidia-h100-80gb-hbm3"."""
    return "-".join(gpu_name.lower().split())


def _default(rows: int, dtype: str) -> Choice:
    """Memory-bound products go through W once by our own kernels; wide ones are the library's."""
    if rows == 1:
        return GemvTuning()
    if dtype == "float32":  # the matrix units have no IEEE float32, and the library's code for it is good
        return Library()
    if rows <= _MOST_SKINNY_ROWS:
        return SkinnyTuning(rows=_row_tile(rows), columns=64, width=128, splits=2, stages=4)
    return Library()


def _row_tile(rows: int) -> int:
    """The power of two that holds the rows, 16 at least."""
    return max(16, 1 << (rows - 1).bit_length())
