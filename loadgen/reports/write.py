"""Writes all reports of a run, a search or a sweep to its folder."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

from loadgen.analysis.run_folder import Run
from loadgen.common.errors import LoadgenError
from loadgen.goodput.curve import Curve
from loadgen.reports.html_curve import curve_page
from loadgen.reports.html_run import run_page
from loadgen.reports.markdown import curve_markdown, run_markdown

HTML, MARKDOWN, PARQUET = "report.html", "report.md", "requests.parquet"


def write_reports(run: Run, *, parquet: bool = False) -> None:
    """Writes HTML and Markdown, and optionally parquet."""
    (run.path / HTML).write_text(run_page(run))
    (run.path / MARKDOWN).write_text(run_markdown(run))
    if parquet:
        write_rows(run)


def need_pyarrow() -> None:
    """Raises LoadgenError where pyarrow is missing; called before a run."""
    if importlib.util.find_spec("pyarrow") is None:
        raise LoadgenError("parquet needs pyarrow: pip install 'baton-serve[parquet]'")


def write_rows(run: Run) -> None:
    """Writes the raw record as parquet: one row per request, with the columns of the JSONL. Raises
    LoadgenError where pyarrow is missing."""
    need_pyarrow()
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist([dataclasses.asdict(record) for record in run.records])
    parquet.write_table(table, run.path / PARQUET)


def write_curve_reports(path: Path, curve: Curve) -> None:
    """Writes HTML and Markdown of a curve."""
    (path / HTML).write_text(curve_page(curve))
    (path / MARKDOWN).write_text(curve_markdown(curve))
