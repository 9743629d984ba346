"""The router's metrics: every name, its help, and where it is read. Nothing here runs between two scrapes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from starlette.responses import Response
from starlette.routing import Route

from baton.v1.admin_pb2 import WorkerState
from baton.v1.types_pb2 import WorkerRole
from services.common.observability.metrics import Family, ScrapedCollector, process_metrics, render
from services.router.workers.worker_state import state_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric
    from starlette.requests import Request as HttpRequest

    from services.router.http.connections import Connections
    from services.router.lifecycle.cancels import Cancels
    from services.router.lifecycle.dispatcher import Dispatcher
    from services.router.lifecycle.observations import Observations
    from services.router.observability.store import Store
    from services.router.workers.directory import Directory
    from services.router.workers.waiting_queue import WaitingRoom

REQUESTS = Family(
    "baton_router_requests_total",
    "Requests that ended, by finish reason (stop, length), cancelled, or kind of error.",
    ("outcome",),
)
STAGE = Family(
    "baton_router_stage_seconds",
    "Time in each stage of a request: intake (checks, tokenising), queue (for a pair with room), reserve "
    "(decode's promise), prefill (to the first token), handoff (the rest of the KV and the commit), decode.",
    ("stage",),
)
TTFT = Family("baton_router_ttft_seconds", "From a request's arrival to its first token.")
TPOT = Family("baton_router_tpot_seconds", "(Last token - first token) / (tokens - 1) of a request.")
ITL = Family("baton_router_itl_seconds", "Gap between two messages of a request that carry tokens.")
E2E = Family("baton_router_e2e_seconds", "From a request's arrival to its end.")
PROMPT_LENGTH = Family("baton_router_prompt_length_tokens", "Prompt tokens of a request that ran.")
OUTPUT_LENGTH = Family("baton_router_output_length_tokens", "Output tokens of a request that ran.")
PROMPT_TOKENS = Family("baton_router_prompt_tokens_total", "Prompt tokens of requests that ended.")
CACHED_TOKENS = Family(
    "baton_router_cached_prompt_tokens_total", "Of them, those that prefill found in its prefix cache."
)
OUTPUT_TOKENS = Family("baton_router_output_tokens_total", "Output tokens, counted as they are shown.")
MESSAGES = Family("baton_router_token_messages_total", "Batches of tokens that were shown to clients.")
RUNNING = Family("baton_router_running_requests", "Requests under way, those that wait included.")
WAITING = Family("baton_router_waiting_requests", "Requests that wait for a pair with room.")
ATTEMPTS = Family("baton_router_attempts_total", "Attempts of requests that ended.")
FAILED_ATTEMPTS = Family(
    "baton_router_failed_attempts_total", "Attempts that failed, by kind of error.", ("kind",)
)
CANCELS = Family("baton_router_cancels_total", "Attempts that decode was told to cancel.")
UNANSWERED = Family("baton_router_unanswered_cancels_total", "Cancels that decode never answered.")
ORPHANS = Family(
    "baton_router_orphans_cancelled_total", "Attempts that decode ran though no request waited for them."
)
PENDING_CANCELS = Family("baton_router_pending_cancels", "Cancels that decode has not answered yet.")
CLAIMED_SLOTS = Family("baton_router_claimed_slots", "Slots that requests of this router hold.", ("worker",))
PROMISED_TOKENS = Family(
    "baton_router_promised_tokens", "Tokens that those requests may come to, prompts included.", ("worker",)
)
QUEUED_TOKENS = Family(
    "baton_router_queued_prefill_tokens", "Prompt tokens that this router waits for.", ("worker",)
)
WORKERS = Family(
    "baton_router_workers",
    "Workers by role and state (ready, starting, draining, silent, lost, other_pool); role is unknown while "
    "starting.",
    ("role", "state"),
)
FOLLOW_BREAKS = Family("baton_router_follow_breaks_total", "Open token streams from decode that ended.")
CONNECTIONS = Family("baton_router_http_connections", "Open HTTP connections.")
REFUSED_CONNECTIONS = Family(
    "baton_router_refused_http_connections_total",
    "HTTP connections that were refused or closed by a limit: too many connections, evicted for a newer one, "
    "headers too large, timeout of a request's headers or body, slow reader, not http.",
    ("reason",),
)
UNREAD = Family("baton_router_unread_output_bytes", "Output that clients have not read yet.")
REDIS_UP = Family("baton_router_redis_up", "1 where Redis answered last, 0 where it did not; none: no state.")
REDIS_OUTAGES = Family("baton_router_redis_outages_total", "How often Redis went away.")
REDIS_FAILED = Family("baton_router_redis_failed_calls_total", "Calls to Redis that failed.")
REDIS_RESTARTS = Family(
    "baton_router_redis_restarts_total", "How often the cluster's own Redis was started again, empty."
)
REGISTERED = Family("baton_router_registered_workers", "Workers that the registry was last seen to have.")
JOURNAL_PENDING = Family(
    "baton_router_journal_pending_requests", "Requests of which Redis has yet to be told something."
)
JOURNAL_DROPPED = Family(
    "baton_router_journal_dropped_total", "Journal entries and marks that never reached Redis."
)
JOURNAL_FAILED = Family(
    "baton_router_journal_failed_batches_total", "Batches of journal changes that have to be sent again."
)

FAMILIES = tuple(value for value in list(globals().values()) if isinstance(value, Family))


@dataclass(frozen=True)
class RouterMetrics:
    """What is read at a scrape."""

    model: str
    observations: Observations
    dispatcher: Dispatcher
    room: WaitingRoom
    cancels: Cancels
    directory: Directory
    store: Store
    connections: Connections

    def register(self, registry: CollectorRegistry) -> None:
        """Declares all of it, and the process's own figures."""
        registry.register(ScrapedCollector(self._read))
        process_metrics(registry)

    def _read(self) -> Iterator[Metric]:
        labels = {"model": self.model}
        seen = self.observations
        yield STAGE.histograms((((name,), h) for name, h in seen.stages.items()), labels)
        for family, name in ((TTFT, "ttft"), (TPOT, "tpot"), (ITL, "itl"), (E2E, "e2e")):
            yield family.histograms([((), seen.latencies[name])], labels)
        yield PROMPT_LENGTH.histograms([((), seen.prompt_lengths)], labels)
        yield OUTPUT_LENGTH.histograms([((), seen.completion_lengths)], labels)
        yield REQUESTS.metric(_by_name(seen.outcomes), labels)
        yield REFUSED_CONNECTIONS.metric(_by_name(self.connections.refused), labels)
        yield FAILED_ATTEMPTS.metric(_by_name(seen.failed_attempts), labels)
        yield WORKERS.metric(_workers(self.directory), labels)
        workers = self.directory.workers
        for family, counted in (
            (CLAIMED_SLOTS, [((worker.name,), worker.claimed_slots) for worker in workers]),
            (PROMISED_TOKENS, [((worker.name,), worker.promised_tokens) for worker in workers]),
            (QUEUED_TOKENS, [((worker.name,), worker.queued_tokens) for worker in workers]),
        ):
            yield family.metric(counted, labels)
        for family, value in (
            (PROMPT_TOKENS, seen.prompt_tokens),
            (CACHED_TOKENS, seen.cached_tokens),
            (OUTPUT_TOKENS, seen.completion_tokens),
            (MESSAGES, seen.messages),
            (RUNNING, self.dispatcher.live),
            (WAITING, self.room.waiting),
            (ATTEMPTS, seen.attempts),
            (CANCELS, self.cancels.sent),
            (UNANSWERED, self.cancels.unanswered),
            (ORPHANS, self.cancels.orphans),
            (PENDING_CANCELS, self.cancels.pending),
            (FOLLOW_BREAKS, self.directory.follow_breaks),
            (CONNECTIONS, self.connections.count),
            (UNREAD, self.dispatcher.unread.total),
        ):
            yield family.metric([((), value)], labels)
        for family, figure in _of_store(self.store):
            yield family.metric([((), figure)], labels)


def _of_store(store: Store) -> list[tuple[Family, float]]:
    """Nothing where no state is kept."""
    if store.state is None:
        return []
    counters, journal = store.state.counters, store.state.journal
    return [
        (REDIS_UP, not store.state.away),
        (REDIS_OUTAGES, counters.outages),
        (REDIS_FAILED, counters.calls_failed),
        (REDIS_RESTARTS, store.restarts),
        (REGISTERED, store.registered_workers),
        (JOURNAL_PENDING, journal.pending),
        (JOURNAL_DROPPED, counters.journal_dropped),
        (JOURNAL_FAILED, counters.journal_batches_failed),
    ]


def _by_name(counts: Counter[str]) -> list[tuple[tuple[str, ...], float]]:
    return [((name,), count) for name, count in sorted(counts.items())]


def _workers(directory: Directory) -> list[tuple[tuple[str, ...], float]]:
    counts: Counter[tuple[str, ...]] = Counter()
    for address in directory.peers:
        worker = directory.at(address)
        role = "unknown" if worker is None else WorkerRole.Name(worker.identity.role)
        state = WorkerState.Name(state_of(worker))
        counts[role.removeprefix("WORKER_ROLE_").lower(), state.removeprefix("WORKER_STATE_").lower()] += 1
    return sorted(counts.items())


def metrics_route(registry: CollectorRegistry) -> Route:
    """`GET /metrics`: Prometheus text or OpenMetrics, as the Accept header asks."""

    async def answer(request: HttpRequest) -> Response:
        body, content_type = render(registry, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return Route("/metrics", answer, methods=["GET"])
