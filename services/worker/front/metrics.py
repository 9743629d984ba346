"""A worker's metrics: every name, its help, and where in the engine's audit it is read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import TimeoutError as TookTooLongError
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from baton.errors import BatonError, ErrorKind
from baton.v1.worker_pb2 import Audit, LinkAudit, PrefixAudit
from services.common.observability.histogram import Histogram
from services.common.observability.metrics import Family, ScrapedCollector, process_metrics

if TYPE_CHECKING:
    from services.worker.front.registration import Registration

_READ_S = 5.0

Read = Callable[[Audit], float]


def _links(audit: Audit, sending: bool) -> list[LinkAudit]:
    return [link for link in audit.links if link.sending == sending]


SLOTS = Family("baton_worker_slots", "Sequences that can be decoded at once.")
FREE_SLOTS = Family("baton_worker_free_slots", "Slots that no sequence or ticket holds.")
BLOCKS = Family("baton_worker_blocks", "KV blocks.")
FREE_BLOCKS = Family("baton_worker_free_blocks", "KV blocks that nobody holds, idle cached ones among them.")
PINNED = Family("baton_worker_pinned_blocks", "KV blocks that a transfer still reads.")
TICKETS = Family("baton_worker_live_tickets", "Promises that have not ended, running sequences among them.")
TOMBSTONES = Family("baton_worker_tombstones", "Cancelled attempts that would still be refused.")
QUEUED = Family("baton_worker_queued_prefills", "Prompts that wait, run or are handed over.")
QUEUED_TOKENS = Family("baton_worker_queued_prefill_tokens", "Prompt tokens not computed yet.")
PROMPTS = Family("baton_worker_prompts_total", "Prompts computed to their end.")
PROMPT_TOKENS = Family("baton_worker_prompt_tokens_total", "Prompt tokens computed.")
DECODE_STEPS = Family("baton_worker_decode_steps_total", "Decode steps that ran.")
DECODED = Family("baton_worker_decoded_tokens_total", "Tokens that decode steps sampled.")
DECODE_SECONDS = Family("baton_worker_decode_step_seconds_total", "Time spent in decode steps.")
PREFILL_SECONDS = Family("baton_worker_prefill_step_seconds_total", "Time spent in prefill steps.")
RING_FULL = Family(
    "baton_worker_ring_full_steps_total", "Decode steps that advanced nobody: the output ring had no room."
)
HELD = Family(
    "baton_worker_held_rows_total",
    "Rows that a decode step held: no block for their next token, or no room in its attention's list.",
)
GRANTS = Family("baton_worker_growth_grants_total", "Times a running sequence was given more KV blocks.")
PAUSED = Family(
    "baton_worker_paused_sequences_total", "Times a sequence was set aside in the host's memory for a while."
)
MOVED = Family(
    "baton_worker_moved_sequences_total",
    "Sequences given back to the router, to be prefilled again elsewhere.",
)
PREFIX_HIT_TOKENS = Family(
    "baton_worker_prefix_hit_tokens_total", "Prompt tokens whose KV was found in the prefix cache."
)
PREFIX_MISSED_TOKENS = Family(
    "baton_worker_prefix_missed_tokens_total", "Tokens of the same prompts that had to be computed."
)
PREFIX_EVICTED = Family(
    "baton_worker_prefix_evicted_blocks_total", "Cached KV blocks that the device gave up for others."
)
PREFIX_IDLE = Family("baton_worker_prefix_idle_blocks", "Cached KV blocks on the device that nobody uses.")
PREFIX_DROPPED = Family(
    "baton_worker_prefix_disk_dropped_blocks_total", "Cached KV blocks that the disk was too slow to take."
)
PREFIX_CORRUPT = Family(
    "baton_worker_prefix_disk_corrupt_blocks_total", "Files of KV blocks that were not what was written."
)
PREFIX_HITS = Family(
    "baton_worker_prefix_hit_blocks_total",
    "Cached KV blocks that prompts took over, by where they were; those from behind it go to the device.",
    ("tier",),
)
PREFIX_BLOCKS = Family("baton_worker_prefix_blocks", "Cached KV blocks, by where they are.", ("tier",))
PREFIX_BYTES = Family("baton_worker_prefix_bytes", "Bytes of cached KV blocks, by where they are.", ("tier",))
SHIPPED = Family("baton_worker_shipped_blocks_total", "KV blocks sent whole.")
SHIPPED_BYTES = Family("baton_worker_shipped_bytes_total", "Bytes of the KV blocks sent.")
RECEIVED = Family("baton_worker_received_blocks_total", "KV blocks that arrived whole.")
RECEIVED_BYTES = Family("baton_worker_received_bytes_total", "Bytes that arrived and were verified.")
COMMITTED = Family("baton_worker_handoffs_total", "Handoffs whose sequence was admitted here.")
LOCAL = Family("baton_worker_local_handoffs_total", "Those of them from this worker's own prefill.")
UNSENT = Family(
    "baton_worker_unsent_blocks_total", "KV blocks of handoffs that were here already, and were not sent."
)
UNSENT_BYTES = Family("baton_worker_unsent_bytes_total", "Bytes of the KV blocks that were not sent.")
LINKS = Family("baton_worker_links", "Open links.", ("direction",))
CREDITS = Family(
    "baton_worker_staging_credits", "Staging pieces that may be filled; at rest all.", ("direction",)
)
WINDOW = Family("baton_worker_staging_pieces", "Staging pieces of all links.", ("direction",))
QUARANTINED = Family(
    "baton_worker_quarantined_pieces", "Staging pieces of broken links that a sender may still write."
)
BROKEN = Family("baton_worker_broken_links_total", "Links that broke.")
FALLBACKS = Family(
    "baton_worker_link_fallbacks_total",
    "Links made over a slower transport than the first, which could not be had, or broke; the log line says "
    "why.",
)
RETURNED = Family(
    "baton_worker_links_returned_total",
    "Links of a slower transport that were replaced by one of a better transport, without losing a transfer.",
)
CHECKSUMS = Family("baton_worker_checksum_failures_total", "Pieces that did not arrive as they were sent.")
DROPPED = Family("baton_worker_dropped_unknown_total", "Messages about unknown or ended transfers and slots.")
RESTARTS = Family("baton_worker_restarts_total", "How often its supervisor has started this worker again.")
STREAMS = Family("baton_worker_live_streams", "Reservations and sequences whose slot may still emit.")
POLL_LAG = Family(
    "baton_worker_ring_poll_lag_seconds", "How much later than it meant to the front read the output ring."
)
REDIS_UP = Family("baton_worker_redis_up", "1 where Redis answered last, 0 where it did not; none: no state.")
REDIS_OUTAGES = Family("baton_worker_redis_outages_total", "How often Redis went away.")
REGISTERED = Family("baton_worker_registered", "1 where the registry has this worker, as far as it knows.")
RENEWALS_FAILED = Family(
    "baton_worker_failed_renewals_total", "Announcements to the registry that got no answer."
)

FAMILIES = tuple(value for value in list(globals().values()) if isinstance(value, Family))

_READ: dict[Family, Read] = {
    SLOTS: lambda audit: audit.load.slots,
    FREE_SLOTS: lambda audit: audit.load.free_slots,
    BLOCKS: lambda audit: audit.load.blocks,
    FREE_BLOCKS: lambda audit: audit.load.free_blocks,
    PINNED: lambda audit: audit.pinned_blocks,
    TICKETS: lambda audit: audit.live_tickets,
    TOMBSTONES: lambda audit: audit.tombstones,
    QUEUED: lambda audit: audit.load.queued_prefills,
    QUEUED_TOKENS: lambda audit: audit.load.queued_prefill_tokens,
    PROMPTS: lambda audit: audit.prompts_run,
    PROMPT_TOKENS: lambda audit: audit.prompt_tokens_run,
    DECODE_STEPS: lambda audit: audit.decode_steps,
    DECODED: lambda audit: audit.tokens_decoded,
    DECODE_SECONDS: lambda audit: audit.decode_busy_ns / 1e9,
    PREFILL_SECONDS: lambda audit: audit.prefill_busy_ns / 1e9,
    RING_FULL: lambda audit: audit.ring_full_steps,
    HELD: lambda audit: audit.held_rows,
    GRANTS: lambda audit: audit.growth_grants,
    PAUSED: lambda audit: audit.sequences_paused,
    MOVED: lambda audit: audit.sequences_moved,
    PREFIX_HIT_TOKENS: lambda audit: audit.prefixes.hit_tokens,
    PREFIX_MISSED_TOKENS: lambda audit: audit.prefixes.missed_tokens,
    PREFIX_EVICTED: lambda audit: audit.prefixes.evicted_blocks,
    PREFIX_IDLE: lambda audit: audit.prefixes.idle_blocks,
    PREFIX_DROPPED: lambda audit: audit.prefixes.disk_dropped,
    PREFIX_CORRUPT: lambda audit: audit.prefixes.disk_corrupt,
    SHIPPED: lambda audit: sum(audit.blocks_shipped),
    SHIPPED_BYTES: lambda audit: audit.bytes_shipped,
    RECEIVED: lambda audit: audit.blocks_received,
    RECEIVED_BYTES: lambda audit: audit.bytes_received,
    COMMITTED: lambda audit: audit.handoffs_committed,
    LOCAL: lambda audit: audit.handoffs_local,
    UNSENT: lambda audit: audit.blocks_held,
    UNSENT_BYTES: lambda audit: audit.bytes_held,
    QUARANTINED: lambda audit: sum(link.quarantined_pieces for link in audit.links),
    BROKEN: lambda audit: audit.links_broken,
    FALLBACKS: lambda audit: audit.link_fallbacks,
    RETURNED: lambda audit: audit.links_returned,
    CHECKSUMS: lambda audit: audit.checksum_failures,
    DROPPED: lambda audit: audit.dropped_unknown,
}

Tiers = dict[str, int]

_TIERS: dict[Family, Callable[[PrefixAudit], Tiers]] = {
    PREFIX_HITS: lambda seen: {
        "device": seen.device_hits,
        "host": seen.host_hits,
        "disk": seen.disk_hits,
    },
    PREFIX_BLOCKS: lambda seen: _blocks(seen),
    PREFIX_BYTES: lambda seen: {tier: n * seen.block_bytes for tier, n in _blocks(seen).items()},
}


def _blocks(seen: PrefixAudit) -> Tiers:
    return {"device": seen.device_blocks, "host": seen.host_blocks, "disk": seen.disk_blocks}


_LINKS: dict[Family, Callable[[list[LinkAudit]], float]] = {
    LINKS: len,
    CREDITS: lambda links: sum(link.free_pieces if link.sending else link.credited_pieces for link in links),
    WINDOW: lambda links: sum(link.window_pieces for link in links),
}


@dataclass(frozen=True)
class WorkerMetrics:
    """What is read at a scrape. `audit` asks the engine, on the loop that made this."""

    labels: dict[str, str]
    audit: Callable[[], Awaitable[Audit]]
    loop: asyncio.AbstractEventLoop
    restarts: int
    poll_lag: Histogram
    live_streams: Callable[[], int]
    registration: Registration | None

    def register(self, registry: CollectorRegistry, engine_pid: int) -> None:
        """Declares all of it, and the figures of both processes."""
        registry.register(ScrapedCollector(self._read))
        process_metrics(registry)
        process_metrics(registry, "engine", engine_pid)

    def _read(self) -> Iterator[Metric]:
        """Runs on the scraper's thread; an engine that does not answer fails the scrape."""
        audit = self._fetch()
        for family, read in _READ.items():
            yield family.metric([((), read(audit))], self.labels)
        for family, of_links in _LINKS.items():
            directions = (("out", _links(audit, True)), ("in", _links(audit, False)))
            yield family.metric([((name,), of_links(links)) for name, links in directions], self.labels)
        for family, of_tiers in _TIERS.items():
            counted = of_tiers(audit.prefixes)
            yield family.metric([((tier,), count) for tier, count in counted.items()], self.labels)
        yield RESTARTS.metric([((), self.restarts)], self.labels)
        yield STREAMS.metric([((), self.live_streams())], self.labels)
        yield POLL_LAG.histograms([((), self.poll_lag)], self.labels)
        for family, value in _of_registration(self.registration):
            yield family.metric([((), value)], self.labels)

    def _fetch(self) -> Audit:
        asked = asyncio.run_coroutine_threadsafe(_await(self.audit()), self.loop)
        try:
            return asked.result(_READ_S)
        except TookTooLongError as error:
            asked.cancel()
            raise BatonError(ErrorKind.DEADLINE, f"no audit within {_READ_S} s") from error


def _of_registration(registration: Registration | None) -> list[tuple[Family, float]]:
    """Nothing where no state is kept."""
    if registration is None:
        return []
    state = registration.state
    return [
        (REDIS_UP, not state.away),
        (REDIS_OUTAGES, state.counters.outages),
        (REGISTERED, registration.registered),
        (RENEWALS_FAILED, state.counters.renewals_failed),
    ]


async def _await(asked: Awaitable[Audit]) -> Audit:
    return await asked
