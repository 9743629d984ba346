"""A worker's metrics: the name, help and source of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as PrometheusMetric

from baton.base.errors import BatonError, ErrorKind
from baton.v1.worker_pb2 import DraftReport, IntegrityReport, LinkReport, PrefixCacheReport
from services.common.observability.metrics import (
    Metric,
    Samples,
    ScrapedCollector,
    Source,
    Value,
    collect,
    process_metrics,
)
from services.common.observability.tracing.recorder import SpanRecorder
from services.decode.servicer import DecodeServicer
from services.worker.front.probes import WorkerProbes

if TYPE_CHECKING:
    from services.worker.front.registration import Registration

_SCRAPE_TIMEOUT_S = 5.0


def _links(read: Callable[[Sequence[LinkReport]], float]) -> Callable[[IntegrityReport], Samples]:
    """Reads a figure of the outgoing and of the incoming links."""

    def by_direction(report: IntegrityReport) -> Samples:
        outgoing = [link for link in report.links if link.sending]
        incoming = [link for link in report.links if not link.sending]
        return [(("out",), read(outgoing)), (("in",), read(incoming))]

    return by_direction


def _by_tier(device: float, host: float, disk: float) -> Samples:
    return [(("device",), device), (("host",), host), (("disk",), disk)]


def _cached_blocks(cache: PrefixCacheReport, unit: int = 1) -> Samples:
    return _by_tier(cache.device_blocks * unit, cache.host_blocks * unit, cache.disk_blocks * unit)


def _drafts(read: Callable[[DraftReport], Sequence[int]]) -> Callable[[IntegrityReport], Samples]:
    """Reads counts of drafts by depth, of each source."""

    def by_source_and_depth(report: IntegrityReport) -> Samples:
        return [
            ((drafts.source, str(depth)), count)
            for drafts in report.drafts
            for depth, count in enumerate(read(drafts), 1)
        ]

    return by_source_and_depth


def _device_memory(report: IntegrityReport) -> Samples:
    samples: list[tuple[tuple[str, ...], float]] = []
    for device in report.device_memory:
        uses = {"weights": device.weights_bytes, "kv": device.kv_bytes}
        if device.total_bytes:
            uses["other"] = device.used_bytes - sum(uses.values())
            uses["free"] = device.total_bytes - device.used_bytes
        samples += [((str(device.index), use), size) for use, size in uses.items()]
    return samples


def _experts(report: IntegrityReport) -> Samples:
    if not report.HasField("experts"):
        return []
    return [(("layer",), report.experts.count), (("token",), report.experts.taken)]


def _usable_pieces(links: Sequence[LinkReport]) -> float:
    return sum(link.free_pieces if link.sending else link.credited_pieces for link in links)


def _metric(
    name: str, help_text: str, read: Callable[[Source], Value | Samples | None], *labels: str
) -> Metric[Source]:
    return Metric(f"baton_worker_{name}", help_text, read, labels)


# fmt: off
REPORTED: tuple[Metric[IntegrityReport], ...] = (
    _metric("devices", "Devices that divide the model among them (`engine.tensor_parallel`).",
            lambda a: a.devices),
    _metric("device_memory_bytes",
            "Memory of each device when the worker's start had ended, by use: weights, kv, other (buffers, "
            "kernels, CUDA itself, other processes) and free; on a CPU weights and kv alone. `device` is a "
            "GPU's index on its host, else counts from 0.", _device_memory, "device", "use"),
    _metric("slots", "Sequences that can be decoded at once.", lambda a: a.load.slots),
    _metric("free_slots", "Slots without a sequence or reservation.", lambda a: a.load.free_slots),
    _metric("blocks", "KV blocks.", lambda a: a.load.blocks),
    _metric("free_blocks", "Free KV blocks, including cached ones that may be evicted.",
            lambda a: a.load.free_blocks),
    _metric("pinned_blocks", "KV blocks that a transfer still reads.", lambda a: a.pinned_blocks),
    _metric("live_tickets", "Tickets that have not ended, including those of running sequences.",
            lambda a: a.live_tickets),
    _metric("tombstones", "Records of ended attempts, by which late calls for them are refused.",
            lambda a: a.tombstones),
    _metric("queued_prefills", "Prompts that are queued, running or being handed over.",
            lambda a: a.load.queued_prefills),
    _metric("queued_prefill_tokens", "Prompt tokens that have not been computed yet.",
            lambda a: a.load.queued_prefill_tokens),
    _metric("prompts_total", "Prompts that have been computed completely.", lambda a: a.prompts_run),
    _metric("prompt_tokens_total", "Prompt tokens that have been computed.", lambda a: a.prompt_tokens_run),
    _metric("decode_steps_total", "Decode steps that have run.", lambda a: a.decode_steps),
    _metric("speculative_steps_total", "Decode steps that were launched with rows for drafts.",
            lambda a: a.speculative_steps),
    _metric("lookahead_cells",
            "Cells of the lookahead table that are in use, each with the continuation of a few tokens; 0 "
            "without a table.", lambda a: a.lookahead_cells),
    _metric("lookahead_replaced_total",
            "Cells of the lookahead table whose content was replaced: by that of other tokens, or by a "
            "continuation that outputs agreed on more often.", lambda a: a.lookahead_replaced),
    _metric("sequence_steps_total",
            "Sequences that decode steps advanced, counted for each step: a sequence has 1 + accepted drafts "
            "/ these tokens of a step.", lambda a: a.sequence_steps),
    _metric("draft_rows_total",
            "Draft tokens that decode steps verified, by where the drafts were found: text (the sequence's "
            "own), prediction (the request's) or table (shared by a tenant's requests), and by depth: 1 for "
            "a sequence's first draft of a step. The depth is approximate where several steps are seen to "
            "end together.", _drafts(lambda drafts: drafts.rows), "source", "depth"),
    _metric("accepted_drafts_total", "Draft tokens that were accepted, among baton_worker_draft_rows_total.",
            _drafts(lambda drafts: drafts.accepted), "source", "depth"),
    _metric("experts",
            "Experts of a layer: all, and those that a token takes. Only where the model is a mixture of "
            "experts.", _experts, "of"),
    _metric("expert_imbalance",
            "How many times as many tokens a layer's busiest expert had as its mean one over the last "
            "minute, on average over the layers; 0: there were none. Only where the model is a mixture of "
            "experts.", lambda a: a.experts.imbalance if a.HasField("experts") else None),
    _metric("decoded_tokens_total", "Tokens sampled by decode steps.", lambda a: a.tokens_decoded),
    _metric("decode_step_seconds_total", "Time spent in decode steps.", lambda a: a.decode_busy_ns / 1e9),
    _metric("prefill_step_seconds_total", "Time spent in prefill steps.", lambda a: a.prefill_busy_ns / 1e9),
    _metric("ring_full_steps_total",
            "Decode steps that advanced no sequence because the output ring was full.",
            lambda a: a.ring_full_steps),
    _metric("stalled_rows_total",
            "Paused rows, which a decode step did not advance: no KV block or grammar mask for their next "
            "token, or no room in the attention kernel's list.", lambda a: a.stalled_rows),
    _metric("block_allocations_total", "Incremental allocations of KV blocks to running sequences.",
            lambda a: a.block_grants),
    _metric("swapped_out_sequences_total", "Sequences whose KV blocks were swapped out to host memory.",
            lambda a: a.sequences_swapped_out),
    _metric("preempted_sequences_total",
            "Sequences that were preempted and returned to the router for recomputation.",
            lambda a: a.sequences_preempted),
    _metric("prefix_hit_tokens_total", "Prompt tokens whose KV was found in the prefix cache.",
            lambda a: a.prefixes.hit_tokens),
    _metric("prefix_missed_tokens_total",
            "Prompt tokens whose KV was not in the prefix cache and had to be computed.",
            lambda a: a.prefixes.missed_tokens),
    _metric("prefix_evicted_blocks_total", "Cached KV blocks that were evicted from the device.",
            lambda a: a.prefixes.evicted_blocks),
    _metric("prefix_idle_blocks", "Cached KV blocks on the device that no sequence uses.",
            lambda a: a.prefixes.idle_blocks),
    _metric("prefix_disk_dropped_blocks_total",
            "Cached KV blocks that were dropped because the disk was too slow or failed.",
            lambda a: a.prefixes.disk_dropped),
    _metric("prefix_disk_corrupt_blocks_total", "Files of cached KV blocks whose content was corrupt.",
            lambda a: a.prefixes.disk_corrupt),
    _metric("prefix_disk_failures_total", "Reads and writes of cached KV blocks that the disk failed.",
            lambda a: a.prefixes.disk_failed),
    _metric("prefix_disk_off", "1 where the disk of the prefix cache is not in use since it fails, else 0.",
            lambda a: a.prefixes.disk_off),
    _metric("shipped_blocks_total", "KV blocks that were sent completely.", lambda a: sum(a.blocks_shipped)),
    _metric("shipped_bytes_total", "Bytes of the KV blocks that were sent.", lambda a: a.bytes_shipped),
    _metric("received_blocks_total", "KV blocks that were received completely.", lambda a: a.blocks_received),
    _metric("received_bytes_total", "Bytes of KV that were received and verified.",
            lambda a: a.bytes_received),
    _metric("handoffs_total", "Handoffs whose sequence was activated in a slot of this worker.",
            lambda a: a.handoffs_committed),
    _metric("local_handoffs_total",
            "Handoffs from this worker's own prefill, among baton_worker_handoffs_total.",
            lambda a: a.handoffs_local),
    _metric("handoff_cached_blocks_total",
            "KV blocks of handoffs that were in this worker's prefix cache and therefore not sent.",
            lambda a: a.blocks_resident),
    _metric("handoff_cached_bytes_total", "Bytes of the blocks in baton_worker_handoff_cached_blocks_total.",
            lambda a: a.bytes_resident),
    _metric("quarantined_pieces", "Staging pieces of broken links that a sender may still write to.",
            lambda a: sum(link.quarantined_pieces for link in a.links)),
    _metric("broken_links_total", "Links that broke.", lambda a: a.links_broken),
    _metric("link_fallbacks_total",
            "Links that fell back to a slower transport because the preferred one was unavailable or broke; "
            "the log states why.", lambda a: a.link_fallbacks),
    _metric("links_returned_total",
            "Links that returned from a slower to a better transport without losing a transfer.",
            lambda a: a.links_returned),
    _metric("checksum_failures_total", "Pieces whose checksum was wrong.", lambda a: a.checksum_failures),
    _metric("dropped_unknown_total", "Messages about unknown or ended transfers and slots.",
            lambda a: a.dropped_unknown),
    _metric("prefix_hit_blocks_total", "Prefix cache hits in KV blocks, by the tier that had the block.",
            lambda a: _by_tier(a.prefixes.device_hits, a.prefixes.host_hits, a.prefixes.disk_hits),
            "tier"),
    _metric("prefix_blocks", "Cached KV blocks, by tier.", lambda a: _cached_blocks(a.prefixes), "tier"),
    _metric("prefix_bytes", "Bytes of cached KV blocks, by tier.",
            lambda a: _cached_blocks(a.prefixes, a.prefixes.block_bytes), "tier"),
    _metric("links", "Open links.", _links(len), "direction"),
    _metric("staging_credits", "Staging pieces that may be filled; all while no transfer runs.",
            _links(_usable_pieces), "direction"),
    _metric("staging_pieces", "Staging pieces of all links.",
            _links(lambda links: sum(link.window_pieces for link in links)), "direction"),
)
FRONT: tuple[Metric[WorkerMetrics], ...] = (
    _metric("restarts_total", "Restarts of this worker by its supervisor.", lambda worker: worker.restarts),
    _metric("exchange_timeouts_total",
            "Ends of this worker since one of its devices waited for another past the deadline, among those "
            "that its supervisor has seen; counted once it has started again. 0 without a supervisor.",
            lambda worker: worker.exchange_timeouts),
    _metric("live_streams", "Reservations and sequences that may still emit tokens.",
            lambda worker: worker.decode.live),
    _metric("dropped_outputs_total",
            "Ended outputs that were dropped before a slow router had taken them, since those that are kept "
            "took too much memory; another attempt continues each.",
            lambda worker: worker.decode.outputs_dropped),
    _metric("unknown_sequences_total",
            "Sequences whose output was dropped since no reservation of theirs was known; 0 unless Baton has "
            "a defect.", lambda worker: worker.decode.unknown_sequences),
    _metric("guided_sequences", "Sequences whose grammar masks are computed.",
            lambda worker: 0 if worker.decode.masks is None else worker.decode.masks.followed),
    _metric("grammars_total", "Grammars of guided requests that were prepared for a prompt or a slot.",
            lambda worker: 0 if worker.decode.masks is None else worker.decode.masks.opened),
    _metric("failed_grammars_total", "Grammars that were refused, or whose sequence could not continue.",
            lambda worker: 0 if worker.decode.masks is None else worker.decode.masks.failed),
    _metric("mask_process_ends_total",
            "Ends of mask processes and of the compile process; they start again with the next grammar.",
            lambda worker: 0 if worker.decode.masks is None else worker.decode.masks.restarts),
    _metric("ready", "1 where the worker may get new work (/ready), else 0.",
            lambda worker: worker.probes.unready() is None),
    _metric("canary_failures_total", "Canary generations that failed; absent where none run.",
            lambda worker: worker.probes.canary_failures),
    _metric("ring_poll_lag_seconds", "Delay of the front's polls of the output ring.",
            lambda worker: worker.decode.poll_lag),
    _metric("trace_spans_exported_total", "Spans that the collector of traces has taken; absent without one.",
            lambda worker: None if worker.spans is None else worker.spans.exported),
    _metric("trace_spans_dropped_total",
            "Spans that were lost, by reason (queue_full, export_failed); absent without a collector.",
            lambda worker: None if worker.spans is None else worker.spans.dropped(), "reason"),
)
# Only with state.
REGISTRATION: tuple[Metric[Registration], ...] = (
    _metric("redis_up", "1 where Redis answered last, else 0; absent without state.",
            lambda r: not r.state.unavailable),
    _metric("redis_outages_total", "Outages of Redis.", lambda r: r.state.counters.outages),
    _metric("registered", "1 where the registry lists this worker, else 0.",
            lambda r: r.registered),
    _metric("failed_renewals_total", "Unanswered renewals of the registration.",
            lambda r: r.state.counters.renewals_failed),
)
# fmt: on
FAMILIES: tuple[Metric[Any], ...] = (*REPORTED, *FRONT, *REGISTRATION)


@dataclass(frozen=True)
class WorkerMetrics:
    """Reads a worker's metrics at each scrape. `report` requests the engine's counts, within `loop`."""

    labels: dict[str, str]
    report: Callable[[], Coroutine[Any, Any, IntegrityReport]]
    loop: asyncio.AbstractEventLoop
    restarts: int
    exchange_timeouts: int
    decode: DecodeServicer
    probes: WorkerProbes
    registration: Registration | None
    spans: SpanRecorder | None = None

    def register(self, registry: CollectorRegistry, engine_pid: int) -> None:
        """Registers all metrics, and those of both processes."""
        registry.register(ScrapedCollector(self._read))
        process_metrics(registry)
        process_metrics(registry, "engine", engine_pid)

    def _read(self) -> Iterator[PrometheusMetric]:
        """Runs on the scraper's thread; an engine that does not answer fails the scrape."""
        yield from collect(REPORTED, self._fetch(), self.labels)
        yield from collect(FRONT, self, self.labels)
        if self.registration is not None:
            yield from collect(REGISTRATION, self.registration, self.labels)

    def _fetch(self) -> IntegrityReport:
        request = asyncio.run_coroutine_threadsafe(self.report(), self.loop)
        try:
            return request.result(_SCRAPE_TIMEOUT_S)
        except FutureTimeoutError as error:
            request.cancel()
            raise BatonError(
                ErrorKind.DEADLINE, f"no integrity report within {_SCRAPE_TIMEOUT_S} s"
            ) from error
