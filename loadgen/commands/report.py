"""`loadgen report`: the reports of a folder made anew from its raw record."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from loadgen.analysis import run_folder
from loadgen.goodput.curve import CURVE, read_curve
from loadgen.reports.console import show_run
from loadgen.reports.console_curve import show_curve
from loadgen.reports.write import write_curve_reports, write_reports

HELP = "the reports of a run, search or sweep, made anew"
DESCRIPTION = "Sums up a folder's raw record again and writes report.html and report.md."


def add(parser: argparse.ArgumentParser) -> None:
    """The flags of this command."""
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--parquet", action="store_true", help="the raw record as parquet, too")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def main(arguments: argparse.Namespace) -> int:
    """0, also where the run is INVALID: the report says so."""
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
