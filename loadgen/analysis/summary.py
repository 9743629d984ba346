"""The summary of one run: counts, throughput, percentiles, attainment, validity."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from loadgen.analysis.columns import Columns
from loadgen.analysis.intervals import (
    BOOTSTRAP_FORMULA,
    WILSON_FORMULA,
    BlockBootstrap,
    independent_draws,
    share_interval,
)
from loadgen.analysis.metrics import ITL_FORMULA, LAG_FORMULA, READ_LAG_FORMULA, SUMMED
from loadgen.analysis.quantities import Estimate, Quantity, bootstrap_of, defined, gaps_of, quantity
from loadgen.analysis.slo import ATTAINMENT_FORMULA, GOOD_FORMULA, Judge
from loadgen.analysis.steady import WINDOW_FORMULA, MeasuredWindow, Steadiness, find_window
from loadgen.common.record import NO_FAILURE, Outcome, Record
from loadgen.common.settings import JudgeSettings, Settings

STAGES = ("admission", "queue", "prefill", "transfer", "decode")
# Largest cached share of prompts that share nothing by design. The chat template's own tokens are a part of
# each.
_MOST_CACHED = 0.25
# What can make a process of the generator late; its reports have percentiles of each in milliseconds.
_LAGS = ("loop_lag", "cpu_wait", "throttled")
_BUSY = "more processes, or a less busy machine"
_LIMITED = "a higher limit for its container, or none"
FORMULAS = {
    "good": GOOD_FORMULA,
    "attainment": ATTAINMENT_FORMULA,
    "window": WINDOW_FORMULA,
    "interval of attainment": WILSON_FORMULA,
    "interval of percentiles": BOOTSTRAP_FORMULA,
}


class ReasonKind(StrEnum):
    """The kind of a problem: the first four concern the generator, the others the server or the load."""

    LAG = "lag"
    NOT_SENT = "not sent"
    MISMATCH = "mismatch"
    UNCOUNTED = "uncounted"
    WINDOW = "window"
    ERRORS = "errors"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Reason:
    """A reason why a run is INVALID, for programs and for people."""

    kind: ReasonKind
    text: str


@dataclass(frozen=True, slots=True)
class Attainment:
    """Attainment of one class, or of all requests."""

    goal: float
    good: int
    judged: int
    share: Estimate
    # The number of independent draws.
    draws: float
    limits_ms: dict[str, float]


@dataclass(frozen=True, slots=True)
class Throughput:
    """Requests and tokens per second within the window."""

    offered: float
    sent: float
    ended_well: float
    good: float
    output_tokens: float
    input_tokens: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts, throughput and percentiles of the requests that were due in the window."""

    invalid: list[Reason]
    cautions: list[str]
    window: MeasuredWindow
    # Counts of the whole run; then of the window.
    planned: int
    due: int
    ok: int
    cancelled: int
    failed: dict[str, int]
    mismatches: dict[str, int]
    # Requests whose output began before its first counted token, by the field that had it.
    uncounted: dict[str, int]
    # Of the prompt tokens of those that succeeded; None where the server does not report it.
    cached_share: float | None
    throughput: Throughput
    attainment: Attainment | None
    classes: dict[str, Attainment]
    quantities: dict[str, Quantity]
    stages: dict[str, Quantity]
    generator: dict[str, Any]
    formulas: dict[str, str]

    @property
    def valid(self) -> bool:
        """True if nothing makes the run invalid."""
        return not self.invalid

    def as_dict(self) -> dict[str, Any]:
        """The summary as JSON values."""
        return {"valid": self.valid, **dataclasses.asdict(self)}


def summarize(
    records: Sequence[Record],
    settings: Settings,
    processes: Sequence[Mapping[str, Any]] = (),
    *,
    stopped: bool = False,
) -> Summary:
    """Summarises a run's raw record; `processes` are the final reports of the generator's processes."""
    judge = Judge.of(settings)
    whole = Columns.of(records, judge)
    window = find_window(whole.scheduled, whole.ended, stationary=settings.load.stationary)
    inside = whole.within(window.since, np.nextafter(window.until, np.inf))
    good_ones = [record for record in inside.records if record.outcome == Outcome.OK]
    bootstrap = bootstrap_of(good_ones, settings.load.seed) if len(good_ones) > 1 else None
    summary = Summary(
        invalid=[],
        cautions=_cautions(window, settings, _cached_share(good_ones), stopped=stopped),
        window=window,
        planned=len(records),
        due=len(inside),
        ok=len(good_ones),
        cancelled=int(inside.cancelled.sum()),
        failed=dict(Counter(r.outcome for r in inside.records if r.outcome not in NO_FAILURE)),
        mismatches=_mismatches(good_ones),
        uncounted=dict(Counter(record.uncounted for record in good_ones if record.uncounted)),
        cached_share=_cached_share(good_ones),
        throughput=_throughput(whole, inside, window),
        attainment=_attainment(inside, settings, settings.judge.goodput),
        classes=_by_class(inside, settings),
        quantities=_quantities(inside, good_ones, bootstrap),
        stages=_stages(good_ones, bootstrap),
        generator={
            "processes": list(processes),
            **{f"{name}_p99_ms": _worst(processes, f"{name}_ms") for name in _LAGS},
        },
        formulas=FORMULAS,
    )
    return dataclasses.replace(summary, invalid=invalid_because(summary, settings.judge))


def _worst(processes: Sequence[Mapping[str, Any]], name: str) -> float:
    """The largest p99 among the generator's processes."""
    return max((float(one.get(name, {}).get("p99", 0.0)) for one in processes), default=0.0)


def _quantities(
    inside: Columns, records: Sequence[Record], bootstrap: BlockBootstrap | None
) -> dict[str, Quantity]:
    found: dict[str, Quantity] = {}
    for metric in SUMMED:
        seconds, rows = defined([metric.of(record) for record in records])
        found[metric.name] = quantity(metric.name, metric.title, metric.formula, seconds, rows, bootstrap)
    found["itl"] = quantity("itl", "ITL", ITL_FORMULA, *gaps_of(records), bootstrap)
    lags, rows = defined([None if r.sent is None else r.sent - r.scheduled for r in inside.records])
    found["lag"] = quantity("lag", "send lag", LAG_FORMULA, lags, rows, None)
    late, rows = defined([late for r in inside.records for late in (r.first_late, r.last_late)])
    found["read_lag"] = quantity("read_lag", "read lag", READ_LAG_FORMULA, late, rows, None)
    return found


def _stages(records: Sequence[Record], bootstrap: BlockBootstrap | None) -> dict[str, Quantity]:
    found: dict[str, Quantity] = {}
    for stage in STAGES:
        seconds, rows = defined([(record.stages or {}).get(stage) for record in records])
        if len(seconds):
            found[stage] = quantity(stage, stage, "the server's own", seconds, rows, bootstrap)
    return found


def _mismatches(records: Sequence[Record]) -> dict[str, int]:
    """Counts of requests whose token counts differ from those requested or reported."""
    counts: Counter[str] = Counter()
    for record in records:
        received = len(record.token_times)
        if record.exact_output and received != record.asked_output:
            counts["output shorter or longer than requested"] += 1
        elif record.usage_output is not None and received != record.usage_output:
            counts["output tokens in usage differ from those received"] += 1
        elif (
            None not in (record.usage_input, record.asked_input) and record.usage_input != record.asked_input
        ):
            counts["prompt tokens in usage differ from those sent"] += 1
    return dict(counts)


def _cached_share(records: Sequence[Record]) -> float | None:
    """The share of the prompts' tokens that came from a cache of the server."""
    known = [(r.usage_cached, r.usage_input) for r in records if r.usage_cached is not None and r.usage_input]
    prompts = sum(tokens for _, tokens in known)
    return sum(cached for cached, _ in known) / prompts if prompts else None


def _throughput(whole: Columns, inside: Columns, window: MeasuredWindow) -> Throughput:
    seconds = max(1e-9, window.seconds)
    tokens = sum(
        int(np.searchsorted(r.token_times, window.until) - np.searchsorted(r.token_times, window.since))
        for r in whole.records
    )
    sent = sum(r.sent is not None and window.since <= r.sent <= window.until for r in whole.records)
    ended = (whole.ended >= window.since) & (whole.ended <= window.until)
    prompts = sum((r.usage_input or r.asked_input or 0) for r in inside.records if r.sent is not None)
    return Throughput(
        offered=len(inside) / seconds,
        sent=sent / seconds,
        ended_well=int((ended & whole.ok).sum()) / seconds,
        good=int(inside.good.sum()) / seconds,
        output_tokens=tokens / seconds,
        input_tokens=prompts / seconds,
    )


def _attainment(columns: Columns, settings: Settings, limits: Mapping[str, float]) -> Attainment | None:
    """Attainment; None without limits or without counted requests."""
    limited = limits or any(one.goodput for one in settings.load.classes)
    hits = columns.good[columns.judged].astype(np.float64)
    if not limited or not len(hits):
        return None
    low, high = share_interval(hits)
    return Attainment(
        goal=settings.judge.attainment,
        good=int(hits.sum()),
        judged=len(hits),
        share=Estimate(float(hits.mean()), low, high),
        draws=independent_draws(hits),
        limits_ms=dict(limits),
    )


def _by_class(columns: Columns, settings: Settings) -> dict[str, Attainment]:
    if len(settings.load.classes) < 2:
        return {}
    found: dict[str, Attainment] = {}
    for klass in settings.load.classes:
        mine = np.array([record.klass == klass.name for record in columns.records], np.bool_)
        one = _attainment(columns.where(mine), settings, klass.goodput or settings.judge.goodput)
        if one is not None:
            found[klass.name] = one
    return found


def _cautions(
    window: MeasuredWindow, settings: Settings, cached_share: float | None, *, stopped: bool
) -> list[str]:
    cautions: list[str] = []
    if cached_share is not None and cached_share > _MOST_CACHED and not settings.shares_prefixes:
        cautions.append(
            f"{cached_share:.0%} of the prompt tokens were in the server's prefix cache: it had seen these "
            "prompts, or parts of them, and latencies are those of a warm cache"
        )
    if stopped:
        cautions.append("the run was stopped before its end")
    if not settings.load.stationary:
        cautions.append("the load changes over time by design: the whole run is summed up")
    elif window.steadiness is Steadiness.SHORT:
        cautions.append("too short to tell whether the server was in a steady state")
    return cautions


def invalid_because(summary: Summary, limits: JudgeSettings) -> list[Reason]:
    """All reasons why the run is INVALID; empty for a valid one."""
    reasons = [*_of_the_generator(summary, limits), *_of_the_window(summary.window)]
    if not summary.ok:
        reasons.append(Reason(ReasonKind.NOTHING, "no request of the window succeeded"))
    failed = sum(summary.failed.values())
    if failed > limits.max_error_share * summary.due:
        kinds = ", ".join(f"{count} {kind}" for kind, count in summary.failed.items())
        text = f"{failed} of {summary.due} requests failed ({kinds}); allowed: {limits.max_error_share:.0%}"
        reasons.append(Reason(ReasonKind.ERRORS, text))
    return reasons


def _of_the_generator(summary: Summary, limits: JudgeSettings) -> list[Reason]:
    reasons: list[Reason] = []
    own, not_sent = summary.generator, summary.failed.get(Outcome.NOT_SENT, 0)
    send_lag, read_lag = (summary.quantities[name].at("99") or 0.0 for name in ("lag", "read_lag"))
    if not_sent:
        text = f"{not_sent} requests exceeded --max-in-flight: use more processes"
        reasons.append(Reason(ReasonKind.NOT_SENT, text))
    lags = (
        ("requests left {} late", send_lag, limits.max_lag_ms, _BUSY),
        ("tokens were read {} late", read_lag, limits.max_read_lag_ms, _BUSY),
        ("its event loop was {} late", own["loop_lag_p99_ms"], limits.max_lag_ms, _BUSY),
        ("it waited {} for a CPU", own["cpu_wait_p99_ms"], limits.max_lag_ms, _BUSY),
        (
            "a CPU limit took {} of each tenth of a second",
            own["throttled_p99_ms"],
            limits.max_lag_ms,
            _LIMITED,
        ),
    )
    for what, lag_ms, limit_ms, remedy in lags:
        if lag_ms > limit_ms:
            late = what.format(f"{lag_ms:.1f} ms")
            text = f"the generator lagged: {late} at p99 (at most {limit_ms:g}): {remedy}"
            reasons.append(Reason(ReasonKind.LAG, text))
    mismatched = sum(summary.mismatches.values())
    if mismatched > limits.max_mismatch_share * max(1, summary.ok):
        text = f"{mismatched} of {summary.ok} requests had token counts other than requested or reported"
        reasons.append(Reason(ReasonKind.MISMATCH, text))
    if summary.uncounted:
        fields = ", ".join(f"{count} with {name!r}" for name, count in summary.uncounted.items())
        text = f"output began before its first counted token ({fields}): TTFT is too long, and TPOT too short"
        reasons.append(Reason(ReasonKind.UNCOUNTED, text))
    return reasons


def _of_the_window(window: MeasuredWindow) -> list[Reason]:
    if window.steadiness is Steadiness.GROWING:
        text = (
            f"the backlog grew by {window.growth:.0f} requests in {window.seconds:.0f} s: the server is past "
            "its capacity, and latencies depend on the duration of the run"
        )
    elif window.steadiness is Steadiness.MOVING:
        text = (
            f"the window is not steady: the backlog moved by {window.growth:+.0f} requests around a mean of "
            f"{window.backlog:.0f}"
        )
    else:
        return []
    return [Reason(ReasonKind.WINDOW, text)]
