"""The fewest workers of each role that carry a load within its limits.

Prefill workers are a queue with as many servers; TTFT is the wait, the prompt's own time and what a cluster
adds. A decode worker's batch is as large as Little's law says (arrivals × output tokens × time of a step) and
fluctuates; TPOT is the time of a step at the batch that is seldom exceeded. A request misses when it misses
either limit, so each may be missed half as often as both together.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from baton.perf_model.profile import Profile
from loadgen.common.errors import LoadgenError
from loadgen.common.formatting import number
from loadgen.sizing.queueing import occupancy_quantile, wait_quantile

_MOST_WORKERS = 100_000


class Bound(StrEnum):
    """The bound that more requests on a decode worker would exceed; `BATCH` is the largest that was
    measured."""

    TPOT = "TPOT"
    KV_MEMORY = "memory"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and their limits. Lengths are means in tokens, limits seconds."""

    input_tokens: float
    output_tokens: float
    ttft_s: float
    tpot_s: float
    attainment: float
    prefix_hits: float = 0.0  # share of the prompt tokens that need not be computed
    input_variation: float = 0.0  # standard deviation of the prompts' length / mean

    @property
    def share(self) -> float:
        """The share of requests that must meet each of both limits for attainment of both."""
        return 1 - (1 - self.attainment) / 2


@dataclass(frozen=True, slots=True)
class Plan:
    """Workers for one arrival rate, and what they reach without the spare ones. Times are seconds."""

    rate: float
    prefill: int
    decode: int
    spare: int
    prefill_busy: float
    ttft_s: float
    batch: float
    tpot_s: float
    kv_gb_s: float  # sent by each prefill worker
    bound: Bound
    prefill_worker_gpus: int = 1
    decode_worker_gpus: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of all workers, spare ones included."""
        of_prefill = (self.prefill + self.spare) * self.prefill_worker_gpus
        return of_prefill + (self.decode + self.spare) * self.decode_worker_gpus


def plan(profile: Profile, load: Load, rate: float, spare: int = 0, decoding: Profile | None = None) -> Plan:
    """The fewest workers for `rate` requests a second, and `spare` more of each role. `decoding`: the profile
    of decode workers; None: `profile`, as for prefill workers. Raises LoadgenError where no number of workers
    meets the limits.
    """
    decoding = decoding or profile
    _feasible(profile, decoding, load)
    sent_s = rate * profile.transfer_s(load.input_tokens)
    prefill = _fewest(lambda count: sent_s <= count and ttft(profile, load, rate, count) <= load.ttft_s)
    decode = _fewest(lambda count: _bound(decoding, load, rate / count) is None)
    per_worker = rate / decode
    return Plan(
        rate=rate,
        prefill=prefill,
        decode=decode,
        spare=spare,
        prefill_busy=rate * _service_s(profile, load) / prefill,
        ttft_s=ttft(profile, load, rate, prefill),
        batch=mean_batch(decoding, load, per_worker),
        tpot_s=tpot(decoding, load, per_worker),
        kv_gb_s=rate * profile.transfer_bytes(load.input_tokens) / prefill / 1e9,
        bound=_next_bound(decoding, load, per_worker),
        prefill_worker_gpus=profile.worker_gpus,
        decode_worker_gpus=decoding.worker_gpus,
    )


def ttft(profile: Profile, load: Load, rate: float, workers: int) -> float:
    """TTFT in seconds that the needed share of requests does not exceed with `workers` prefill workers."""
    service = _service_s(profile, load)
    wait = wait_quantile(workers, rate, service, load.input_variation, load.share)
    return wait + service + profile.ttft_overhead_ms / 1e3


def mean_batch(profile: Profile, load: Load, rate: float) -> float:
    """Sequences that one decode worker has at `rate` requests a second on average; infinite where it cannot
    keep up with the largest batch that was measured.
    """
    tokens = load.output_tokens * rate

    def excess(batch: float) -> float:
        return tokens * _token_s(profile, load, batch) - batch

    low, high = 0.0, float(profile.max_batch)
    if excess(high) > 0:
        return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def tpot(profile: Profile, load: Load, rate: float) -> float:
    """TPOT in seconds that the needed share of requests does not exceed on a decode worker with this rate."""
    batch = _high_batch(profile, load, rate)
    return _token_s(profile, load, batch) if batch < math.inf else math.inf


def _high_batch(profile: Profile, load: Load, rate: float) -> float:
    mean = mean_batch(profile, load, rate)
    return max(1.0, occupancy_quantile(mean, load.share)) if mean < math.inf else math.inf


def _bound(profile: Profile, load: Load, rate: float) -> Bound | None:
    """The bound that a decode worker with this rate exceeds; None if it meets all limits."""
    batch = _high_batch(profile, load, rate)
    within = min(batch, float(profile.max_batch))
    if _token_s(profile, load, within) > load.tpot_s:
        return Bound.TPOT
    if not profile.holds(within * (load.input_tokens + load.output_tokens)):
        return Bound.KV_MEMORY
    return Bound.BATCH if batch > profile.max_batch else None


def _next_bound(profile: Profile, load: Load, rate: float) -> Bound:
    """The bound that a decode worker exceeds first as its rate grows from this one."""
    while (bound := _bound(profile, load, rate)) is None:
        rate *= 1.02
    return bound


def _service_s(profile: Profile, load: Load) -> float:
    return profile.costs.prompt_s(load.input_tokens * (1 - load.prefix_hits))


def _token_s(profile: Profile, load: Load, batch: float) -> float:
    """Seconds from one token to the next in a cluster, of sequences of mean length."""
    context = load.input_tokens + load.output_tokens / 2
    return profile.costs.token_s(batch, batch * context) * profile.tpot_factor


def _feasible(profile: Profile, decoding: Profile, load: Load) -> None:
    """Raises LoadgenError where even an idle cluster misses a limit."""
    alone = _service_s(profile, load) + profile.ttft_overhead_ms / 1e3
    if alone > load.ttft_s:
        tokens = number(load.input_tokens * (1 - load.prefix_hits), 4)
        raise LoadgenError(
            f"no number of workers reaches ttft:{load.ttft_s * 1e3:g}: a prompt with {tokens} tokens to "
            f"compute takes {number(alone * 1e3)} ms alone"
        )
    token = _token_s(decoding, load, 1)
    if token > load.tpot_s:
        raise LoadgenError(
            f"no number of workers reaches tpot:{load.tpot_s * 1e3:g}: a token of one sequence alone takes "
            f"{number(token * 1e3)} ms"
        )
    if not decoding.holds(load.input_tokens + load.output_tokens):
        raise LoadgenError(f"one sequence takes more than the {decoding.kv_gb:g} GB of KV memory")


def _fewest(enough: Callable[[int], bool]) -> int:
    """The smallest number of workers with which `enough` is true; it stays true for more of them."""
    high = 1
    while not enough(high):
        high *= 2
        if high > _MOST_WORKERS:
            raise LoadgenError(f"the load needs more than {_MOST_WORKERS:,} workers of a role")
    return bisect_left(range(1, high + 1), True, key=enough) + 1
