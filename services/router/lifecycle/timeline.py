"""When a request reached each stage and what it used: the source of its trace, its metrics and its log
line."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from baton.v1.router_pb2 import RequestTrace, Stage, StageTime
from services.router.lifecycle.observations import Ended

if TYPE_CHECKING:
    from baton.v1.router_pb2 import Usage
    from services.router.lifecycle.observations import Observations
    from services.router.request.request import Request


class RequestTimeline:
    """One request's. All times are in nanoseconds since the request arrived."""

    def __init__(self, request: Request, observations: Observations) -> None:
        self._request = request
        self._observations = observations
        self._stages: dict[Stage.ValueType, int] = {}
        # When a pair of workers first had room for it, and when tokens were last delivered.
        self._placed_ns: int | None = None
        self._delivered_ns: int | None = None
        self._prefill_worker = self._decode_worker = ""
        # KV bytes that the handoffs of ended attempts moved.
        self.kv_bytes_shipped = 0
        # The part of the last handoff that no computation hid (`HandedOff.exposed_ns`).
        self.handoff_exposed_ns = 0

    def mark(self, stage: Stage.ValueType) -> None:
        """Records when a stage was reached; later calls for it change nothing."""
        self._stages.setdefault(stage, self._elapsed_ns())

    def has_reached(self, stage: Stage.ValueType) -> bool:
        return stage in self._stages

    def placed(self, prefill_worker: str, decode_worker: str = "") -> None:
        """Records the workers of the attempt that begins, and when the first one began."""
        self._prefill_worker, self._decode_worker = prefill_worker, decode_worker
        if decode_worker and self._placed_ns is None:
            self._placed_ns = self._elapsed_ns()

    def delivered(self, tokens: int) -> None:
        """Records that so many tokens were delivered together."""
        since = self._delivered_ns
        self._delivered_ns = self._elapsed_ns()
        self._observations.delivered(tokens, None if since is None else self._delivered_ns - since)

    def trace(self, attempts: int) -> RequestTrace:
        """What the client is told with its last delta."""
        return RequestTrace(
            prefill_worker=self._prefill_worker,
            decode_worker=self._decode_worker,
            attempts=attempts,
            kv_bytes_shipped=self.kv_bytes_shipped,
            seed=self._request.sampling.seed,
            stages=[StageTime(stage=stage, offset_ns=at) for stage, at in sorted(self._stages.items())],
            handoff_exposed_ns=self.handoff_exposed_ns,
        )

    def end(self, outcome: str, usage: Usage, attempts: int) -> None:
        """Counts and logs the request. `outcome`: a finish reason or kind of error in lower case, or
        "cancelled"."""
        self._observations.ended(
            Ended(
                request_id=self._request.id,
                outcome=outcome,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                attempts=attempts,
                kv_bytes_shipped=self.kv_bytes_shipped,
                prefill_worker=self._prefill_worker,
                decode_worker=self._decode_worker,
                reached=self._stages,
                placed_ns=self._placed_ns,
                last_token_ns=self._delivered_ns,
                ended_ns=self._elapsed_ns(),
            )
        )

    def _elapsed_ns(self) -> int:
        return time.monotonic_ns() - self._request.arrived_ns
