"""`loadgen compare`: compares two or more runs, or searches; sends servers the load of the first run."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadgen.analysis import run_folder
from loadgen.analysis.comparison import DIFFERENCE_FORMULA, Difference, compare
from loadgen.analysis.run_folder import Run
from loadgen.commands.same_load import is_target, send_same_load
from loadgen.common.errors import LoadgenError
from loadgen.common.formatting import interval, number
from loadgen.goodput.curve import CURVE, Curve, read_curve
from loadgen.reports.compared import comparison_page, difference_cells
from loadgen.reports.console import plain_table
from loadgen.reports.descriptions import load_words

DESCRIPTION = (
    "Compares each further run with the first. Every difference has a 95 % interval; significant ones are "
    "marked. Folders of searches are compared by their goodput. A server's address in place of a further "
    "folder is sent the load of the first run, with the same prompts at the same times."
)


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of this command."""
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="DIR|TARGET",
        help="folders of two or more runs, or of searches; behind the first also addresses of servers",
    )
    parser.add_argument("--model", default="", help="model name at those servers (default: the served model)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where folders of their runs are made (default: loadgen-runs)"
    )
    parser.add_argument("--html", metavar="FILE", help="also write an HTML page")
    parser.add_argument("--json", action="store_true", help="print one JSON object to stdout")


def main(arguments: argparse.Namespace) -> int:
    """Prints the comparison; returns 0."""
    if len(arguments.folders) < 2:
        raise LoadgenError("compare needs two folders or more, or a folder and servers")
    if not any(map(is_target, arguments.folders)):
        paths = [Path(folder) for folder in arguments.folders]
        if all((path / CURVE).exists() for path in paths):
            return _curves([read_curve(path) for path in paths], paths, arguments)
    runs = runs_of(arguments)
    compared = {str(run.path): compare(runs[0], run) for run in runs[1:]}
    if arguments.html:
        Path(arguments.html).write_text(comparison_page(runs, compared))
    if arguments.json:
        document = {
            "first": str(runs[0].path),
            "formula": DIFFERENCE_FORMULA,
            "caution": other_prompts(runs),
            "valid": {str(run.path): run.summary.valid for run in runs},
            "differences": {
                path: [dataclasses.asdict(one) | {"certain": one.certain} for one in differences]
                for path, differences in compared.items()
            },
        }
        print(json.dumps(document))
        return 0
    console = Console(highlight=False)
    for run in runs:
        verdict = "" if run.summary.valid else "  INVALID"
        console.print(
            Text(f"{run.path}: {load_words(run.settings.load)}{verdict}", style="" if not verdict else "red")
        )
    if note := other_prompts(runs):
        console.print(Text(f"caution  {note}", style="yellow"))
    for path, differences in compared.items():
        console.print(Text(f"\n{runs[0].path} → {path}", style="bold"), table(differences), sep="\n")
    console.print(Text(f"*: significant, the interval excludes zero. {DIFFERENCE_FORMULA}", style="dim"))
    return 0


def runs_of(arguments: argparse.Namespace) -> list[Run]:
    """The runs of the folders, and those that are sent now. Raises LoadgenError where the first is none."""
    first = arguments.folders[0]
    if is_target(first):
        raise LoadgenError(f"{first}: the first is the folder of a run, whose load the servers are sent")
    loaded = {one: run_folder.load(Path(one)) for one in arguments.folders if not is_target(one)}
    return [
        loaded[one] if one in loaded else send_same_load(loaded[first], one, arguments.model, arguments.out)
        for one in arguments.folders
    ]


def other_prompts(runs: Sequence[Run]) -> str:
    """A word of caution where the runs sent different prompts; empty if all sent the same."""
    if len({run.settings.load.seed for run in runs}) > 1:
        seed = runs[0].settings.load.seed
        return (
            f"the runs sent different prompts and arrivals: with --seed {seed} a run sends those of the first"
        )
    prompts = [run.settings.prompts for run in runs]
    return "the runs sent different prompts" if any(one != prompts[0] for one in prompts) else ""


def table(differences: list[Difference]) -> Table:
    """A table with one row per figure; significant differences are bold."""
    shown = plain_table()
    for name in ("", "first", "second", "difference", "95 %", "change"):
        shown.add_column(name, justify="right" if name else "left", no_wrap=True)
    for one in differences:
        name, *figures = difference_cells(one)
        shown.add_row(
            f"{'*' if one.certain else ' '} {name}".rstrip(),
            *figures,
            "" if one.change is None else f"{one.change:+.0%}",
            style="bold" if one.certain else "",
        )
    return shown


def _curves(curves: list[Curve], paths: list[Path], arguments: argparse.Namespace) -> int:
    if arguments.json:
        print(json.dumps({str(path): curve.as_dict() for path, curve in zip(paths, curves, strict=True)}))
        return 0
    shown = plain_table()
    for name in ("search", "goodput/s", "95 %", "of the first", "finding"):
        shown.add_column(name, justify="left" if name in ("search", "finding") else "right")
    first = curves[0].crossing
    for path, curve in zip(paths, curves, strict=True):
        found = curve.crossing
        shown.add_row(
            str(path),
            number(found.rate) if found else "–",
            interval(found.low, found.high) if found else "",
            f"{found.rate / first.rate:.2f} [{found.low / first.high:.2f}, {found.high / first.low:.2f}]"
            if found and first
            else "",
            curve.finding or curve.kind,
        )
    Console(highlight=False).print(shown)
    return 0
