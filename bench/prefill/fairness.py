"""Prompts in a worker's steps: long ones one at a time, or short ones alongside a long one and the effect on
each other. Torch is imported with the engine.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baton.device.streams.cuda_stream import compute_stream
from baton.engine.memory.block_pools import BlockPools
from baton.engine.model.tensors import busy_rows, half_context
from baton.engine.plan.prefill_scheduler import PrefillScheduler, StepBounds
from baton.perf_model.prefill_fit import PrefillFit
from bench.case import PrefillCase
from bench.engine_driver import prompt_executor
from bench.options import show
from bench.prefill.engine import PrefillEngine
from bench.prefill.traffic import Load, Served, Step, StepLog, Traffic
from bench.shapes import Precision
from services.common.config.worker import EngineConfig

# Offered load, as a share of what the engine sustains of short prompts alone.
SHARE = 0.3
# Prompts of a closed loop that keep an engine busy, and how many rounds of them are run.
USERS, ROUNDS = 16, 8
# None is refused, however long they wait.
_QUEUE = 100_000
# How long a long prompt is looked at alone; short ones beside it for that and so many times their own time.
_LONG_ALONE_S, _MOST_OF_EXPECTED = 15.0, 1.2
# A long prompt is divided into so many parts, whose steps are reported separately.
_DEPTHS = 5


class RealTime:
    """Reads the host's clock, and sleeps."""

    def now(self) -> float:
        return time.perf_counter()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


class WatchedCost(PrefillFit):
    """Records the duration of steps."""

    def __init__(self, half_context: float, least_rows: int, log: Callable[[float], None]) -> None:
        super().__init__(half_context, least_rows)
        self._log = log

    def took(
        self, chunks: Sequence[tuple[int, int]], seconds: float, *, mixed: bool = False, decode_s: float = 0.0
    ) -> None:
        self._log(seconds)
        super().took(chunks, seconds, mixed=mixed, decode_s=decode_s)


class WatchedPass:
    """Records the chunks of each step, and the host's time to launch it."""

    def __init__(self, inner: Any, log: StepLog, now: Callable[[], float]) -> None:
        self._inner, self._log, self._now = inner, log, now
        self.alignment, self.refused = inner.alignment, inner.refused
        self.uncaptured, self.timed_passes = inner.uncaptured, inner.timed_passes
        self.row_times, self.graph_rows = inner.row_times, inner.graph_rows

    def forward(self, step: Any, joined: Any = None) -> Any:
        self._log.record_step(step)
        begun = self._now()
        hidden = self._inner.forward(step, joined)
        self._log.host.append(self._now() - begun)
        return hidden

    def logits(self, hidden: Any) -> Any:
        return self._inner.logits(hidden)


def run_fairness(arguments: argparse.Namespace, folder: Path) -> None:
    """Prints a line per step budget: the first is also measured alone, and the others are compared with
    that."""
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    config = EngineConfig()
    chunk_tokens = arguments.chunk_tokens or config.chunk_tokens_on(arguments.device)
    precision = Precision(arguments.dtype, kv_dtype=arguments.kv_dtype)
    case = PrefillCase(arguments.shape, precision, 1, arguments.long, chunk_tokens)
    engine = PrefillEngine([case], arguments.device, folder, graphs=not arguments.no_graphs)
    engine.report_ready()
    gc.collect()
    gc.freeze()  # as an engine does: a look at all that was loaded would hold up a step for 80 ms
    age_cap_s = config.prefill_age_cap_ms / 1e3
    alone: dict[str, Any] = {}
    budgets = [float(ms) for ms in arguments.step_ms.split(",")] if arguments.step_ms else [None]
    for budget in budgets:
        step_ms = config.prefill_step_ms if budget is None else budget
        alone_s = config.prefill_alone_step_ms_on(arguments.device) / 1e3
        bounds = StepBounds(chunk_tokens, step_ms / 1e3, age_cap_s, engine.prompt_pass.alignment, alone_s)
        fair = Fairness(
            traffic(engine, bounds), arguments.short, arguments.long, arguments.count, arguments.seed
        )
        alone = alone or fair.alone()
        settings = {
            "shape": arguments.shape, "dtype": arguments.dtype, "step_ms": step_ms,
            "chunk_tokens": chunk_tokens, "short": arguments.short, "long": arguments.long,
        }  # fmt: skip
        show(settings | alone | fair.beside(alone), arguments.json)


def traffic(engine: PrefillEngine, bounds: StepBounds) -> Traffic:
    """A loop with a worker's settings, without handoffs and prefix cache."""
    decoder = engine.decoder
    pools = BlockPools(decoder.layout, [engine.blocks] * len(decoder.layout.groups))
    least = busy_rows(decoder.config, decoder.device.type)
    cost = WatchedCost(half_context(decoder.config), least, lambda seconds: log.took(seconds))
    if engine.prompt_pass.timed_passes is not None:
        cost.begin(*engine.prompt_pass.timed_passes)
    log = StepLog(cost)
    scheduler = PrefillScheduler(pools, bounds, max_sequences=_QUEUE, cost=cost)
    clock = RealTime()
    executor = prompt_executor(
        WatchedPass(engine.prompt_pass, log, clock.now), scheduler, compute_stream(decoder.device), clock.now
    )
    return Traffic(executor, log, clock, lambda count: engine.token_ids(count, engine.fresh_seed()))


class Fairness:
    """The loads of one step budget, and their figures."""

    def __init__(self, traffic: Traffic, short: int, long: int, count: int, seed: int) -> None:
        self._traffic = traffic
        self._short, self._long, self._count, self._seed = short, long, count, seed

    def alone(self) -> dict[str, Any]:
        """Runs the long prompt alone first; then measures the sustained rate of short ones, and runs short
        ones at a share of it."""
        long = self._traffic.run(Load(self._short, 0, long=self._long, seconds=_LONG_ALONE_S))
        after_long = learned(self._traffic.cost)
        self._traffic.run(Load(self._short, 2 * USERS, users=USERS))
        most = self._traffic.run(Load(self._short, ROUNDS * USERS, users=USERS))
        tokens_s = most.tokens / most.seconds
        rate = SHARE * tokens_s / self._short
        short = self._traffic.run(Load(self._short, self._count, rate=rate, seed=self._seed))
        return {
            "sustained_tok_s": round(tokens_s),
            "rate": round(rate, 2),
            **waits("alone", short),
            "long_alone_ms": _ms(max(long.long, default=long.seconds * self._long / max(1, long.reached))),
            "long_alone_by_depth": by_depth(long.steps, self._long),
            "long_alone_cost": after_long,
            "alone_cost": learned(self._traffic.cost),
        }

    def beside(self, alone: dict[str, Any]) -> dict[str, Any]:
        """The same short prompts with a long one running all the time."""
        rate = alone["rate"]
        seconds = _MOST_OF_EXPECTED * self._count / rate + _LONG_ALONE_S
        load = Load(self._short, self._count, rate, long=self._long, seconds=seconds, seed=self._seed)
        seen = self._traffic.run(load)
        found = waits("beside", seen)
        return {
            **found,
            "ratio_p99": round(found["beside_p99_ms"] / alone["alone_p99_ms"], 2),
            "counted": len(seen.short),
            "unserved": seen.unserved,
            "long_ms": [_ms(took) for took in seen.long],
            "long_reached": seen.reached,
            "long_ratio": round(_ms(max(seen.long)) / alone["long_alone_ms"], 2) if seen.long else None,
            **errors(seen.steps),
            "by_depth": by_depth(seen.steps, self._long),
            "cost": learned(self._traffic.cost),
        }


def waits(name: str, seen: Served) -> dict[str, float]:
    """Percentiles of the short prompts' times to first token, and of the host's time per step."""
    points = {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    found = {f"{name}_{key}_ms": _ms(np.percentile(seen.short, point)) for key, point in points.items()}
    host = {"host_p50_ms": 50, "host_max_ms": 100}
    return found | {f"{name}_{key}": _ms(np.percentile(seen.host, point)) for key, point in host.items()}


def learned(cost: PrefillFit) -> dict[str, float]:
    """Figures that the cost model has learned so far: a row's time, how slow attention is, the rows of the
    shortest step."""
    return {
        "unit_us": round(cost.unit_s * 1e6, 2),
        "attention_slowness": round(cost.attention, 2),
        "least_rows": cost.least_rows,
    }


def errors(steps: Iterable[Step]) -> dict[str, float]:
    """Prediction error of step times, in percent of the measured time."""
    off = [(step.predicted / step.measured - 1) * 100 for step in steps if step.predicted and step.measured]
    if not off:
        return {}
    return {
        "step_error_p50": round(float(np.median(np.abs(off))), 1),
        "step_error_p99": round(float(np.percentile(np.abs(off), 99)), 1),
        "step_error_mean": round(float(np.mean(off)), 1),
    }


def by_depth(steps: Iterable[Step], long: int) -> list[dict[str, float]]:
    """Steps by progress of the long prompt: their number and medians."""
    parts: dict[int, list[Step]] = {}
    for step in steps:
        parts.setdefault(step.depth * _DEPTHS // long, []).append(step)
    return [
        {
            "from": part * long // _DEPTHS,
            "steps": len(found),
            "rows": round(float(np.median([step.rows for step in found]))),
            "predicted_ms": _ms(np.median([step.predicted for step in found])),
            "measured_ms": _ms(np.median([step.measured for step in found])),
            "measured_max_ms": _ms(max(step.measured for step in found)),
        }
        for part, found in sorted(parts.items())
    ]


def _ms(seconds: float | np.floating[Any]) -> float:
    return round(float(seconds) * 1e3, 2)


# Between two prompts: less than what a worker takes for "lately".
_PAUSE_S = 0.02


def run_alone(arguments: argparse.Namespace, folder: Path) -> None:
    """Prints a line per bound of a step and number of tokens: time to first token and the steps' rows."""
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    config = EngineConfig()
    chunk_tokens = arguments.chunk_tokens or config.chunk_tokens_on(arguments.device)
    lengths = sorted({tokens for _, tokens in arguments.prompts})
    precision = Precision(arguments.dtype, kv_dtype=arguments.kv_dtype)
    case = PrefillCase(arguments.shape, precision, 1, lengths[-1], chunk_tokens)
    engine = PrefillEngine([case], arguments.device, folder, graphs=not arguments.no_graphs)
    engine.report_ready()
    step_s, age_cap_s = config.prefill_step_ms / 1e3, config.prefill_age_cap_ms / 1e3
    default_ms = config.prefill_alone_step_ms_on(arguments.device)
    for alone_ms in [float(ms) for ms in (arguments.step_ms or str(default_ms)).split(",")]:
        bounds = StepBounds(
            chunk_tokens, step_s, age_cap_s, engine.prompt_pass.alignment, alone_seconds=alone_ms / 1e3
        )
        prompts = traffic(engine, bounds)
        for tokens in lengths:
            settings = {"shape": arguments.shape, "chunk_tokens": chunk_tokens, "alone_step_ms": alone_ms}
            found = one_at_a_time(prompts, tokens, arguments.repeats)
            show({**settings, "tokens": tokens, **found}, arguments.json)


def one_at_a_time(prompts: Traffic, tokens: int, repeats: int) -> dict[str, Any]:
    """Times of `repeats` prompts after one that is not counted."""
    took, device, rows = [], [], []
    for _ in range(1 + repeats):
        served = prompts.run(Load(tokens, 1, users=1))
        prompts.wait(_PAUSE_S)
        took.append(served.short[0])
        device.append(sum(step.measured for step in served.steps))
        rows = [step.rows for step in served.steps]
    return {
        "ttft_p50_ms": round(float(np.median(took[1:])) * 1e3, 2),
        "ttft_max_ms": round(max(took[1:]) * 1e3, 2),
        "device_p50_ms": round(float(np.median(device[1:])) * 1e3, 2),
        "last_rows": rows,
    }
