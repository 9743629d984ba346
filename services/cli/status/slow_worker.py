"""Finds a slow worker: the one whose step times or queue exceed those of its peers the most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from rich.text import Text

from baton.v1 import admin_pb2
from services.cli.status.view import decodes, name_of, prefills, queued

# A figure counts if it is this many times the median of the peers, and exceeds it by at least this much.
_TIMES = 1.5
_STEP_MS_MORE = 1.0
_QUEUE_MORE = 512
# A worker without peers: its p99 against its mean.
_P99_TIMES = 4.0
_ENOUGH_STEPS = 20

_DECODE_REASON = "decode steps take {:.1f} ms, {:.1f} ms on its peers"
_PREFILL_REASON = "100 prompt tokens take {:.1f} ms, {:.1f} ms on its peers"
_QUEUE_REASON = "{:.0f} prompt tokens are queued, {:.0f} on its peers"

Worker = admin_pb2.WorkerStatus


@dataclass(frozen=True, slots=True)
class Slow:
    """A slow worker, the reason, and its figure as a multiple of its peers' median."""

    name: str
    reason: str
    times: float

    def line(self) -> Text:
        return Text.assemble(("slow: ", "yellow"), (self.name, "bold yellow"), f": {self.reason}")


def slow_worker(workers: list[Worker]) -> Slow | None:
    """The slowest worker, or None where no one exceeds the thresholds."""
    ready = [worker for worker in workers if worker.state == admin_pb2.WORKER_STATE_READY]
    able = [worker for worker in ready if prefills(worker)]
    decoding = [w for w in ready if decodes(w) and w.worker.report.recent_decode.steps]
    prefilling = [w for w in able if w.worker.report.recent_prefill.tokens]
    found = [
        *_above_peers(decoding, _decode_ms, _STEP_MS_MORE, _DECODE_REASON),
        *_above_peers(prefilling, _prefill_ms, _STEP_MS_MORE, _PREFILL_REASON),
        *_above_peers(able, queued, _QUEUE_MORE, _QUEUE_REASON),
    ]
    if len(decoding) == 1:
        found += _uneven(decoding[0])
    return max(found, key=lambda slow: slow.times, default=None)


def _above_peers(
    workers: list[Worker], figure: Callable[[Worker], float], more: float, reason: str
) -> list[Slow]:
    found = []
    for worker in workers:
        others = [figure(other) for other in workers if other is not worker]
        if not others:
            continue
        mine, usual = figure(worker), median(others)
        if mine >= _TIMES * usual and mine - usual >= more:
            times = mine / usual if usual else float("inf")
            found.append(Slow(name_of(worker), reason.format(mine, usual), times))
    return found


def _uneven(worker: Worker) -> list[Slow]:
    steps = worker.worker.report.recent_decode
    times = steps.p99_ms / steps.mean_ms if steps.mean_ms else 0.0
    if steps.steps < _ENOUGH_STEPS or times < _P99_TIMES or steps.p99_ms - steps.mean_ms < _STEP_MS_MORE:
        return []
    reason = f"p99 of its decode steps is {steps.p99_ms:.1f} ms, the mean {steps.mean_ms:.1f} ms"
    return [Slow(name_of(worker), reason, times)]


def _decode_ms(worker: Worker) -> float:
    return worker.worker.report.recent_decode.mean_ms


def _prefill_ms(worker: Worker) -> float:
    steps = worker.worker.report.recent_prefill
    return 100 * steps.mean_ms * steps.steps / steps.tokens
