"""The comparison as a table, as JSON, and as one plot a limit: attainment over the rate per GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from baton.perf_model.step_costs import StepCosts
from bench.goodput.arms import Arm
from bench.goodput.between import cross
from bench.goodput.ideal_probe import ideal_probe
from bench.goodput.runs import Limits, judged
from loadgen.analysis.run_folder import Run
from loadgen.goodput.probe import Probe
from loadgen.reports.page import charts, heading, page, section
from loadgen.reports.scales import Scale
from loadgen.reports.svg import Chart

_STYLES = ("teal", "orange", "purple", "blue", "red", "grey")
_IDEAL = ", ideal"


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

    def add(self, arm: Arm, curves: Sequence[Curve]) -> None:
        """Adds the curves of an arm, one a limit."""
        self.curves += [curve for curve in curves if curve.arm == arm.name]

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
