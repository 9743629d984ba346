"""The raw record as parquet."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from loadgen.common.errors import LoadgenError
from loadgen.common.record import Record


def need_pyarrow() -> None:
    """Raises LoadgenError where pyarrow is missing; called before a run."""
    if importlib.util.find_spec("pyarrow") is None:
        raise LoadgenError("parquet needs pyarrow: pip install 'baton-serve[parquet]'")


def write_parquet(path: Path, records: Sequence[Record]) -> None:
    """Writes one row per request, with the columns of the JSONL. Raises LoadgenError where pyarrow is
    missing."""
    need_pyarrow()
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist([dataclasses.asdict(record) for record in records])
    parquet.write_table(table, path)
