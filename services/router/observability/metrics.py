"""The table of the router's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from prometheus_client import CollectorRegistry
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from baton.base.errors import ErrorKind
from baton.state import State
from baton.v1.admin_pb2 import WorkerState
from baton.v1.types_pb2 import WorkerRole
from services.common.observability.metrics import (
    Metric,
    Samples,
    ScrapedCollector,
    collect,
    process_metrics,
    render_on_loop,
)
from services.router.auth.redis_keys import RedisKeys
from services.router.auth.tenant_keys import TenantKeys
from services.router.conversations.stored_responses import StoredResponses
from services.router.observability.aliases import Aliases
from services.router.observability.process_series import QUESTION, merged, series
from services.router.observability.status import Status
from services.router.placement.forecast import step_s
from services.router.processes.sibling_questions import SiblingQuestions
from services.router.tenants.account import TenantAccount
from services.router.workers.worker import Worker, state_of

T = TypeVar("T")

# Kinds of error with which a request leaves the queue, which are 0 until there was one.
_REFUSALS = (ErrorKind.OVERLOADED, ErrorKind.RATE_LIMITED, ErrorKind.DEADLINE, ErrorKind.UNAVAILABLE)


def _by_key(counts: Counter[str]) -> Samples:
    return [((key,), count) for key, count in sorted(counts.items())]


def _by_worker(router: Status, read: Callable[[Worker], float]) -> Samples:
    return [((worker.name,), read(worker)) for worker in router.directory.workers]


def _workers(router: Status) -> Samples:
    # A role without a ready worker is a 0, since an alert cannot see what is not there.
    counts: Counter[tuple[str, ...]] = Counter({("prefill", "ready"): 0, ("decode", "ready"): 0})
    for address in router.directory.peers:
        worker = router.directory.at(address)
        role = "unknown" if worker is None else WorkerRole.Name(worker.identity.role)
        state = WorkerState.Name(state_of(worker))
        counts[role.removeprefix("WORKER_ROLE_").lower(), state.removeprefix("WORKER_STATE_").lower()] += 1
    return sorted(counts.items())


def _unserved(router: Status, which: int) -> Samples:
    found = {kind.name.lower(): (0.0, 0.0) for kind in _REFUSALS} | router.queue.demand.unserved()
    return [((reason,), both[which]) for reason, both in sorted(found.items())]


def _waiting(router: Status, which: int) -> Samples:
    waits = "prefill" if router.queue.waiting_for_prefill else "decode"
    now = router.queue.demand.waiting()
    return [((role,), now[which] if role == waits else 0) for role in ("prefill", "decode")]


def _by_tenant(router: Status, read: Callable[[TenantAccount], float]) -> Samples | None:
    """A metric that exists only with tenants: those of the file, of which there are at most a thousand."""
    if not isinstance(router.keys, TenantKeys | RedisKeys):
        return None
    return [((name,), read(account)) for name, account in sorted(router.keys.accounts.items())]


def _refused_by_tenant(router: Status) -> Samples | None:
    if not isinstance(router.keys, TenantKeys | RedisKeys):
        return None
    accounts = sorted(router.keys.accounts.items())
    return [((name, limit), n) for name, one in accounts for limit, n in sorted(one.refused.items())]


def _of_state(read: Callable[[State], float], router: Status) -> float | None:
    """A metric that exists only with a state store."""
    return None if router.store.state is None else read(router.store.state)


def _of_responses(read: Callable[[StoredResponses], T], router: Status) -> T | None:
    """A metric that exists only where responses are stored."""
    return None if router.store.responses is None else read(router.store.responses)


# fmt: off
FAMILIES: tuple[Metric[Status], ...] = (
    Metric("baton_router_requests_total",
           "Requests that ended, by finish reason (stop, length), cancelled, or kind of error.",
           lambda router: _by_key(router.observations.outcomes), ("outcome",)),
    Metric("baton_router_stage_seconds",
           "Time in each stage of a request: admission (checks, tokenising), queue (for a pair with room), "
           "reserve (a slot at decode), prefill (to the first token), handoff (the rest of the KV and the "
           "commit), decode.",
           lambda router: [((stage,), histogram) for stage,
           histogram in router.observations.stages.items()], ("stage",)),
    Metric("baton_router_ttft_seconds", "Time to first token: from a request's arrival to its first token.",
           lambda router: router.observations.latencies["ttft"]),
    Metric("baton_router_tpot_seconds",
           "Time per output token: (last token - first token) / (tokens - 1) of a request.",
           lambda router: router.observations.latencies["tpot"]),
    Metric("baton_router_itl_seconds",
           "Inter-token latency: time between two messages of a request that carry tokens.",
           lambda router: router.observations.latencies["itl"]),
    Metric("baton_router_e2e_seconds", "End-to-end latency: from a request's arrival to its end.",
           lambda router: router.observations.latencies["e2e"]),
    Metric("baton_router_prompt_length_tokens", "Prompt tokens of a request that ran.",
           lambda router: router.observations.prompt_lengths),
    Metric("baton_router_output_length_tokens", "Output tokens of a request that ran.",
           lambda router: router.observations.completion_lengths),
    Metric("baton_router_prompt_tokens_total", "Prompt tokens of requests that ended.",
           lambda router: router.observations.prompt_tokens),
    Metric("baton_router_cached_prompt_tokens_total",
           "Prompt tokens of requests that ended which prefill found in its prefix cache.",
           lambda router: router.observations.cached_tokens),
    Metric("baton_router_output_tokens_total", "Output tokens, counted as they are delivered.",
           lambda router: router.observations.completion_tokens),
    Metric("baton_router_token_messages_total", "Batches of tokens that were delivered to clients.",
           lambda router: router.observations.batches),
    Metric("baton_router_running_requests", "Requests that run or wait for workers.",
           lambda router: router.dispatcher.running),
    Metric("baton_router_waiting_requests", "Requests that wait for a pair of workers with room.",
           lambda router: router.queue.waiting),
    Metric("baton_router_demand_requests",
           "Requests that arrived in the last minute, including those that were not served.",
           lambda router: router.queue.demand.requests()),
    Metric("baton_router_demand_prefill_seconds",
           "Predicted time on one prefill worker for the prompts of the requests of the last minute.",
           lambda router: router.queue.demand.prefill_seconds()),
    Metric("baton_router_unserved_requests",
           "Requests of the last minute that got no worker: refused early or by a full queue, timed out, or "
           "ended by their clients while they waited (abandoned), by kind of error.",
           lambda router: _unserved(router, 0), ("reason",)),
    Metric("baton_router_unserved_prefill_seconds",
           "Predicted time on one prefill worker for the prompts of the requests of the last minute that got "
           "no worker, by kind of error.",
           lambda router: _unserved(router, 1), ("reason",)),
    Metric("baton_router_waiting_by_role",
           "Waiting requests, by the role that has no worker with room for the next one.",
           lambda router: _waiting(router, 0), ("role",)),
    Metric("baton_router_waiting_prompt_tokens",
           "Prompt tokens of waiting requests, by the role that has no worker with room.",
           lambda router: _waiting(router, 1), ("role",)),
    Metric("baton_router_waiting_prefill_seconds",
           "Predicted time on one prefill worker for the prompts of waiting requests, by the role that has "
           "no worker with room.",
           lambda router: _waiting(router, 2), ("role",)),
    Metric("baton_router_early_refusals_total",
           "Requests that were refused early, because their first token would come after the call's deadline "
           "(deadline), or they would miss a TTFT or TPOT limit that they state (limits).",
           lambda router: _by_key(router.queue.refused_early), ("reason",)),
    Metric("baton_router_slo_requests_total",
           "Requests that ended and had stated limits, by what they missed: none, ttft, tpot, both, or "
           "failed (neither cancelled ones nor those refused early).",
           lambda router: _by_key(router.observations.limits), ("missed",)),
    Metric("baton_router_attempts_total", "Attempts of requests that ended.",
           lambda router: router.observations.attempts),
    Metric("baton_router_failed_attempts_total", "Attempts that failed, by kind of error.",
           lambda router: _by_key(router.observations.failed_attempts), ("kind",)),
    Metric("baton_router_cancels_total", "Attempts that were cancelled at decode workers.",
           lambda router: router.cancels.sent),
    Metric("baton_router_unanswered_cancels_total", "Cancels that a decode worker never answered.",
           lambda router: router.cancels.unanswered),
    Metric("baton_router_orphans_cancelled_total",
           "Attempts that were cancelled because their output had no matching request.",
           lambda router: router.cancels.orphans),
    Metric("baton_router_pending_cancels", "Cancels that a decode worker has not answered yet.",
           lambda router: router.cancels.pending),
    Metric("baton_router_placements_total",
           "Attempts placed on workers, by the worker that computes the prompt: the one that decodes it "
           "(own; spare: overflow decode on one designated for prefill, while no other has a free slot), or "
           "another one (other).",
           lambda router: _by_key(router.queue.placed), ("prefill",)),
    Metric("baton_router_claimed_slots", "Decode slots that this router's requests use.",
           lambda router: _by_worker(router, lambda worker: worker.claimed_slots), ("worker",)),
    Metric("baton_router_reserved_tokens",
           "Most tokens that this router's requests may have on the worker, prompts included.",
           lambda router: _by_worker(router, lambda worker: worker.reserved_tokens), ("worker",)),
    Metric("baton_router_queued_prefill_tokens",
           "Prompt tokens of this router's requests that are not computed yet.",
           lambda router: _by_worker(router, lambda worker: worker.queued_tokens), ("worker",)),
    Metric("baton_router_predicted_step_seconds",
           "Predicted time per output token of a decode worker; 0 before steps were measured.",
           lambda router: _by_worker(router, lambda worker: step_s(worker, 0)), ("worker",)),
    Metric("baton_router_step_correction",
           "Ratio of the observed to the predicted time per output token of recent requests.",
           lambda router: _by_worker(router, lambda worker: worker.tpot_ratio.value), ("worker",)),
    Metric("baton_router_ready",
           "1 where /ready is 200: a request would be served, or waits for a worker that has just gone; else "
           "0.",
           lambda router: router.readiness.ready()),
    Metric("baton_router_workers",
           "Workers by role and state (ready, starting, draining, unreachable, lost, other_pool); role is "
           "unknown while starting.", _workers, ("role", "state")),
    Metric("baton_router_token_stream_breaks_total",
           "Token streams from decode workers that ended while open.",
           lambda router: router.directory.token_stream_breaks),
    Metric("baton_router_http_connections", "Open HTTP connections.",
           lambda router: router.connections.count),
    Metric("baton_router_unauthenticated_total",
           "Requests refused without a valid API key, by API (http, grpc).",
           lambda router: None if router.keys is None else _by_key(router.keys.refused), ("api",)),
    Metric("baton_router_forbidden_total",
           "Requests refused because their API key does not have the scope, by API (http, grpc).",
           lambda router: None if router.keys is None else _by_key(router.keys.forbidden), ("api",)),
    Metric("baton_router_api_keys_age_seconds",
           "Time for which a change of the API keys in Redis may be unknown; absent without such keys.",
           lambda router: router.keys.age_s if isinstance(router.keys, RedisKeys) else None),
    Metric("baton_router_audit_lines_total", "Lines of the audit log that were written.",
           lambda router: router.audit_log.lines if router.audit_log is not None else None),
    Metric("baton_router_audit_dropped_total",
           "Records of the audit log that were lost: its queue was full, its file could not be written, or "
           "there were too many calls without a valid key.",
           lambda router: router.audit_log.dropped if router.audit_log is not None else None),
    Metric("baton_router_trace_spans_exported_total", "Spans that the collector of traces has taken; absent "
           "without one.",
           lambda router: None if (spans := router.observations.traces.recorder) is None else spans.exported),
    Metric("baton_router_trace_spans_dropped_total",
           "Spans that were lost, by reason (queue_full, export_failed); absent without a collector.",
           lambda router: None if (spans := router.observations.traces.recorder) is None
           else spans.dropped(), ("reason",)),
    Metric("baton_router_tenant_calls_total", "Calls that were admitted; absent without tenants.",
           lambda router: _by_tenant(router, lambda tenant: tenant.calls), ("tenant",)),
    Metric("baton_router_tenant_refused_total", "Calls that a limit of their tenant refused, by limit; "
           "requests, where it has its share of the places in the queue (queue_places) or before tokenizers "
           "(tokenizer_places).",
           _refused_by_tenant, ("tenant", "limit")),
    Metric("baton_router_tenant_running_requests", "Requests that run or wait for workers.",
           lambda router: _by_tenant(router, lambda tenant: tenant.running), ("tenant",)),
    Metric("baton_router_tenant_waiting_requests", "Requests that wait for workers.",
           lambda router: _by_tenant(router, lambda tenant: tenant.waiting), ("tenant",)),
    Metric("baton_router_tenant_placed_requests_total", "Requests that were placed on workers.",
           lambda router: _by_tenant(router, lambda tenant: tenant.placed), ("tenant",)),
    Metric("baton_router_tenant_waited_seconds_total", "Time that placed requests waited for workers.",
           lambda router: _by_tenant(router, lambda tenant: tenant.waited_s), ("tenant",)),
    Metric("baton_router_tenant_prompt_tokens_total", "Prompt tokens of calls that were admitted.",
           lambda router: _by_tenant(router, lambda tenant: tenant.prompt_tokens), ("tenant",)),
    Metric("baton_router_tenant_output_tokens_total", "Output tokens of calls that ended.",
           lambda router: _by_tenant(router, lambda tenant: tenant.output_tokens), ("tenant",)),
    Metric("baton_router_refused_http_connections_total",
           "HTTP connections that were refused or closed by a limit: too many connections, evicted for a "
           "newer one, headers too large, timeout of a request's headers or body, slow reader, not http, "
           "tls handshake.",
           lambda router: _by_key(router.connections.refused), ("reason",)),
    Metric("baton_router_unread_output_bytes", "Output that clients have not read yet.",
           lambda router: router.unread.total_bytes),
    Metric("baton_router_redis_up",
           "1 if Redis answered the last call, else 0; absent without a state store.",
           partial(_of_state, lambda state: not state.unavailable)),
    Metric("baton_router_redis_outages_total", "Outages of Redis.",
           partial(_of_state, lambda state: state.counters.outages)),
    Metric("baton_router_redis_failed_calls_total", "Calls to Redis that failed.",
           partial(_of_state, lambda state: state.counters.calls_failed)),
    Metric("baton_router_redis_restarts_total",
           "Restarts of the embedded Redis server, which is empty afterwards.",
           lambda router: None if router.store.state is None else router.store.restarts),
    Metric("baton_router_registered_workers", "Workers in the registry when it was last read.",
           lambda router: None if router.store.state is None else router.store.registered_workers),
    Metric("baton_router_journal_pending_requests",
           "Requests with journal entries that are not written to Redis yet.",
           partial(_of_state, lambda state: state.journal.pending)),
    Metric("baton_router_journal_dropped_total",
           "Journal entries and marks that were never written to Redis.",
           partial(_of_state, lambda state: state.counters.journal_dropped)),
    Metric("baton_router_journal_failed_batches_total",
           "Batches of journal changes that failed and are sent again.",
           partial(_of_state, lambda state: state.counters.journal_batches_failed)),
    Metric("baton_router_stored_responses_total",
           "Responses that ended and were to be stored, by result: stored, failed (Redis did not take it), "
           "too_large, dropped (too many waited); absent unless responses are stored.",
           partial(_of_responses, lambda responses: _by_key(responses.written)), ("result",)),
    Metric("baton_router_stored_response_reads_total",
           "Stored responses that requests referred to, by result: found, missing, failed (Redis did not "
           "answer).",
           partial(_of_responses, lambda responses: _by_key(responses.reads)), ("result",)),
    Metric("baton_router_pending_stored_response_bytes",
           "Responses that wait to be written to Redis.",
           partial(_of_responses, lambda responses: responses.pending_bytes)),
)
# fmt: on


def register_metrics(router: Status, registry: CollectorRegistry, *, aliases: bool = False) -> None:
    """Adds the router's metrics, and those of its process. `aliases`: under other projects' names too."""
    if aliases:
        repeated = Aliases(FAMILIES)
        registry.register(ScrapedCollector(lambda: repeated.collect(router)))
    registry.register(ScrapedCollector(lambda: collect(FAMILIES, router, {"model": router.model.name})))
    process_metrics(registry)


def metrics_route(registry: CollectorRegistry, siblings: SiblingQuestions) -> Route:
    """`GET /metrics`: Prometheus text or OpenMetrics, by the Accept header. With several processes every
    series has the label `process`: counters of one that is replaced start from 0, which a sum would hide."""

    async def answer(request: HttpRequest) -> Response:
        shown = registry
        if siblings.index is not None:
            shown = merged({siblings.index: series(registry), **await siblings.ask(QUESTION)})
        body, content_type = await render_on_loop(shown, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return Route("/metrics", answer, methods=["GET"])
