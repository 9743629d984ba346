"""The table of product choices: by GPU, dtype and shape, made by `python -m bench.decode.tune_products`.

`gemm_tables/*.json`, one file a GPU: a list of
    {"product": "qkv", "rows": 8, "n": 6144, "k": 4096, "dtype": "bfloat16", "kind": "skinny", "tuning": {…}}
where `rows` is the bucket and n, k are the shape of W. A bucket takes the entry of its own rows, else
that of the power of two above.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from baton.engine.forward.gemm import Choice, Library
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

Key = tuple[str, int, int, int, str]
"""product, rows, n, k, dtype."""


def entry_of(key: Key, choice: Choice, microseconds: float) -> dict[str, Any]:
    """One element of a table's file."""
    kind = next(name for name, cls in _KINDS.items() if type(choice) is cls)
    named = dict(zip(("product", "rows", "n", "k", "dtype"), key, strict=True))
    return {**named, "kind": kind, "tuning": asdict(choice), "us": round(microseconds, 2)}


class ProductTable:
    """Choices by key; `exact` ignores all of them."""

    def __init__(self, entries: list[dict[str, Any]], *, exact: bool = False) -> None:
        self._exact = exact
        self._choices: dict[Key, Choice] = {
            (e["product"], e["rows"], e["n"], e["k"], e["dtype"]): _KINDS[e["kind"]](**e["tuning"])
            for e in entries
        }

    @classmethod
    def for_gpu(cls, name: str, *, exact: bool = False) -> ProductTable:
        """The table of the GPU whose name this is, as torch tells it; an empty one where there is none."""
        path = _TABLES / f"{file_stem(name)}.json"
        entries = json.loads(path.read_text()) if path.is_file() else []
        if any(entry["kind"] == "wide" for entry in entries) and not runs_here():
            entries = [entry for entry in entries if entry["kind"] != "wide"]
        return cls(entries, exact=exact)

    def choice(self, key: Key) -> Choice:
        """The choice of the table, or the default for products nobody has measured."""
        if self._exact:
            return EXACT
        product, rows, n, k, dtype = key
        for measured in (rows, _row_tile(rows)):
            choice = self._choices.get((product, measured, n, k, dtype))
            if choice is not None:
                return choice
        return _default(rows, dtype)


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
