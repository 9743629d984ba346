"""The table of a worker's metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import TimeoutError as TookTooLongError
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from baton.errors import BatonError, ErrorKind
from baton.v1.worker_pb2 import Audit, LinkAudit, PrefixAudit
from services.common.histogram import Histogram
from services.common.metrics import Family, ScrapedCollector, collect, process_metrics

if TYPE_CHECKING:
    from services.common.metrics import Samples
    from services.worker.front.registration import Registration

_AUDIT_S = 5.0


@dataclass(frozen=True)
class Scrape:
    """What the metrics of one scrape are read from."""

    audit: Audit
    restarts: int
    live_streams: int
    poll_lag: Histogram
    registration: Registration | None


@dataclass(frozen=True)
class WorkerMetrics:
    """The sources of a worker's metrics. `audit` asks the engine, on `loop`."""

    labels: dict[str, str]
    audit: Callable[[], Awaitable[Audit]]
    loop: asyncio.AbstractEventLoop
    restarts: int
    poll_lag: Histogram
    live_streams: Callable[[], int]
    registration: Registration | None

    def register(self, registry: CollectorRegistry, engine_pid: int) -> None:
        """Adds the worker's metrics, and those of its two processes."""
        registry.register(ScrapedCollector(self._read))
        process_metrics(registry)
        process_metrics(registry, "engine", engine_pid)

    def _read(self) -> Iterable[Metric]:
        """Runs on the scraper's thread. The scrape fails if the engine does not answer."""
        scrape = Scrape(
            self._fetch_audit(), self.restarts, self.live_streams(), self.poll_lag, self.registration
        )
        return collect(FAMILIES, scrape, self.labels)

    def _fetch_audit(self) -> Audit:
        pending = asyncio.run_coroutine_threadsafe(_await(self.audit()), self.loop)
        try:
            return pending.result(_AUDIT_S)
        except TookTooLongError as error:
            pending.cancel()
            raise BatonError(ErrorKind.DEADLINE, f"no audit within {_AUDIT_S} s") from error


async def _await(audit: Awaitable[Audit]) -> Audit:
    return await audit


def _by_direction(read: Callable[[list[LinkAudit]], float], worker: Scrape) -> Samples:
    links = worker.audit.links
    return [
        (("out",), read([link for link in links if link.sending])),
        (("in",), read([link for link in links if not link.sending])),
    ]


def _by_tier(read: Callable[[PrefixAudit], Mapping[str, int]], worker: Scrape) -> Samples:
    return [((tier,), count) for tier, count in read(worker.audit.prefixes).items()]


def _blocks(seen: PrefixAudit) -> Mapping[str, int]:
    return {"device": seen.device_blocks, "host": seen.host_blocks, "disk": seen.disk_blocks}


def _fillable_pieces(link: LinkAudit) -> int:
    return link.free_pieces if link.sending else link.credited_pieces


def _of_registration(read: Callable[[Registration], float], worker: Scrape) -> float | None:
    """A metric that exists only with a state store."""
    return None if worker.registration is None else read(worker.registration)


# fmt: off
FAMILIES: tuple[Family[Scrape], ...] = (
    Family("baton_worker_slots", "Sequences that can be decoded at once.",
           lambda worker: worker.audit.load.slots),
    Family("baton_worker_free_slots", "Slots without a sequence or a reservation.",
           lambda worker: worker.audit.load.free_slots),
    Family("baton_worker_blocks", "KV blocks.", lambda worker: worker.audit.load.blocks),
    Family("baton_worker_free_blocks", "Free KV blocks, including cached ones that no sequence uses.",
           lambda worker: worker.audit.load.free_blocks),
    Family("baton_worker_pinned_blocks", "KV blocks that a transfer is still reading.",
           lambda worker: worker.audit.pinned_blocks),
    Family("baton_worker_live_tickets", "Tickets that have not ended, including those of running sequences.",
           lambda worker: worker.audit.live_tickets),
    Family("baton_worker_tombstones", "Cancelled attempts that are still refused.",
           lambda worker: worker.audit.tombstones),
    Family("baton_worker_queued_prefills", "Prompts that wait, are computed or are handed over.",
           lambda worker: worker.audit.load.queued_prefills),
    Family("baton_worker_queued_prefill_tokens", "Prompt tokens not computed yet.",
           lambda worker: worker.audit.load.queued_prefill_tokens),
    Family("baton_worker_prompts_total", "Prompts computed.", lambda worker: worker.audit.prompts_run),
    Family("baton_worker_prompt_tokens_total", "Prompt tokens computed.",
           lambda worker: worker.audit.prompt_tokens_run),
    Family("baton_worker_decode_steps_total", "Decode steps that ran.",
           lambda worker: worker.audit.decode_steps),
    Family("baton_worker_decoded_tokens_total", "Tokens that decode steps sampled.",
           lambda worker: worker.audit.tokens_decoded),
    Family("baton_worker_decode_step_seconds_total", "Time spent in decode steps.",
           lambda worker: worker.audit.decode_busy_ns / 1e9),
    Family("baton_worker_prefill_step_seconds_total", "Time spent in prefill steps.",
           lambda worker: worker.audit.prefill_busy_ns / 1e9),
    Family("baton_worker_ring_full_steps_total",
           "Decode steps without progress because the output ring was full.",
           lambda worker: worker.audit.ring_full_steps),
    Family("baton_worker_held_rows_total",
           "Rows that did not advance in a decode step: no block for the next token, or attention list full.",
           lambda worker: worker.audit.held_rows),
    Family("baton_worker_growth_grants_total", "Allocations of more KV blocks for running sequences.",
           lambda worker: worker.audit.growth_grants),
    Family("baton_worker_paused_sequences_total", "Sequences swapped out to host memory.",
           lambda worker: worker.audit.sequences_paused),
    Family("baton_worker_moved_sequences_total",
           "Sequences preempted: given back to the router, to be prefilled again.",
           lambda worker: worker.audit.sequences_moved),
    Family("baton_worker_prefix_hit_tokens_total", "Prompt tokens whose KV was found in the prefix cache.",
           lambda worker: worker.audit.prefixes.hit_tokens),
    Family("baton_worker_prefix_missed_tokens_total", "Tokens of those prompts that were computed.",
           lambda worker: worker.audit.prefixes.missed_tokens),
    Family("baton_worker_prefix_evicted_blocks_total", "Cached KV blocks that were evicted from the device.",
           lambda worker: worker.audit.prefixes.evicted_blocks),
    Family("baton_worker_prefix_idle_blocks", "Cached KV blocks on the device that no sequence uses.",
           lambda worker: worker.audit.prefixes.idle_blocks),
    Family("baton_worker_prefix_disk_dropped_blocks_total",
           "Cached KV blocks that were not written to disk because it was too slow.",
           lambda worker: worker.audit.prefixes.disk_dropped),
    Family("baton_worker_prefix_disk_corrupt_blocks_total", "Files of KV blocks with a wrong checksum.",
           lambda worker: worker.audit.prefixes.disk_corrupt),
    Family("baton_worker_prefix_hit_blocks_total",
           "Cached KV blocks that prompts took over, by where they were; those from behind it go to the "
           "device.",
           partial(_by_tier, lambda seen: { "device": seen.device_hits, "host": seen.host_hits,
           "disk": seen.disk_hits, }), ("tier",)),
    Family("baton_worker_prefix_blocks", "Cached KV blocks, by where they are.",
           partial(_by_tier, _blocks), ("tier",)),
    Family("baton_worker_prefix_bytes", "Bytes of cached KV blocks, by where they are.",
           partial(_by_tier, lambda seen: {tier: n * seen.block_bytes for tier,
           n in _blocks(seen).items()}), ("tier",)),
    Family("baton_worker_shipped_blocks_total", "KV blocks sent whole.",
           lambda worker: sum(worker.audit.blocks_shipped)),
    Family("baton_worker_shipped_bytes_total", "Bytes of the KV blocks sent.",
           lambda worker: worker.audit.bytes_shipped),
    Family("baton_worker_received_blocks_total", "KV blocks that arrived whole.",
           lambda worker: worker.audit.blocks_received),
    Family("baton_worker_received_bytes_total", "Bytes that arrived and were verified.",
           lambda worker: worker.audit.bytes_received),
    Family("baton_worker_handoffs_total", "Handoffs whose sequence was admitted here.",
           lambda worker: worker.audit.handoffs_committed),
    Family("baton_worker_local_handoffs_total", "Admitted handoffs from this worker's own prefill.",
           lambda worker: worker.audit.handoffs_local),
    Family("baton_worker_unsent_blocks_total",
           "KV blocks of handoffs that were not sent because the prefix cache had them.",
           lambda worker: worker.audit.blocks_held),
    Family("baton_worker_unsent_bytes_total", "Bytes of the KV blocks that were not sent.",
           lambda worker: worker.audit.bytes_held),
    Family("baton_worker_links", "Open links.", partial(_by_direction, len), ("direction",)),
    Family("baton_worker_staging_credits", "Staging pieces that may be filled; all of them when idle.",
           partial(_by_direction, lambda links: sum(map(_fillable_pieces, links))), ("direction",)),
    Family("baton_worker_staging_pieces", "Staging pieces of all links.",
           partial(_by_direction, lambda links: sum(link.window_pieces for link in links)), ("direction",)),
    Family("baton_worker_quarantined_pieces", "Staging pieces of broken links that a sender may still write.",
           lambda worker: sum(link.quarantined_pieces for link in worker.audit.links)),
    Family("baton_worker_broken_links_total", "Links that broke.", lambda worker: worker.audit.links_broken),
    Family("baton_worker_link_fallbacks_total",
           "Links made over a slower transport than the first, which could not be had, or broke; the log "
           "line says why.", lambda worker: worker.audit.link_fallbacks),
    Family("baton_worker_links_returned_total",
           "Links of a slower transport that were replaced by one of a better transport, without losing a "
           "transfer.", lambda worker: worker.audit.links_returned),
    Family("baton_worker_checksum_failures_total", "Pieces that did not arrive as they were sent.",
           lambda worker: worker.audit.checksum_failures),
    Family("baton_worker_dropped_unknown_total", "Messages about unknown or ended transfers and slots.",
           lambda worker: worker.audit.dropped_unknown),
    Family("baton_worker_restarts_total", "Restarts of this worker by its supervisor.",
           lambda worker: worker.restarts),
    Family("baton_worker_live_streams", "Reservations and sequences whose slot may still emit.",
           lambda worker: worker.live_streams),
    Family("baton_worker_ring_poll_lag_seconds", "Delay of the front's polls of the output ring.",
           lambda worker: worker.poll_lag),
    Family("baton_worker_redis_up",
           "1 if Redis answered the last call, else 0; absent without a state store.",
           partial(_of_registration, lambda registration: not registration.state.away)),
    Family("baton_worker_redis_outages_total", "Outages of Redis.",
           partial(_of_registration, lambda registration: registration.state.counters.outages)),
    Family("baton_worker_registered", "1 if the registry has this worker, as far as it knows.",
           partial(_of_registration, lambda registration: registration.registered)),
    Family("baton_worker_failed_renewals_total", "Renewals of the registration that failed.",
           partial(_of_registration, lambda registration: registration.state.counters.renewals_failed)),
)
# fmt: on
