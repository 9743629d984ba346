"""A HorizontalPodAutoscaler as KEDA makes it, and the Prometheus that it asks.

The formula and its tolerance, both windows and the limits of a step are those of Kubernetes' documentation
("Horizontal Pod Autoscaling", autoscaling/v2). What it reads is a scrape old.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

SYNC_S = 15.0
SCRAPE_S = 15.0
TOLERANCE = 0.1
# Of scaling up: in each period so many pods, or so many times as many, whichever is more.
_UP_PODS, _UP_TIMES = 4, 2.0

Sample = dict[str, float]


class Scrapes:
    """Samples of the last minutes, by time."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Sample]] = deque(maxlen=64)

    def add(self, now: float, sample: Sample) -> None:
        """Adds a sample that was scraped."""
        self._samples.append((now, sample))

    def within(self, now: float, seconds: float) -> list[Sample]:
        """Samples of `seconds` seconds before the last one that is a scrape old, itself included."""
        known = [(at, sample) for at, sample in self._samples if at <= now - SCRAPE_S]
        return [sample for at, sample in known if at > known[-1][0] - seconds] if known else []

    def last(self, now: float, name: str) -> float:
        """The last scraped value of a metric."""
        return self.within(now, 1e-9)[-1][name]

    def sum_of_means(self, now: float, prefix: str, seconds: float) -> float:
        """The sum of `avg_over_time` of all series that there are now: each over the samples that it has."""
        found, total = self.within(now, seconds), 0.0
        for name in found[-1]:
            if name.startswith(prefix):
                values = [sample[name] for sample in found if name in sample]
                total += sum(values) / len(values)
        return total

    def least(self, now: float, name: str, seconds: float) -> float:
        """A value's minimum, as `min_over_time` has it."""
        return min(sample[name] for sample in self.within(now, seconds))


@dataclass(frozen=True)
class Trigger:
    """A value to be shared by pods, each of which should have `threshold` of it (AverageValue)."""

    read: Callable[[Scrapes, float], float]
    threshold: float


@dataclass
class Autoscaler:
    """A pod autoscaler. `stabilisation_s`: scaling down takes the highest number that was recommended in this
    time. `down_s`: time between two pods that are taken away."""

    triggers: Sequence[Trigger]
    least: int
    most: int
    replicas: int
    stabilisation_s: float = 600.0
    down_s: float = 120.0
    # Each change: time, and pods from then on.
    changes: list[tuple[float, int]] = field(default_factory=list)
    _recommended: deque[tuple[float, int]] = field(default_factory=deque)
    _last_down: float = -math.inf

    def sync(self, now: float, scrapes: Scrapes) -> int:
        """Reads the triggers and returns how many pods there should be."""
        if not scrapes.within(now, SCRAPE_S):
            return self.replicas
        if not self._recommended:  # as the controller does when it sees a target for the first time
            self._recommended.append((now, self.replicas))
        wanted = max(self._wanted(trigger, scrapes, now) for trigger in self.triggers)
        wanted = min(self.most, max(self.least, wanted))
        self._recommended.append((now, wanted))
        while self._recommended[0][0] < now - self.stabilisation_s:
            self._recommended.popleft()
        if wanted > self.replicas:
            self._set(now, min(wanted, max(self.replicas + _UP_PODS, int(self.replicas * _UP_TIMES))))
        elif (
            max(number for _, number in self._recommended) < self.replicas
            and now - self._last_down >= self.down_s
        ):
            self._last_down = now
            self._set(now, self.replicas - 1)
        return self.replicas

    def _wanted(self, trigger: Trigger, scrapes: Scrapes, now: float) -> int:
        value = trigger.read(scrapes, now)
        if abs(value / (trigger.threshold * self.replicas) - 1) <= TOLERANCE:
            return self.replicas
        return math.ceil(value / trigger.threshold - 1e-9)

    def _set(self, now: float, replicas: int) -> None:
        self.replicas = replicas
        self.changes.append((now, replicas))


def prefill_triggers(use: float) -> list[Trigger]:
    """The chart's triggers for prefill (`templates/_scaling.tpl`)."""
    return [
        Trigger(lambda seen, now: seen.last(now, "demand_prefill_seconds") / 60, use),
        _held("prefill"),
    ]


def decode_triggers(use: float) -> list[Trigger]:
    """The chart's triggers for decode workers."""

    def demand(seen: Scrapes, now: float) -> float:
        each = min(seen.last(now, f"decode_{what}_each") for what in ("slots", "blocks"))
        at_a_time = seen.last(now, "demand_requests") / 60 * seen.last(now, "decode_lasts")
        return max(seen.sum_of_means(now, "decode_running_", 300), at_a_time) / each

    return [Trigger(demand, use), _held("decode")]


def _held(role: str) -> Trigger:
    def held(seen: Scrapes, now: float) -> float:
        unserved = seen.last(now, "unserved_requests") + seen.least(now, "waiting_requests", 30)
        return seen.last(now, f"{role}_workers") * (unserved > 0)

    return Trigger(held, 1.0)


def former_prefill_triggers() -> list[Trigger]:
    """Triggers of chart 0.1.0: seconds of the prompts that wait at workers, 0.5 s for each."""
    return [Trigger(lambda seen, now: seen.last(now, "prefill_queued_seconds"), 0.5)]


def former_decode_triggers() -> list[Trigger]:
    """Triggers of chart 0.1.0: the share of used slots."""

    def used(seen: Scrapes, now: float) -> float:
        return seen.sum_of_means(now, "decode_running_", 1e-9) / seen.last(now, "decode_slots_each")

    return [Trigger(used, 0.8)]
