"""What the router has counted of its requests: plain numbers, written where a request shows tokens or ends.

`metrics.py` and `status.py` read them; the logic that writes them knows neither.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from baton.v1.router_pb2 import Stage
from services.common.observability.histogram import Histogram, tokens_histogram
from services.common.observability.logs import get_log
from services.router.request.request import Finish

if TYPE_CHECKING:
    from collections.abc import Mapping

    from baton.errors import ErrorKind

# How a request ended whose client left or cancelled.
CANCELLED = "cancelled"
_WELL = (*(finish.name.lower() for finish in Finish), CANCELLED)

# The times between two moments of a request's life.
STAGES = ("intake", "queue", "reserve", "prefill", "handoff", "decode")
LATENCIES = ("ttft", "tpot", "itl", "e2e")

_log = get_log("request")


@dataclass(frozen=True)
class Ended:
    """A request at its end, however it came."""

    request_id: bytes
    # The finish reason or the kind of error, in lower case, or CANCELLED.
    outcome: str
    prompt_tokens: int
    completion_tokens: int
    # Of the prompt's, those that prefill found in its cache.
    cached_tokens: int
    attempts: int
    kv_bytes_shipped: int
    prefill_worker: str
    decode_worker: str
    # Nanoseconds since it arrived; `placed_ns`: a pair first had room for it.
    reached: Mapping[Stage.ValueType, int]
    placed_ns: int | None
    last_token_ns: int | None
    ended_ns: int

    @property
    def stage(self) -> str:
        """The stage it was in when it ended, in the words of `Stage`: RESERVED from the moment a pair has
        room until prefill has it."""
        last = max(self.reached, default=Stage.STAGE_UNSPECIFIED)
        if last == Stage.STAGE_ADMITTED and self.placed_ns is not None:
            last = Stage.STAGE_RESERVED
        return Stage.Name(last).removeprefix("STAGE_").lower()

    @property
    def failed(self) -> bool:
        """Whether it ended in an error of ours or of its own making."""
        return self.outcome not in _WELL

    def stages_s(self) -> dict[str, float]:
        """Seconds of each stage it went through."""
        reached, end = self.reached, self.ended_ns
        admitted, handed_off = reached.get(Stage.STAGE_ADMITTED), reached.get(Stage.STAGE_HANDED_OFF)
        prefilling, first = reached.get(Stage.STAGE_PREFILLING), reached.get(Stage.STAGE_FIRST_TOKEN)
        spans = {
            "intake": (0, admitted),
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
        """What its client waited: all, to the first token, and for each token after it."""
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
    """One router's; all counts are since its start."""

    stages: dict[str, Histogram] = field(default_factory=lambda: _seconds(STAGES))
    latencies: dict[str, Histogram] = field(default_factory=lambda: _seconds(LATENCIES))
    prompt_lengths: Histogram = field(default_factory=tokens_histogram)
    completion_lengths: Histogram = field(default_factory=tokens_histogram)
    # By how they ended, those refused before they ran included.
    outcomes: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(_WELL, 0)))
    errors: int = 0
    attempts: int = 0
    failed_attempts: Counter[str] = field(default_factory=Counter)
    # Of requests that ran; output as it is shown, not only once it has ended.
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    messages: int = 0

    def shown(self, tokens: int, since_ns: int | None) -> int:
        """A message's tokens go to a client; `since_ns` is when the message before did. Returns now."""
        now = time.monotonic_ns()
        self.messages += 1
        self.completion_tokens += tokens
        if since_ns is not None:
            self.latencies["itl"].observe((now - since_ns) / 1e9)
        return now

    def attempt_failed(self, kind: ErrorKind) -> None:
        """Another attempt may follow, or the request fails."""
        self.failed_attempts[kind.name.lower()] += 1

    def refused(self, kind: ErrorKind) -> None:
        """A request was not admitted: it ended before it ran."""
        self.outcomes[kind.name.lower()] += 1
        self.errors += 1

    def ended(self, ended: Ended) -> None:
        """Counts a request that ran, and logs it: ids, counts and times, never what was said."""
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
