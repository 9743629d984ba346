"""What the servers of a run said of themselves meanwhile: how busy prefill was, how many rows decode's steps
had and how long they took, how long the stages of a request took. From the samples that loadgen takes every
second of their metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from loadgen.common.server_samples import Sample

_STAGE = "baton_router_stage_seconds"
_BUSY_S, _TOKENS, _PROMPTS = (
    f"baton_worker_{name}_total" for name in ("prefill_step_seconds", "prompt_tokens", "prompts")
)
_STEPS, _STEP_S, _DECODED = (
    f"baton_worker_{name}_total" for name in ("decode_steps", "decode_step_seconds", "decoded_tokens")
)


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Of one worker between its first and last sample: the mean rows and milliseconds of a step. `busy`: the
    share of time that steps took."""

    worker: str
    rows: float
    step_ms: float
    busy: float


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """Of one worker between its first and last sample. `busy`: the share of time that steps took; `tokens_s`:
    prompt tokens a second of that time."""

    worker: str
    busy: float
    tokens_s: float


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """`stages_ms`: the mean time of each stage, by the router's name of it."""

    prefill: list[PrefillTimes] = field(default_factory=list)
    decode: list[DecodeTimes] = field(default_factory=list)
    stages_ms: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        workers = [f"{one.worker} busy {one.busy:.1%}, {one.tokens_s:,.0f} tokens/s" for one in self.prefill]
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
    times = ServerTimes()
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
        times.prefill.append(PrefillTimes(source, prefill_s / seconds, tokens / prefill_s))
    steps, decode_s, decoded = (_total(grown, key) for key in (_STEPS, _STEP_S, _DECODED))
    if steps > 0 and decoded > 0:
        times.decode.append(DecodeTimes(source, decoded / steps, 1e3 * decode_s / steps, decode_s / seconds))


def _add_stages(times: ServerTimes, grown: dict[str, float]) -> None:
    for name, count in grown.items():
        if name.startswith(f"{_STAGE}_count") and count > 0:
            stage = name.partition("stage=")[2].rstrip("}").partition(",")[0]
            total = grown[name.replace(f"{_STAGE}_count", f"{_STAGE}_sum")]
            times.stages_ms[stage] = total / count * 1e3


def _total(grown: dict[str, float], name: str) -> float:
    """Of a metric whose labels differ, the sum."""
    return sum(value for key, value in grown.items() if key.partition("{")[0] == name)
