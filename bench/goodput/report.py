"""The comparison of arms as a table, as JSON, and as one plot a limit: attainment over the rate per GPU.

    python -m bench.goodput report DIR [DIR ...] --out DIR [--tpot 6,8,12,20,30] [--ttft 500]
        [--attainment 0.9] [--ideal PROFILE] [--images DIR]

makes it of runs that were made before, by several commands or by one that was cut off. Each DIR is the
--out of a `python -m bench.goodput`, all of one workload. Runs that did not end are left out, and so are arms
without any. Runs of arms of one name are one curve a limit; where requests stated their limits, they are
judged under these alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from baton.perf_model.profile import read_profile
from baton.perf_model.step_costs import StepCosts
from bench.goodput.arms import Arm
from bench.goodput.ideal import ideal_probe
from bench.goodput.runs import Limits, judged, numbers
from bench.options import program_parser
from loadgen.analysis import run_folder
from loadgen.analysis.run_folder import Run
from loadgen.common.errors import LoadgenError
from loadgen.goodput.probe import Probe, Verdict
from loadgen.reports.page import charts, heading, page, section
from loadgen.reports.scales import Scale
from loadgen.reports.svg import Chart

_STYLES = ("teal", "orange", "purple", "blue", "red", "grey")
_IDEAL = ", ideal"
_ARMS = "arms.json"


def standalone(chart: Chart) -> str:
    """The chart as an SVG file of its own, with the styles that a page has."""
    style = resources.files("loadgen.reports").joinpath("style.css").read_text()
    head, _, rest = chart.render().partition(">")
    head = head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return f"{head}><style>{style}</style>{rest}\n"


@dataclass(frozen=True, slots=True)
class Curve:
    """An arm's probes under one limit, in the order of their runs; `skipped`: why it was not measured."""

    arm: str
    gpus: int
    limits: Limits
    probes: tuple[Probe, ...] = ()
    skipped: str = ""

    @property
    def goodput(self) -> str:
        """Requests a second and GPU at the goal, with the rates measured on both sides of it, in words where
        it is not between any."""
        if not self.probes:
            return f"skipped: {self.skipped}"
        found = cross(self.probes, self.limits.goal)
        rate = f"{found.rate / self.gpus:.3g}"
        if found.low is None:
            return f"below {rate}"
        if found.high is None:
            return f"above {rate}"
        return f"{rate} [{found.low / self.gpus:.3g}, {found.high / self.gpus:.3g}]"


def curves_of(
    arm: Arm, runs: Sequence[tuple[float, Run]], limits: Sequence[Limits], ideal: StepCosts | None
) -> list[Curve]:
    """An arm's curve under each limit, of runs at rates of the whole arm; of Baton's the ideal ones too."""
    curves = [
        Curve(arm.name, arm.gpus, one, tuple(judged(run, rate, one) for rate, run in runs)) for one in limits
    ]
    if ideal is not None and arm.kind == "baton":
        for one in limits:
            probes = [ideal_probe(run.records, rate, one, ideal, arm) for rate, run in runs]
            curves.append(Curve(f"{arm.name}{_IDEAL}", arm.gpus, one, tuple(probes)))
    return curves


@dataclass
class Comparison:
    """All curves of one workload. `about`: hardware, versions, commands, date."""

    workload: str
    about: dict[str, Any]
    curves: list[Curve] = field(default_factory=list)

    def skip(self, arm: Arm, limits: Sequence[Limits], why: str) -> None:
        """Records that an arm was not measured."""
        self.curves += [Curve(arm.name, arm.gpus, one, skipped=why) for one in limits]

    def table(self) -> str:
        """Goodput by TPOT limit and arm, in Markdown."""
        arms = list(dict.fromkeys(curve.arm for curve in self.curves))
        gpus = {curve.arm: curve.gpus for curve in self.curves}
        cells = {(curve.arm, curve.limits.tpot_ms): curve.goodput for curve in self.curves}
        limits = sorted({curve.limits.tpot_ms for curve in self.curves})
        head = ["TPOT limit", *(f"{arm} ({gpus[arm]} GPU{'s' * (gpus[arm] != 1)})" for arm in arms)]
        rows = [[f"{limit:g} ms", *(cells.get((arm, limit), "") for arm in arms)] for limit in limits]
        lines = [head, ["---"] * len(head), *rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def charts(self) -> list[Chart]:
        """One for each limit, a curve an arm; the ideal ones are dashed, in the colour of their arm."""
        return [self._chart(limit) for limit in sorted({curve.limits.tpot_ms for curve in self.curves})]

    def _chart(self, tpot_ms: float) -> Chart:
        curves = [curve for curve in self.curves if curve.limits.tpot_ms == tpot_ms and curve.probes]
        rates = [probe.offered / curve.gpus for curve in curves for probe in curve.probes]
        title = f"Attainment, TPOT of {tpot_ms:g} ms or less"
        axis = Scale(0.0, 1.05 * max(rates, default=1.0))
        ideals = any(curve.arm.endswith(_IDEAL) for curve in curves)
        words = "share; dashed: ideal" if ideals else "share"
        chart = Chart(title, axis, Scale(0.0, 1.0), "requests a second and GPU", words)
        if curves:
            goal = curves[0].limits.goal
            chart.level(goal, "grey", f"goal {goal:.0%}")
        arms = list(dict.fromkeys(curve.arm.removesuffix(_IDEAL) for curve in curves))
        for curve in curves:
            points = sorted((probe.offered / curve.gpus, probe.attainment) for probe in curve.probes)
            arm = curve.arm.removesuffix(_IDEAL)
            style = _STYLES[arms.index(arm) % len(_STYLES)]
            if curve.arm == arm:
                chart.line(points, style)
                chart.dots(points, style, arm, radius=3.5)
            else:
                chart.line(points, f"{style} dashed")
        return chart

    def write(self, folder: Path, images: Path | None = None) -> None:
        """Writes goodput.json, goodput.md and goodput.html; into `images` each plot as a file of its own."""
        document = {
            "workload": self.workload,
            "about": self.about,
            "curves": [asdict(curve) | {"goodput": curve.goodput} for curve in self.curves],
        }
        (folder / "goodput.json").write_text(json.dumps(document, indent=1) + "\n")
        about = "\n".join(f"- {name}: {value}" for name, value in self.about.items())
        (folder / "goodput.md").write_text(f"# {self.workload}\n\n{about}\n\n{self.table()}\n")
        lines = [f"{name}: {value}" for name, value in self.about.items()]
        title = f"Goodput of {self.workload}"
        parts = [heading(title, "", "", lines), section("Over the rate", charts(self.charts()))]
        (folder / "goodput.html").write_text(page(title, parts))
        if images is not None:
            images.mkdir(parents=True, exist_ok=True)
            for limit in sorted({curve.limits.tpot_ms for curve in self.curves}):
                name = f"goodput-{self.workload}-{limit:g}ms.svg"
                (images / name).write_text(standalone(self._chart(limit)))


class Between(NamedTuple):
    """The rate at the goal, the highest rate measured below it, and the lowest above it. Without one on a
    side, `rate` is the other and that side None."""

    rate: float
    low: float | None
    high: float | None


class _Pool(NamedTuple):
    """Neighbouring probes that have one attainment."""

    first: float
    last: float
    share: float
    weight: float


def cross(probes: Sequence[Probe], goal: float) -> Between:
    """Rate at which attainment crosses its goal, read off the line between the rates measured on both sides
    of it, of at least one probe. One whose backlog grows does not meet the goal, whatever share of its
    requests did.

    Attainment falls with the rate. Where one of a higher rate is above that of a lower one, by chance, both
    have their mean, weighted by their requests (isotonic regression by pooling adjacent violators). `loadgen
    search` chooses its rates near the crossing and fits a curve (`loadgen.goodput.crossing`); of rates far
    apart such a curve says more of itself than of them.
    """
    pools: list[_Pool] = []
    for probe in sorted(probes, key=lambda probe: probe.offered):
        share = probe.attainment
        if probe.verdict is Verdict.UNSTABLE:
            share = min(share, goal - 1e-9)
        pools.append(_Pool(probe.offered, probe.offered, share, max(1, probe.requests)))
        while len(pools) > 1 and pools[-1].share > pools[-2].share:
            pools[-2:] = [_joined(*pools[-2:])]
    met = [pool for pool in pools if pool.share >= goal]
    missed = pools[len(met) :]
    if not met:
        return Between(missed[0].first, None, missed[0].first)
    if not missed:
        return Between(met[-1].last, met[-1].last, None)
    low, high = met[-1], missed[0]
    part = (low.share - goal) / (low.share - high.share)
    return Between(low.last + part * (high.first - low.last), low.last, high.first)


def _joined(low: _Pool, high: _Pool) -> _Pool:
    weight = low.weight + high.weight
    share = (low.share * low.weight + high.share * high.weight) / weight
    return _Pool(low.first, high.last, share, weight)


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
    parser = program_parser("goodput", __doc__, "report")
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
        sys.exit(f"bench.goodput report: {error}")
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
