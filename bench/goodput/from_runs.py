"""The comparison of runs that were made before: by several commands, or by one that was cut off.

    python -m bench.goodput.from_runs DIR [DIR ...] --out DIR [--tpot 6,8,12,20,30] [--ttft 500]
        [--attainment 0.9] [--ideal PROFILE] [--images DIR]

Each DIR is the --out of a `python -m bench.goodput`, all of one workload. Runs that did not end are left out,
and so are arms without any. Runs of arms of one name are one curve a limit; where requests stated their
limits, they are judged under these alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from baton.perf_model.profile import read_profile
from baton.perf_model.step_costs import StepCosts
from bench.goodput.arms import Arm
from bench.goodput.report import Comparison, curves_of
from bench.goodput.runs import Limits, numbers
from loadgen.analysis import run_folder
from loadgen.analysis.run_folder import Run
from loadgen.common.errors import LoadgenError

_ARMS = "arms.json"


def write_arms(out: Path, comparison: Comparison, arms: Sequence[Arm], stated: Limits | None = None) -> None:
    """Writes what is needed beside the runs' folders to compare them later. `stated`: by the requests."""
    document = {
        "workload": comparison.workload,
        "about": comparison.about,
        "arms": [asdict(arm) for arm in arms],
        "stated_tpot_ms": None if stated is None else stated.tpot_ms,
    }
    (out / _ARMS).write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.goodput.from_runs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    parser.add_argument("--tpot", default=[6, 8, 12, 20, 30], type=numbers, help="limits in ms")
    parser.add_argument("--ttft", default=500.0, type=float, help="limit in ms")
    parser.add_argument("--attainment", default=0.9, type=float, help="share of requests that meet both")
    parser.add_argument("--ideal", metavar="PROFILE", help="file, or name of a shipped profile")
    parser.add_argument("--images", type=Path, metavar="DIR", help="for the plots as SVG files")
    arguments = parser.parse_args()
    limits = [Limits(arguments.ttft, tpot, arguments.attainment) for tpot in arguments.tpot]
    try:
        ideal = read_profile(arguments.ideal).costs if arguments.ideal else None
        comparison = compared(arguments.folders, limits, ideal)
    except (OSError, ValueError, LoadgenError) as error:
        sys.exit(f"bench.goodput.from_runs: {error}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    comparison.write(arguments.out, arguments.images)
    print(comparison.table())


def compared(folders: Sequence[Path], limits: Sequence[Limits], ideal: StepCosts | None) -> Comparison:
    """All arms that have runs. Raises ValueError where the folders are of different workloads."""
    documents = [(folder, json.loads((folder / _ARMS).read_text())) for folder in folders]
    workloads = {document["workload"] for _, document in documents}
    if len(workloads) != 1:
        raise ValueError(f"runs of different workloads: {', '.join(sorted(workloads))}")
    about: dict[str, list[str]] = {}
    for _, document in documents:
        for name, value in document["about"].items():
            values = about.setdefault(name, [])
            if value not in values:
                values.append(value)
    arms: dict[str, Arm] = {}
    found: dict[str, dict[Limits, list[tuple[float, Run]]]] = {}
    for folder, document in documents:
        stated = document["stated_tpot_ms"]
        for fields in document["arms"]:
            arm = Arm(**(fields | {"flags": tuple(fields["flags"])}))
            arm = arms.setdefault(arm.name, arm)
            if runs := runs_of(folder / arm.name, arm):
                for one in limits:
                    if stated in (None, one.tpot_ms):
                        found.setdefault(arm.name, {}).setdefault(one, []).extend(runs)
    comparison = Comparison(workloads.pop(), {name: "; ".join(values) for name, values in about.items()})
    for name, by_limit in found.items():
        curves = []
        for one in sorted(by_limit, key=lambda limit: limit.tpot_ms):
            runs = sorted(by_limit[one], key=lambda pair: pair[0])
            curves += curves_of(arms[name], runs, [one], ideal)
        comparison.curves += sorted(curves, key=lambda curve: curve.arm != name)  # the ideal ones after them
    return comparison


def runs_of(folder: Path, arm: Arm) -> list[tuple[float, Run]]:
    """An arm's runs with their rates, of all its GPUs; those that ended by themselves."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        try:
            rate, run = float(path.name) * arm.gpus, run_folder.load(path)
        except (LoadgenError, ValueError):  # not a rate, or cut off
            continue
        if not run.about["stopped"]:
            found.append((rate, run))
    return sorted(found, key=lambda pair: pair[0])


if __name__ == "__main__":
    main()
