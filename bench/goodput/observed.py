"""Figures of a run besides its requests: gaps between tokens at the clients, and how busy the servers were.

Gaps are computed from the records, so the same for every server: the first gap, which an admitted sequence
waits for its first decode step, and inter-token latencies. The servers' own times are those of Baton's
metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from loadgen.common.record import Outcome, Record
from loadgen.common.server_samples import Sample

# Gaps of a request after its first that say how long a step was then.
_NEXT = 8
# Tokens that come within so many ms of the one before came in one message with it, as those of a step with
# drafts do, or in one read.
_TOGETHER_MS = 0.2
# Stages of the router that a first gap consists of; loadgen knows them over gRPC.
_GAP_PARTS = ("transfer", "first_step")
_STAGE = "baton_router_stage_seconds"
_BUSY_S, _TOKENS, _PROMPTS = (
    f"baton_worker_{name}_total" for name in ("prefill_step_seconds", "prompt_tokens", "prompts")
)
_DEMAND, _DEMAND_S = "baton_router_demand_requests", "baton_router_demand_prefill_seconds"
_STEPS, _STEP_S, _DECODED = (
    f"baton_worker_{name}_total" for name in ("decode_steps", "decode_step_seconds", "decoded_tokens")
)


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """Times in ms; `step`: the median gap between messages. `first_gap`: between first and second token;
    `itl`: between all others. `first_over_two_p99`: of first gaps less two steps of that time, which is what
    is lost beside the wait for the next step and that step; a step of that time is the median of the gaps
    between the request's next messages. The batch changes, and steps with it, so that two median steps are
    less than two of the longest. `together`: the share of later tokens that came with the one before; without
    drafts, much of it means that the router or the client has not kept up."""

    step: float
    first_gap_p50: float
    first_gap_p99: float
    first_over_two_p99: float
    itl_p99: float
    itl_p999: float
    together: float
    # p50 and p99 of two stages of first gaps, as the router reports them over gRPC: from the first token to
    # the end of the handoff (`transfer`), and from there to the first token of decode (`first_step`).
    gap_parts: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        first = f"{self.first_gap_p50:.1f} and {self.first_gap_p99:.1f} ms"
        steps = [self.first_gap_p50, self.first_gap_p99, self.itl_p99, self.itl_p999]
        in_steps = [f"{value / self.step:.2f}" if self.step else "-" for value in steps]
        return (
            f"step {self.step:.2f} ms; first gap p50 and p99 {first}, {in_steps[0]} and {in_steps[1]} steps, "
            f"p99 over two steps of its time {self.first_over_two_p99:+.1f} ms; "
            f"ITL p99 and p99.9 {self.itl_p99:.1f} and {self.itl_p999:.1f} ms, {in_steps[2]} and "
            f"{in_steps[3]} steps; {self.together:.1%} of tokens with the one before{self._parts()}"
        )

    def _parts(self) -> str:
        if not self.gap_parts:
            return ""
        parts = [f"{part} {p50:.1f} and {p99:.1f}" for part, (p50, p99) in self.gap_parts.items()]
        return f"; of the first gap at the router, ms: {', '.join(parts)}"


def stream_figures(records: Iterable[Record]) -> StreamFigures | None:
    """Figures of all requests that were answered in full; None where none has three messages."""
    first, over, others = list[float](), list[float](), list[np.ndarray]()
    parts: dict[str, list[float]] = {part: [] for part in _GAP_PARTS}
    for record in records:
        if record.outcome == Outcome.OK and len(record.token_times) > 2:
            gaps = np.diff(record.token_times) * 1e3
            first.append(float(gaps[0]))
            others.append(gaps[1:])
            if (following := _between_messages(gaps[1:])[:_NEXT]).size:
                over.append(float(gaps[0] - 2 * np.median(following)))
            for part, seconds in (record.stages or {}).items():
                if part in parts:
                    parts[part].append(seconds * 1e3)
    if not over:
        return None
    itl = np.concatenate(others)
    between = _between_messages(itl)
    first_p50, first_p99 = _percentiles(first, 50, 99)
    itl_p99, itl_p999 = _percentiles(itl, 99, 99.9)
    return StreamFigures(
        step=float(np.median(between)),
        first_gap_p50=first_p50,
        first_gap_p99=first_p99,
        first_over_two_p99=float(np.percentile(over, 99)),
        itl_p99=itl_p99,
        itl_p999=itl_p999,
        together=1 - between.size / itl.size,
        gap_parts={part: _percentiles(found, 50, 99) for part, found in parts.items() if found},
    )


def _between_messages(gaps: np.ndarray) -> np.ndarray:
    return gaps[gaps >= _TOGETHER_MS]


def _percentiles(values: list[float] | np.ndarray, lower: float, upper: float) -> tuple[float, float]:
    low, high = np.percentile(values, (lower, upper))
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """A decode worker between its first and last sample: the mean rows and milliseconds of a step. `busy`:
    the share of time that steps took."""

    worker: str
    rows: float
    step_ms: float
    busy: float


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """A prefill worker between its first and last sample. `busy`: the share of time that steps took;
    `tokens_s`: prompt tokens a second of that time; `prompt_ms`: of that time, for each prompt."""

    worker: str
    busy: float
    tokens_s: float
    prompt_ms: float


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """`stages_ms`: the mean time of each stage, by the router's name of it. `predicted_prompt_ms`: for each
    prompt of the last minute, by the router; None where it says nothing."""

    predicted_prompt_ms: float | None = None
    prefill: list[PrefillTimes] = field(default_factory=list)
    decode: list[DecodeTimes] = field(default_factory=list)
    stages_ms: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        workers = [
            f"{one.worker} busy {one.busy:.1%}, {one.tokens_s:,.0f} tokens/s, {one.prompt_ms:.1f} ms a prompt"
            for one in self.prefill
        ]
        if self.predicted_prompt_ms is not None:
            workers.append(f"{self.predicted_prompt_ms:.1f} ms a prompt are predicted")
        workers += [
            f"{one.worker} busy {one.busy:.1%}, {one.rows:.1f} rows and {one.step_ms:.2f} ms a step"
            for one in self.decode
        ]
        stages = [f"{stage} {mean:.1f}" for stage, mean in self.stages_ms.items()]
        return "; ".join([*workers, f"stages, mean ms: {', '.join(stages) or '-'}"])

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def server_times(samples: Iterable[Sample]) -> ServerTimes:
    """Compares the first and the last sample of each source; empty for sources that are none of Baton's."""
    by_source: dict[str, list[Sample]] = {}
    for sample in samples:
        by_source.setdefault(sample.source, []).append(sample)
    ends = [found[-1].values for found in by_source.values()]
    requests, seconds = (sum(_total(values, name) for values in ends) for name in (_DEMAND, _DEMAND_S))
    times = ServerTimes(1e3 * seconds / requests if requests else None)
    for source, found in by_source.items():
        first, last = found[0], found[-1]
        grown = {name: value - first.values.get(name, 0.0) for name, value in last.values.items()}
        _add_stages(times, grown)
        if last.at > first.at:
            _add_worker(times, source, grown, last.at - first.at)
    return times


def _add_worker(times: ServerTimes, source: str, grown: dict[str, float], seconds: float) -> None:
    prefill_s, tokens, prompts = (_total(grown, key) for key in (_BUSY_S, _TOKENS, _PROMPTS))
    if prompts > 0 and prefill_s > 0:
        busy, each_ms = prefill_s / seconds, 1e3 * prefill_s / prompts
        times.prefill.append(PrefillTimes(source, busy, tokens / prefill_s, each_ms))
    steps, decode_s, decoded = (_total(grown, key) for key in (_STEPS, _STEP_S, _DECODED))
    if steps > 0 and decoded > 0:
        times.decode.append(DecodeTimes(source, decoded / steps, 1e3 * decode_s / steps, decode_s / seconds))


def _add_stages(times: ServerTimes, grown: dict[str, float]) -> None:
    for name, count in grown.items():
        if name.startswith(f"{_STAGE}_count") and count > 0:
            stage = name.partition("stage=")[2].rstrip("}").partition(",")[0]
            total = grown[name.replace(f"{_STAGE}_count", f"{_STAGE}_sum")]
            times.stages_ms[stage] = total / count * 1e3


def _total(values: Mapping[str, float], name: str) -> float:
    """Sum of a metric over all of its labels."""
    return sum(value for key, value in values.items() if key.partition("{")[0] == name)
