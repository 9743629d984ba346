"""Runs searches and sweeps against a server: one run after another, each in its own folder.

A run that can no longer reach the goal is stopped, since beyond a server's capacity more time only lengthens
its queue.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from loadgen.analysis.run_folder import Run
from loadgen.analysis.summary import ReasonKind
from loadgen.common.formatting import number, percent
from loadgen.common.settings import Settings
from loadgen.generator.interrupt import Interrupt
from loadgen.generator.one_run import run_once
from loadgen.generator.processes import Progress
from loadgen.goodput.curve import Curve, Point, outcome_of, point_of, probe_of
from loadgen.goodput.probe import Probe
from loadgen.goodput.search import Phase, Search, SearchPlan
from loadgen.targets.preflight import Preflight

Report = Callable[[str], None]
# How many of the misses that a run may have it must have before it is ended: some lie in what is cut.
_CERTAIN = 1.5
# What runs when the last request was sent gets this long, and more where requests or limits are long.
_DRAIN_S = 5.0
# A run at the budget's end is cut to fit in, though not below this.
_SHORTEST_S = 1.0
# Runs in a row in which the generator failed.
_MOST_LOST = 3
_GENERATORS_OWN = frozenset({ReasonKind.LAG, ReasonKind.NOT_SENT, ReasonKind.MISMATCH, ReasonKind.UNCOUNTED})


class Campaign:
    """The runs of one search or sweep, with the results of its preflight."""

    def __init__(
        self, before: Preflight, path: Path, report: Report, interrupt: Interrupt, keep: Callable[[Run], None]
    ) -> None:
        """`report` receives progress messages; `keep` every run, once its folder is written."""
        self._before = before
        self._path = path
        self._report = report
        self._interrupt = interrupt
        self._keep = keep
        self._began = time.monotonic()
        self._points: list[Point] = []

    async def search(self, plan: SearchPlan) -> Curve:
        """Searches the goodput within the plan's budget. A run in which the generator failed is repeated; if
        it keeps failing, the generator is the limit and the search is INVALID.
        """
        search = Search(plan)
        lost: list[tuple[str, ...]] = []
        beside = 0.0  # what a run took at most beside its sending: processes start, the last answers come
        while len(lost) < _MOST_LOST and not self._interrupt.asked and (trial := search.next()) is not None:
            began = time.monotonic()
            early = trial.phase is not Phase.CONFIRM
            left = plan.budget_s - (began - self._began) - beside
            seconds = min(trial.seconds, max(_SHORTEST_S, left))
            run, probe = await self._measure(trial.rate, seconds, str(trial.phase), early_end=early)
            took_s = time.monotonic() - began
            beside = max(beside, took_s - seconds)
            if self._interrupt.asked:
                break
            faults = tuple(one.text for one in run.summary.invalid if one.kind in _GENERATORS_OWN)
            if faults:
                lost.append(faults)
                search.skip(took_s)
            else:
                lost.clear()
                search.add_probe(probe, took_s)
        invalid = lost[-1] if lost else ()
        result = search.result()
        return dataclasses.replace(
            self._curve("search"),
            finding=outcome_of(result),
            crossing=None if invalid else result.crossing,
            confirmed=self._points[-1].folder if result.confirmed is not None and not invalid else None,
            invalid=invalid,
        )

    async def sweep(self, rates: Sequence[float], seconds: float) -> Curve:
        """Measures every rate once, for the same duration."""
        for place, rate in enumerate(rates, 1):
            if self._interrupt.asked:
                break
            await self._measure(rate, seconds, f"{place} of {len(rates)}", early_end=False)
        return self._curve("sweep")

    async def _measure(
        self, rate: float, seconds: float, title: str, *, early_end: bool
    ) -> tuple[Run, Probe]:
        settings = self._settings(rate, seconds)
        folder = self._path / f"{len(self._points) + 1:03d}-{rate:.4g}"
        folder.mkdir()

        def go_on(progress: Progress) -> bool:
            misses = progress.ended - progress.good - progress.cancelled
            may = (1 - settings.judge.attainment) * rate * seconds
            if self._interrupt.asked:
                return False
            return not early_end or misses <= max(10.0, _CERTAIN * may)

        before = _with_settings(self._before, settings)
        run = await run_once(before, folder, f"{title}: {rate:.4g}/s", go_on)
        self._keep(run)
        probe = probe_of(run, rate)
        self._points.append(point_of(run, probe))
        self._report(
            f"{title}: {number(rate)}/s for {seconds:.0f} s: {probe.verdict}, "
            f"{percent(probe.attainment)} [{percent(probe.low)}, {percent(probe.high)}] of {probe.requests}"
        )
        return run, probe

    def _settings(self, rate: float, seconds: float) -> Settings:
        """The user's settings at this rate; every probe has its own arrivals and prompts."""
        settings = self._before.settings
        load = settings.load.model_copy(
            update={
                "rate": rate,
                "duration_s": seconds,
                "num_requests": None,
                "seed": (settings.load.seed + 7919 * len(self._points)) % 2**64,
            }
        )
        drain = settings.generator.drain_s
        if drain is None:
            limits = sum(settings.judge.goodput.values()) / 1e3
            drain = min(settings.target.timeout_s, _DRAIN_S + 3 * self._before.lone_s + limits)
        generator = settings.generator.model_copy(update={"drain_s": drain})
        return settings.model_copy(update={"load": load, "generator": generator})

    def _curve(self, kind: str) -> Curve:
        settings = self._before.settings
        return Curve(
            kind=kind,
            target=settings.target.url,
            goal=settings.judge.attainment,
            limits_ms=settings.judge.goodput,
            points=tuple(sorted(self._points, key=lambda point: point.probe.rate)),
            seconds=time.monotonic() - self._began,
        )


def _with_settings(before: Preflight, settings: Settings) -> Preflight:
    return type(before)(settings, before.lone_s, before.warmups)
