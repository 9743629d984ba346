"""Times at which a request reached each stage, and what it used: the source of its trace, metrics and log
line."""

from __future__ import annotations

import time

from baton.v1.router_pb2 import RequestTrace, Stage, StageTime
from baton.v1.types_pb2 import DraftCounts
from services.common.observability.draft_counts import add_counts
from services.router.request.request import Request


class RequestTimeline:
    """The timeline of one request. All times are in nanoseconds since the request arrived."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._stages: dict[Stage.ValueType, int] = {}
        # When a pair of workers first had room for it, and when tokens were last delivered.
        self._placed_ns: int | None = None
        self._delivered_ns: int | None = None
        self._prefill_worker = self._decode_worker = self._prefill_reason = ""
        # Attempts that failed: when, and the kind of error.
        self.failures: list[tuple[int, str]] = []
        # KV bytes that the handoffs of ended attempts moved.
        self.kv_bytes_shipped = 0
        # The part of the last handoff that no computation hid (`HandedOff.exposed_ns`).
        self.handoff_exposed_ns = 0
        # By attempt, as its decode worker has reported them last.
        self._drafts: dict[int, DraftCounts] = {}

    def mark(self, stage: Stage.ValueType) -> None:
        """Records when a stage was reached; later calls for it change nothing."""
        self._stages.setdefault(stage, self._elapsed_ns())

    def has_reached(self, stage: Stage.ValueType) -> bool:
        return stage in self._stages

    def placed(self, prefill_worker: str, decode_worker: str = "", prefill_reason: str = "") -> None:
        """Records the workers of the attempt that begins, and when the first one began. `prefill_reason`: why
        this prefill worker, where there was a choice."""
        self._prefill_worker, self._decode_worker = prefill_worker, decode_worker
        self._prefill_reason = prefill_reason
        if decode_worker and self._placed_ns is None:
            self._placed_ns = self._elapsed_ns()

    def failed(self, kind: str) -> None:
        """Records that an attempt failed."""
        self.failures.append((self._elapsed_ns(), kind))

    def drafted(self, attempt: int, counts: DraftCounts) -> None:
        """Records what a decode worker has counted of an attempt so far; a later report replaces it."""
        if counts.steps:
            own = self._drafts[attempt] = DraftCounts()
            own.CopyFrom(counts)  # a part of a message keeps all of it

    @property
    def drafts(self) -> DraftCounts:
        """Decode steps and drafts of all attempts."""
        total = DraftCounts()
        for one in self._drafts.values():
            add_counts(total, one)
        return total

    def delivered(self) -> int | None:
        """Records a delivery of tokens. Returns the time since the one before it; None for the first."""
        since, self._delivered_ns = self._delivered_ns, self._elapsed_ns()
        return None if since is None else self._delivered_ns - since

    def trace(self, attempts: int) -> RequestTrace:
        """Returns the trace that the client gets with its last delta."""
        return RequestTrace(
            prefill_worker=self._prefill_worker,
            decode_worker=self._decode_worker,
            attempts=attempts,
            kv_bytes_shipped=self.kv_bytes_shipped,
            seed=self._request.sampling.seed,
            stages=[StageTime(stage=stage, offset_ns=at) for stage, at in sorted(self._stages.items())],
            handoff_exposed_ns=self.handoff_exposed_ns,
            prefill_reason=self._prefill_reason,
            drafts=self.drafts if self._drafts else None,
        )

    @property
    def last_stage(self) -> str:
        """The last stage that was reached, as `Stage` names it. A pair with room counts as RESERVED."""
        last = max(self._stages, default=Stage.STAGE_UNSPECIFIED)
        if last == Stage.STAGE_ADMITTED and self._placed_ns is not None:
            last = Stage.STAGE_RESERVED
        return Stage.Name(last).removeprefix("STAGE_").lower()

    def intervals_ns(self) -> dict[str, tuple[int, int | None]]:
        """Begin and end of each stage that was reached, by `observations.STAGES`; None: it has not ended."""
        reached = self._stages.get
        first, handed_off = reached(Stage.STAGE_FIRST_TOKEN), reached(Stage.STAGE_HANDED_OFF)
        intervals = {
            "admission": (0, reached(Stage.STAGE_ADMITTED)),
            "queue": (reached(Stage.STAGE_ADMITTED), self._placed_ns),
            "reserve": (self._placed_ns, reached(Stage.STAGE_RESERVED)),
            "prefill": (reached(Stage.STAGE_PREFILLING), first),
            "handoff": (first, handed_off),
            "decode": (handed_off, None),
        }
        return {stage: (since, until) for stage, (since, until) in intervals.items() if since is not None}

    def stages_s(self) -> dict[str, float]:
        """Seconds spent in each stage that has ended, and in the last one until now."""
        intervals = self.intervals_ns()
        if "decode" in intervals:
            intervals["decode"] = intervals["decode"][0], self._elapsed_ns()
        return {
            stage: (until - since) / 1e9
            for stage, (since, until) in intervals.items()
            if until is not None and until >= since
        }

    def latencies_s(self, tokens: int) -> dict[str, float]:
        """Seconds end to end until now, to the first token (TTFT), and for each later token (TPOT)."""
        latencies = {"e2e": self._elapsed_ns() / 1e9}
        first = self._stages.get(Stage.STAGE_FIRST_TOKEN)
        if first is not None:
            latencies["ttft"] = first / 1e9
            if self._delivered_ns is not None and tokens > 1:
                latencies["tpot"] = (self._delivered_ns - first) / 1e9 / (tokens - 1)
        return latencies

    def _elapsed_ns(self) -> int:
        return time.monotonic_ns() - self._request.arrived_ns
