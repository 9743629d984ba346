"""`loadgen report`: generates the reports of a folder again from its raw record."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from loadgen.analysis import run_folder
from loadgen.goodput.curve import CURVE, read_curve
from loadgen.reports.console import show_curve, show_run
from loadgen.reports.write import write_curve_reports, write_reports

DESCRIPTION = "Summarises a folder's raw record again and writes report.html and report.md."


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this command."""
    parser.add_argument("folder", metavar="DIR", help="folder of a run, search or sweep")
    parser.add_argument("--parquet", action="store_true", help="also write the raw record as parquet")
    parser.add_argument("--json", action="store_true", help="print one JSON object to stdout")


def main(arguments: argparse.Namespace) -> int:
    """Writes and prints the reports; returns 0, even for an INVALID run."""
    path = Path(arguments.folder)
    console = Console(highlight=False)
    if (path / CURVE).exists():
        curve = read_curve(path)
        write_curve_reports(path, curve)
        if arguments.json:
            print(json.dumps({"out": str(path), **curve.as_dict()}))
        else:
            show_curve(curve, path, console)
        return 0
    run = run_folder.load(path)
    write_reports(run, parquet=arguments.parquet)
    if arguments.json:
        print(json.dumps(run.as_dict()))
    else:
        show_run(run, console)
    return 0
