"""Counts and latencies of this router's requests, as plain numbers.

Updated when a request delivers tokens or ends; `observability` reads them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.v1.router_pb2 import Stage
from services.common.histogram import Histogram, tokens_histogram
from services.common.logs import get_log
from services.router.request.request import Finish

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.errors import ErrorKind

# The outcome of a request whose client disconnected or cancelled.
CANCELLED = "cancelled"
_NOT_ERRORS = (*(finish.name.lower() for finish in Finish), CANCELLED)

# The stages that a request's time is divided into, and the latencies that its client sees.
STAGES = ("admission", "queue", "reserve", "prefill", "handoff", "decode")
LATENCIES = ("ttft", "tpot", "itl", "e2e")

_log = get_log("request")


@dataclass(frozen=True)
class Ended:
    """The record of a request that has ended."""

    request_id: bytes
    # The finish reason or the kind of error, in lower case, or CANCELLED.
    outcome: str
    prompt_tokens: int
    completion_tokens: int
    # Prompt tokens that prefill found in its prefix cache.
    cached_tokens: int
    attempts: int
    kv_bytes_shipped: int
    prefill_worker: str
    decode_worker: str
    # In nanoseconds since it arrived: each stage, when a pair of workers first had room, its end.
    reached: Mapping[Stage.ValueType, int]
    placed_ns: int | None
    last_token_ns: int | None
    ended_ns: int

    @property
    def stage(self) -> str:
        """The stage in which it ended, as `Stage` names it. A pair with room counts as RESERVED."""
        last = max(self.reached, default=Stage.STAGE_UNSPECIFIED)
        if last == Stage.STAGE_ADMITTED and self.placed_ns is not None:
            last = Stage.STAGE_RESERVED
        return Stage.Name(last).removeprefix("STAGE_").lower()

    @property
    def failed(self) -> bool:
        """Whether it ended in an error, the client's or the cluster's."""
        return self.outcome not in _NOT_ERRORS

    def stages_s(self) -> dict[str, float]:
        """Seconds that it spent in each stage."""
        reached, end = self.reached, self.ended_ns
        admitted, handed_off = reached.get(Stage.STAGE_ADMITTED), reached.get(Stage.STAGE_HANDED_OFF)
        prefilling, first = reached.get(Stage.STAGE_PREFILLING), reached.get(Stage.STAGE_FIRST_TOKEN)
        spans = {
            "admission": (0, admitted),
            "queue": (admitted, self.placed_ns),
            "reserve": (self.placed_ns, reached.get(Stage.STAGE_RESERVED)),
            "prefill": (prefilling, first),
            "handoff": (first, handed_off),
            "decode": (handed_off, end),
        }
        return {
            stage: (until - since) / 1e9
            for stage, (since, until) in spans.items()
            if since is not None and until is not None and until >= since
        }

    def latencies_s(self) -> dict[str, float]:
        """End to end, to the first token (TTFT), and a token after it (TPOT), in seconds."""
        latencies = {"e2e": self.ended_ns / 1e9}
        first, last = self.reached.get(Stage.STAGE_FIRST_TOKEN), self.last_token_ns
        if first is not None:
            latencies["ttft"] = first / 1e9
            if last is not None and self.completion_tokens > 1:
                latencies["tpot"] = (last - first) / 1e9 / (self.completion_tokens - 1)
        return latencies


def _seconds(names: tuple[str, ...]) -> dict[str, Histogram]:
    return {name: Histogram() for name in names}


@dataclass
class Observations:
    """One router's. All counts are since its start."""

    stages: dict[str, Histogram] = field(default_factory=lambda: _seconds(STAGES))
    latencies: dict[str, Histogram] = field(default_factory=lambda: _seconds(LATENCIES))
    prompt_lengths: Histogram = field(default_factory=tokens_histogram)
    completion_lengths: Histogram = field(default_factory=tokens_histogram)
    # By finish reason or kind of error; includes requests that were not admitted.
    outcomes: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_NOT_ERRORS, 0)))
    errors: int = 0
    attempts: int = 0
    failed_attempts: Counter[str] = field(default_factory=Counter)
    # Of requests that ran. Output counts as it is delivered, the prompt when the request ends.
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    batches: int = 0

    def delivered(self, tokens: int, gap_ns: int | None) -> None:
        """A batch of tokens goes to a client, `gap_ns` after the batch before it."""
        self.batches += 1
        self.completion_tokens += tokens
        if gap_ns is not None:
            self.latencies["itl"].observe(gap_ns / 1e9)

    def attempt_failed(self, kind: ErrorKind) -> None:
        """An attempt failed; another one may follow."""
        self.failed_attempts[kind.name.lower()] += 1

    def refused(self, kind: ErrorKind) -> None:
        """A request was not admitted."""
        self.outcomes[kind.name.lower()] += 1
        self.errors += 1

    def ended(self, ended: Ended) -> None:
        """Counts and logs a request that ran: ids, counts and times, no content."""
        stages, latencies = ended.stages_s(), ended.latencies_s()
        for name, seconds in stages.items():
            self.stages[name].observe(seconds)
        for name, seconds in latencies.items():
            self.latencies[name].observe(seconds)
        self.prompt_lengths.observe(ended.prompt_tokens)
        self.completion_lengths.observe(ended.completion_tokens)
        self.prompt_tokens += ended.prompt_tokens
        self.cached_tokens += ended.cached_tokens
        self.outcomes[ended.outcome] += 1
        self.errors += ended.failed
        self.attempts += ended.attempts
        milliseconds = {f"{name}_ms": round(s * 1e3, 3) for name, s in (stages | latencies).items()}
        _log.info(
            "request_ended",
            request=ended.request_id.hex(),
            outcome=ended.outcome,
            stage=ended.stage,
            prompt_tokens=ended.prompt_tokens,
            completion_tokens=ended.completion_tokens,
            cached_tokens=ended.cached_tokens,
            attempts=ended.attempts,
            prefill=ended.prefill_worker,
            decode=ended.decode_worker,
            kv_bytes=ended.kv_bytes_shipped,
            **milliseconds,
        )
