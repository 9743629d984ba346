"""Which worker holds the others up, and why: the one whose steps or queue stand out among its peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from rich.text import Text

from baton.cli.status.view import decodes, name_of, prefills
from baton.v1 import admin_pb2

# How far above its peers a figure must be to be news: times their median, and at least so much more.
_TIMES = 1.5
_STEP_MS_MORE = 1.0
_QUEUE_MORE = 512
# A worker without peers is compared with itself.
_P99_TIMES = 4.0
_ENOUGH_STEPS = 20

_DECODE_REASON = "its decode steps take {:.1f} ms, its peers' {:.1f}"
_PREFILL_REASON = "it takes {:.1f} ms for 100 prompt tokens, its peers {:.1f}"
_QUEUE_REASON = "{:.0f} prompt tokens wait for it, for its peers {:.0f}"

Worker = admin_pb2.WorkerStatus


@dataclass(frozen=True, slots=True)
class Slow:
    """The worker, why, and how many times worse than its peers it is."""

    name: str
    reason: str
    times: float

    def line(self) -> Text:
        return Text.assemble(("slow: ", "yellow"), (self.name, "bold yellow"), f": {self.reason}")


def slow_worker(workers: list[Worker]) -> Slow | None:
    """The one that stands out most; None where all are alike."""
    ready = [worker for worker in workers if worker.state == admin_pb2.WORKER_STATE_READY]
    able = [worker for worker in ready if prefills(worker)]
    decoding = [w for w in ready if decodes(w) and w.worker.audit.recent_decode.steps]
    prefilling = [w for w in able if w.worker.audit.recent_prefill.tokens]
    found = [
        *_above_peers(decoding, _decode_ms, _STEP_MS_MORE, _DECODE_REASON),
        *_above_peers(prefilling, _prefill_ms, _STEP_MS_MORE, _PREFILL_REASON),
        *_above_peers(able, _queued, _QUEUE_MORE, _QUEUE_REASON),
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
    steps = worker.worker.audit.recent_decode
    times = steps.p99_ms / steps.mean_ms if steps.mean_ms else 0.0
    if steps.steps < _ENOUGH_STEPS or times < _P99_TIMES or steps.p99_ms - steps.mean_ms < _STEP_MS_MORE:
        return []
    reason = f"one decode step in a hundred takes {steps.p99_ms:.1f} ms, the mean is {steps.mean_ms:.1f}"
    return [Slow(name_of(worker), reason, times)]


def _decode_ms(worker: Worker) -> float:
    return worker.worker.audit.recent_decode.mean_ms


def _prefill_ms(worker: Worker) -> float:
    steps = worker.worker.audit.recent_prefill
    return 100 * steps.mean_ms * steps.steps / steps.tokens


def _queued(worker: Worker) -> float:
    return float(max(worker.queued_tokens, worker.worker.audit.load.queued_prefill_tokens))
