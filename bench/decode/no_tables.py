"""A start on a GPU that nothing has been measured on: no shipped table of products, none of this machine's,
and an empty cache of compiled kernels."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.device.kernel_files.cache import keep_kernels_in


@contextmanager
def empty_kernel_cache() -> Iterator[Path]:
    """An empty folder for this run's kernels, and for what tuning at start keeps beside them."""
    with tempfile.TemporaryDirectory() as folder:
        keep_kernels_in(folder)
        yield Path(folder)


@contextmanager
def no_tables() -> Iterator[Path]:
    """`empty_kernel_cache`, and no table from the repository, of this GPU or of another one."""
    from baton.engine.gemm_dispatch import table as gemm_table

    shipped = gemm_table.TABLES
    with empty_kernel_cache() as folder:
        gemm_table.TABLES = folder
        try:
            yield folder
        finally:
            gemm_table.TABLES = shipped
