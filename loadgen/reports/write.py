"""Every report of a run, into its folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.reports.parquet import write_parquet

if TYPE_CHECKING:
    from pathlib import Path

    from loadgen.goodput.curve import Curve
    from loadgen.run_folder import Run


def write_reports(run: Run, *, parquet: bool = False) -> None:
    """report.html, report.md, and requests.parquet on wish."""
    if parquet:
        write_parquet(run.path / "requests.parquet", run.records)


def write_curve_reports(path: Path, curve: Curve) -> None:
    """report.html and report.md of a search or a sweep."""
