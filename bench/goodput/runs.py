"""Runs of loadgen at fixed rates and beyond them, and what they tell under any limits.

One run at a rate is judged under every limit, so that the arms' figures at all limits are of the same
requests. The runs of a rate have the same seed in every arm, and no two rates of an arm have the same: what a
prefix cache holds of one run is no prompt of another.

An overload is an arm at a rate that it sustains, at twice that for a while, and at the first again. One run
of loadgen lasts all the time; a second one at the same rate lasts as long as the overload does. What
happened before, during and after is computed from the records of both, by when requests were due.

Requests come at random, so at a rate near the highest that is sustained there are seconds with a queue in
any case: a server that had no overload has them too. So latencies after the overload are compared with what
the same requests would have had without it: with their waits in one queue that is empty when the overload
ends and serves as many requests a second as had their first tokens during it (Lindley's recursion;
Kleinrock, "Queueing Systems", volume 1, section 8.1).
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.goodput.arms import Workload
from bench.goodput.servers import MODEL, NotServedError, Target
from bench.goodput.texts import RepeatingText
from loadgen.analysis import run_folder
from loadgen.analysis.metrics import tpot, ttft
from loadgen.analysis.run_folder import Run
from loadgen.common.record import Outcome, Record
from loadgen.goodput.curve import probe_of
from loadgen.goodput.probe import Probe

# What a run may take beyond its duration: processes start, warm-up, the last answers.
_BESIDE_S = 400.0
# Seconds before and after the overload.
BEFORE_S, AFTER_S = 20.0, 20.0
# A refusal that takes longer than this, in ms, is late: its client loses time that it could use elsewhere.
LATE_MS = 20.0
# A second is normal if its medians are at most so many times those before, or those without the overload, and
# its share of requests in time is at least so large a part of that before.
_NORMAL, _NORMAL_PART = 1.25, 0.9
_REFUSED = ("HTTP_429", "RESOURCE_EXHAUSTED")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a good request in ms, and the share of requests that has to meet them."""

    ttft_ms: float
    tpot_ms: float
    goal: float


def numbers(text: str) -> list[float]:
    """Parses numbers with commas between them. Raises ValueError."""
    return [float(part) for part in text.split(",") if part]


@dataclass(frozen=True, slots=True)
class Load:
    """One run: `rate` requests a second of the whole arm for `seconds`, by `processes` loadgen processes.
    `warmup`: requests before it; None: as loadgen has it, twice as many as will run at a time. `text`: of
    prompts and answers; None: drawn uniformly."""

    workload: Workload
    rate: float
    seconds: float
    seed: int
    slo: Limits | None = None
    processes: int = 1
    warmup: int | None = None
    text: RepeatingText | None = None

    def words(self, target: Target, folder: Path, vocab: int, prompts: Sequence[str] = ()) -> list[str]:
        """The arguments of `loadgen`. With `slo`, requests state these limits. `prompts`: more of them."""
        admin = ["--admin", target.admin, "--metrics-url", target.metrics_url] if target.admin else []
        slo = [] if self.slo is None else [
            "--goodput", f"ttft:{self.slo.ttft_ms:g}", f"tpot:{self.slo.tpot_ms:g}", "--slo-headers"
        ]  # fmt: skip
        warmup = [] if self.warmup is None else ["--warmup", str(self.warmup)]
        return [
            "run", target.url, *admin, "--model", MODEL, "--rate", f"{self.rate / self.workload.requests:g}",
            "--duration", f"{self.seconds:g}", "--seed", str(self.seed), "--vocab-size", str(vocab),
            "--processes", str(self.processes), *self.workload.flags, *slo, *warmup, *prompts,
            "--out", str(folder), "--json",
        ]  # fmt: skip


async def measure(load: Load, target: Target, folder: Path, vocab: int) -> Run:
    """Runs loadgen and reads the run. Raises NotServedError where nothing was measured."""
    with tempfile.TemporaryDirectory() as place:
        prompts: list[str] = []
        if load.text is not None:
            arrivals = load.rate * load.seconds
            length, path = load.workload.prompt_tokens, Path(place) / "prompts.jsonl"
            prompts = load.text.write_prompts(path, length, arrivals, load.seed)
        await _run(load, load.words(target, folder, vocab, prompts))
    return run_folder.load(folder)


async def _run(load: Load, words: Sequence[str]) -> None:
    command = [sys.executable, "-m", "loadgen", *words]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    try:
        async with asyncio.timeout(load.seconds + _BESIDE_S):
            code = await process.wait()
    except TimeoutError:
        raise NotServedError(f"loadgen did not end at {load.rate:g}/s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code == 2:  # 1 and 3: measured, with failures or INVALID
        raise NotServedError(f"loadgen measured nothing at {load.rate:g}/s")


def judged(run: Run, rate: float, limits: Limits) -> Probe:
    """The probe of a run under these limits."""
    judge = run.settings.judge.model_copy(
        update={"goodput": {"ttft": limits.ttft_ms, "tpot": limits.tpot_ms}, "attainment": limits.goal}
    )
    classes = tuple(one.model_copy(update={"goodput": {}}) for one in run.settings.load.classes)
    load = run.settings.load.model_copy(update={"classes": classes})
    settings = run.settings.model_copy(update={"judge": judge, "load": load})
    return probe_of(Run(run.path, settings, run.records, run.summary, run.about), rate)


def judged_by_class(run: Run, rate: float, limits: Limits) -> dict[str, float]:
    """The attainment of each class of requests under these limits; empty where there is one class."""
    classes = [one.name for one in run.settings.load.classes]
    if len(classes) < 2:
        return {}
    found = {}
    for name in classes:
        mine = [record for record in run.records if record.klass == name]
        part = Run(run.path, run.settings, mine, run.summary, run.about)
        found[name] = round(judged(part, rate, limits).attainment, 4)
    return found


@dataclass(frozen=True, slots=True)
class Overload:
    """Good requests a second under one limit before and during the overload; seconds after it until TTFT and
    TPOT are normal (None: not within the run); refusals and how long they took, in ms."""

    tpot_ms: float
    before: float
    during: float
    normal_after_s: float | None
    refused: int
    refused_p50_ms: float | None
    refused_p99_ms: float | None
    late_refusals: int

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as values of JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Overloaded:
    """The records of both runs by due time, and when the overload began and ended, on one clock."""

    records: list[Record]
    begun_s: float
    ended_s: float

    def judged(self, limits: Limits) -> Overload:
        """Judges the run by these limits."""
        return judge_overload(self.records, limits, self.begun_s, self.ended_s)


async def overload(load: Load, target: Target, folder: Path, vocab: int) -> Overloaded:
    """Runs it; `load.seconds` is how long the overload lasts. Raises NotServedError."""
    whole = replace(load, seconds=BEFORE_S + load.seconds + AFTER_S)
    more = replace(load, seed=load.seed + 500)

    async def later() -> Run:
        await asyncio.sleep(BEFORE_S)
        return await measure(more, target, folder / "more", vocab)

    base, beside = await asyncio.gather(measure(whole, target, folder / "base", vocab), later())
    begun_s = beside.about["started_monotonic"] - base.about["started_monotonic"]
    records = [*base.records, *(_moved(one, begun_s) for one in beside.records)]
    return Overloaded(sorted(records, key=lambda one: one.scheduled), begun_s, begun_s + load.seconds)


def judge_overload(records: Sequence[Record], limits: Limits, begun_s: float, ended_s: float) -> Overload:
    """`begun_s`, `ended_s`: of the overload, on the records' clock."""
    before = [one for one in records if one.scheduled < begun_s]
    during = [one for one in records if begun_s <= one.scheduled < ended_s]
    after = sorted((one for one in records if one.scheduled >= ended_s), key=lambda one: one.scheduled)
    first_tokens = sum(begun_s <= one.token_times[0] < ended_s for one in records if one.token_times)
    each_s = (ended_s - begun_s) / max(1, first_tokens)
    refusals = [
        (one.ended - one.sent) * 1e3
        for one in records
        if one.outcome in _REFUSED and one.sent is not None and one.ended is not None
    ]
    p50, p99 = np.percentile(refusals, (50, 99)) if refusals else (None, None)
    return Overload(
        limits.tpot_ms,
        _good(before, limits) / begun_s,
        _good(during, limits) / (ended_s - begun_s),
        _normal_after(before, after, ended_s, each_s, limits),
        len(refusals),
        None if p50 is None else round(float(p50), 1),
        None if p99 is None else round(float(p99), 1),
        sum(took > LATE_MS for took in refusals),
    )


def _good(records: Sequence[Record], limits: Limits) -> int:
    first_s, each_s = limits.ttft_ms / 1e3, limits.tpot_ms / 1e3
    served = [one for one in records if one.outcome == Outcome.OK]
    return sum((ttft(one) or math.inf) <= first_s and (tpot(one) or 0.0) <= each_s for one in served)


def _normal_after(
    before: Sequence[Record], after: Sequence[Record], ended_s: float, each_s: float, limits: Limits
) -> float | None:
    """Seconds after the overload until the first of two successive seconds that are normal. `after`: by due
    time. `each_s`: what a request took of the server during the overload."""
    usual = _medians(before)
    if usual is None:
        return None
    waits = _waits([one.scheduled for one in after], each_s)
    fastest = min(value for one in before if (value := ttft(one)) is not None)
    least = _NORMAL_PART * _good(before, limits) / len(before)
    well = 0
    for second in range(int(after[-1].scheduled - ended_s) if after else 0):
        at = ended_s + second
        due = [(one, wait) for one, wait in zip(after, waits, strict=True) if at <= one.scheduled < at + 1]
        came = [one for one, _ in due]
        now = _medians(came)
        fine = (
            now is not None
            and now[0] <= _NORMAL * max(usual[0], fastest + median(wait for _, wait in due))
            and now[1] <= _NORMAL * usual[1]
            and _good(came, limits) >= least * len(came)
        )
        well = well + 1 if fine else 0
        if well == 2:
            return float(second - 1)
    return None


def _waits(due: Sequence[float], each_s: float) -> list[float]:
    """Waits of requests that come at these times to one queue, empty at first, where each takes `each_s`."""
    waits = [0.0] * len(due)
    for number, (last, at) in enumerate(pairwise(due), 1):
        waits[number] = max(0.0, waits[number - 1] + each_s - (at - last))
    return waits


def _medians(records: Sequence[Record]) -> tuple[float, float] | None:
    """TTFT and TPOT of those that were served."""
    served = [one for one in records if one.outcome == Outcome.OK]
    first = [value for one in served if (value := ttft(one)) is not None]
    each = [value for one in served if (value := tpot(one)) is not None]
    return (median(first), median(each)) if first and each else None


def _moved(record: Record, seconds: float) -> Record:
    """The record on another clock."""
    for name in ("scheduled", "sent", "ended"):
        value = getattr(record, name)
        if value is not None:
            setattr(record, name, value + seconds)
    record.token_times = [at + seconds for at in record.token_times]
    return record
