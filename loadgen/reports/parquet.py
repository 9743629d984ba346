"""The raw record as parquet, for who likes it better than JSONL."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from loadgen.errors import LoadgenError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from loadgen.record import Record


def write_parquet(path: Path, records: Sequence[Record]) -> None:
    """A row a request, the columns of the JSONL; LoadgenError where pyarrow is missing."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise LoadgenError("parquet needs pyarrow: pip install 'baton-serve[parquet]'") from None
    table = pyarrow.Table.from_pylist([dataclasses.asdict(record) for record in records])
    parquet.write_table(table, path)
