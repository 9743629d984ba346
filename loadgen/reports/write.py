"""Writes all reports of a run, a search or a sweep to its folder."""

from __future__ import annotations

from pathlib import Path

from loadgen.analysis.run_folder import Run
from loadgen.goodput.curve import Curve
from loadgen.reports.html_curve import curve_page
from loadgen.reports.html_run import run_page
from loadgen.reports.markdown import curve_markdown, run_markdown
from loadgen.reports.parquet import write_parquet

HTML, MARKDOWN, PARQUET = "report.html", "report.md", "requests.parquet"


def write_reports(run: Run, *, parquet: bool = False) -> None:
    """HTML and Markdown, and optionally parquet."""
    (run.path / HTML).write_text(run_page(run))
    (run.path / MARKDOWN).write_text(run_markdown(run))
    if parquet:
        write_rows(run)


def write_rows(run: Run) -> None:
    """The raw record as parquet."""
    write_parquet(run.path / PARQUET, run.records)


def write_curve_reports(path: Path, curve: Curve) -> None:
    """HTML and Markdown of a curve."""
    (path / HTML).write_text(curve_page(curve))
    (path / MARKDOWN).write_text(curve_markdown(curve))
