"""A worker's metrics: the name, help and source of each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from baton.errors import BatonError, ErrorKind
from baton.v1.worker_pb2 import Audit, LinkAudit
from services.common.observability.histogram import Histogram
from services.common.observability.metrics import Family, ScrapedCollector, process_metrics

if TYPE_CHECKING:
    from services.worker.front.registration import Registration

_SCRAPE_TIMEOUT_S = 5.0

Values = dict[str, float]
"""Values by the one label of a metric."""


def _links(read: Callable[[Sequence[LinkAudit]], float]) -> Callable[[Audit], Values]:
    """Reads a figure of the outgoing and of the incoming links."""

    def by_direction(audit: Audit) -> Values:
        outgoing = [link for link in audit.links if link.sending]
        incoming = [link for link in audit.links if not link.sending]
        return {"out": read(outgoing), "in": read(incoming)}

    return by_direction


def _cached_blocks(audit: Audit) -> Values:
    cache = audit.prefixes
    return {"device": cache.device_blocks, "host": cache.host_blocks, "disk": cache.disk_blocks}


def _cache_hits(audit: Audit) -> Values:
    cache = audit.prefixes
    return {"device": cache.device_hits, "host": cache.host_hits, "disk": cache.disk_hits}


def _usable_pieces(links: Sequence[LinkAudit]) -> float:
    return sum(link.free_pieces if link.sending else link.credited_pieces for link in links)


_AUDITED: tuple[tuple[str, Callable[[Audit], float], str], ...] = (
    ("slots", lambda a: a.load.slots, "Sequences that can be decoded at once."),
    ("free_slots", lambda a: a.load.free_slots, "Slots without a sequence or reservation."),
    ("blocks", lambda a: a.load.blocks, "KV blocks."),
    ("free_blocks", lambda a: a.load.free_blocks,
     "Free KV blocks, including cached ones that may be evicted."),
    ("pinned_blocks", lambda a: a.pinned_blocks, "KV blocks that a transfer still reads."),
    ("live_tickets", lambda a: a.live_tickets,
     "Tickets that have not ended, including those of running sequences."),
    ("tombstones", lambda a: a.tombstones,
     "Ended attempts that are remembered so that late calls for them are refused."),
    ("queued_prefills", lambda a: a.load.queued_prefills,
     "Prompts that are queued, running or being handed over."),
    ("queued_prefill_tokens", lambda a: a.load.queued_prefill_tokens,
     "Prompt tokens that have not been computed yet."),
    ("prompts_total", lambda a: a.prompts_run, "Prompts that have been computed completely."),
    ("prompt_tokens_total", lambda a: a.prompt_tokens_run, "Prompt tokens that have been computed."),
    ("decode_steps_total", lambda a: a.decode_steps, "Decode steps that have run."),
    ("decoded_tokens_total", lambda a: a.tokens_decoded, "Tokens sampled by decode steps."),
    ("decode_step_seconds_total", lambda a: a.decode_busy_ns / 1e9, "Time spent in decode steps."),
    ("prefill_step_seconds_total", lambda a: a.prefill_busy_ns / 1e9, "Time spent in prefill steps."),
    ("ring_full_steps_total", lambda a: a.ring_full_steps,
     "Decode steps that advanced no sequence because the output ring was full."),
    ("stalled_rows_total", lambda a: a.stalled_rows,
     "Rows that a decode step did not advance: no KV block for their next token, or no room in the "
     "attention kernel's list."),
    ("block_allocations_total", lambda a: a.block_grants,
     "Incremental allocations of KV blocks to running sequences."),
    ("swapped_out_sequences_total", lambda a: a.sequences_swapped_out,
     "Sequences whose KV blocks were swapped out to host memory."),
    ("preempted_sequences_total", lambda a: a.sequences_preempted,
     "Sequences that were preempted and returned to the router for recomputation."),
    ("prefix_hit_tokens_total", lambda a: a.prefixes.hit_tokens,
     "Prompt tokens whose KV was found in the prefix cache."),
    ("prefix_missed_tokens_total", lambda a: a.prefixes.missed_tokens,
     "Tokens of the same prompts whose KV had to be computed."),
    ("prefix_evicted_blocks_total", lambda a: a.prefixes.evicted_blocks,
     "Cached KV blocks that were evicted from the device."),
    ("prefix_idle_blocks", lambda a: a.prefixes.idle_blocks,
     "Cached KV blocks on the device that no sequence uses."),
    ("prefix_disk_dropped_blocks_total", lambda a: a.prefixes.disk_dropped,
     "Cached KV blocks that were dropped because the disk was too slow."),
    ("prefix_disk_corrupt_blocks_total", lambda a: a.prefixes.disk_corrupt,
     "Files of cached KV blocks whose content was corrupt."),
    ("shipped_blocks_total", lambda a: sum(a.blocks_shipped), "KV blocks that were sent completely."),
    ("shipped_bytes_total", lambda a: a.bytes_shipped, "Bytes of the KV blocks that were sent."),
    ("received_blocks_total", lambda a: a.blocks_received, "KV blocks that were received completely."),
    ("received_bytes_total", lambda a: a.bytes_received, "Bytes of KV that were received and verified."),
    ("handoffs_total", lambda a: a.handoffs_committed,
     "Handoffs whose sequence was admitted by this worker."),
    ("local_handoffs_total", lambda a: a.handoffs_local,
     "Handoffs from this worker's own prefill, among baton_worker_handoffs_total."),
    ("unsent_blocks_total", lambda a: a.blocks_resident,
     "KV blocks of handoffs that were in the prefix cache and therefore not sent."),
    ("unsent_bytes_total", lambda a: a.bytes_resident, "Bytes of the KV blocks that were not sent."),
    ("quarantined_pieces", lambda a: sum(link.quarantined_pieces for link in a.links),
     "Staging pieces of broken links that a sender may still write to."),
    ("broken_links_total", lambda a: a.links_broken, "Links that broke."),
    ("link_fallbacks_total", lambda a: a.link_fallbacks,
     "Links that fell back to a slower transport because the preferred one was unavailable or broke; "
     "the log states why."),
    ("links_returned_total", lambda a: a.links_returned,
     "Links that returned from a slower to a better transport without losing a transfer."),
    ("checksum_failures_total", lambda a: a.checksum_failures, "Pieces whose checksum was wrong."),
    ("dropped_unknown_total", lambda a: a.dropped_unknown,
     "Messages about unknown or ended transfers and slots."),
)  # fmt: skip

_LABELLED: tuple[tuple[str, str, str, Callable[[Audit], Values]], ...] = (
    ("prefix_hit_blocks_total", "Prefix cache hits in KV blocks, by the tier that had the block.", "tier",
     _cache_hits),
    ("prefix_blocks", "Cached KV blocks, by tier.", "tier", _cached_blocks),
    ("prefix_bytes", "Bytes of cached KV blocks, by tier.", "tier",
     lambda a: {tier: n * a.prefixes.block_bytes for tier, n in _cached_blocks(a).items()}),
    ("links", "Open links.", "direction", _links(len)),
    ("staging_credits", "Staging pieces that may be filled; all while no transfer runs.", "direction",
     _links(_usable_pieces)),
    ("staging_pieces", "Staging pieces of all links.", "direction",
     _links(lambda links: sum(link.window_pieces for link in links))),
)  # fmt: skip

AUDITED = tuple((Family(f"baton_worker_{name}", text), read) for name, read, text in _AUDITED)
LABELLED = tuple(
    (Family(f"baton_worker_{name}", text, (label,)), read) for name, text, label, read in _LABELLED
)
RESTARTS = Family("baton_worker_restarts_total", "Restarts of this worker by its supervisor.")
STREAMS = Family("baton_worker_live_streams", "Reservations and sequences that may still emit tokens.")
POLL_LAG = Family("baton_worker_ring_poll_lag_seconds", "Delay of the front's polls of the output ring.")
REDIS_UP = Family("baton_worker_redis_up", "1 where Redis answered last, else 0; absent without state.")
REDIS_OUTAGES = Family("baton_worker_redis_outages_total", "Outages of Redis.")
REGISTERED = Family("baton_worker_registered", "1 where the registry lists this worker, else 0.")
RENEWALS_FAILED = Family("baton_worker_failed_renewals_total", "Unanswered renewals of the registration.")

FAMILIES = (
    *(family for family, _ in AUDITED),
    *(family for family, _ in LABELLED),
    *(RESTARTS, STREAMS, POLL_LAG, REDIS_UP, REDIS_OUTAGES, REGISTERED, RENEWALS_FAILED),
)


@dataclass(frozen=True)
class WorkerMetrics:
    """Reads a worker's metrics at each scrape. `audit` requests the engine's counts, within `loop`."""

    labels: dict[str, str]
    audit: Callable[[], Awaitable[Audit]]
    loop: asyncio.AbstractEventLoop
    restarts: int
    poll_lag: Histogram
    live_streams: Callable[[], int]
    registration: Registration | None

    def register(self, registry: CollectorRegistry, engine_pid: int) -> None:
        """Registers all metrics, and those of both processes."""
        registry.register(ScrapedCollector(self._read))
        process_metrics(registry)
        process_metrics(registry, "engine", engine_pid)

    def _read(self) -> Iterator[Metric]:
        """Runs on the scraper's thread; an engine that does not answer fails the scrape."""
        audit = self._fetch()
        for family, read in AUDITED:
            yield family.metric([((), read(audit))], self.labels)
        for family, read_values in LABELLED:
            values = read_values(audit)
            yield family.metric([((label,), value) for label, value in values.items()], self.labels)
        yield RESTARTS.metric([((), self.restarts)], self.labels)
        yield STREAMS.metric([((), self.live_streams())], self.labels)
        yield POLL_LAG.histograms([((), self.poll_lag)], self.labels)
        for family, value in _registration_metrics(self.registration):
            yield family.metric([((), value)], self.labels)

    def _fetch(self) -> Audit:
        request = asyncio.run_coroutine_threadsafe(_await(self.audit()), self.loop)
        try:
            return request.result(_SCRAPE_TIMEOUT_S)
        except FutureTimeoutError as error:
            request.cancel()
            raise BatonError(ErrorKind.DEADLINE, f"no audit within {_SCRAPE_TIMEOUT_S} s") from error


def _registration_metrics(registration: Registration | None) -> list[tuple[Family, float]]:
    """The metrics of the registration; none without state."""
    if registration is None:
        return []
    state = registration.state
    return [
        (REDIS_UP, not state.unavailable),
        (REDIS_OUTAGES, state.counters.outages),
        (REGISTERED, registration.registered),
        (RENEWALS_FAILED, state.counters.renewals_failed),
    ]


async def _await(audit: Awaitable[Audit]) -> Audit:
    return await audit
