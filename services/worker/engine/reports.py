"""Messages for the front about what an engine is, owns and has done."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from baton.engine.executor.executor import StepExecutor
from baton.engine.expert_load import ExpertLoad
from baton.engine.model.tensors import parameter_counts
from baton.engine.speculation.verified_drafts import SOURCES
from baton.perf_model.messages import to_message
from baton.v1 import worker_pb2
from baton.v1.engine_pb2 import ReadyEvent
from kvtransfer.transports.registry import reach_of
from services.common.config.worker import WorkerConfig
from services.worker.engine.decode.side import DecodeSide
from services.worker.engine.prefill.step_pipeline import PrefillPipeline
from services.worker.engine.startup.model_loader import LoadedModel


@dataclass(frozen=True, slots=True)
class EngineReports:
    """Counts of the resources and the work of one engine, as messages."""

    model: LoadedModel
    decode: DecodeSide
    prefill: PrefillPipeline
    executor: StepExecutor
    memory: Sequence[worker_pb2.DeviceMemory] = ()
    expert_load: ExpertLoad | None = None

    def ready(self, config: WorkerConfig) -> ReadyEvent:
        """Describes the engine. Its pool: all that two workers must have in common for a request to pass
        between them unchanged."""
        model = self.model
        blocks = ",".join(str(group.block_tokens) for group in model.layout.groups)
        return ReadyEvent(
            fingerprint=model.fingerprint,
            max_context_tokens=model.max_context_tokens,
            vocab_size=model.config.vocab_size,
            load=self.load(),
            device=str(model.device),
            transfer_endpoints=[endpoint.message() for endpoint in self.decode.endpoints],
            cache_dtype=model.layout.cache_dtype if self.decode.prefix_cache is not None else "",
            pool=worker_pb2.Pool(
                model=config.served_name,
                checkpoint=model.checkpoint,
                tokenizer=model.tokenizer,
                kv_format=f"{model.layout.cache_dtype}/{blocks}/{config.transfer.kv_wire}",
                numerics="exact" if model.exact else "fast",
            ),
            weight_format=model.weight_format,
            limits=worker_pb2.WorkerLimits(
                kv_tokens=model.pools.sequence_tokens,
                max_logprobs=model.max_logprobs,
                max_prefills=config.engine.prefill_queue,
                sends_over=reach_of(self.prefill.sender.connectors),
                receives_over=[endpoint.reach for endpoint in self.decode.endpoints],
            ),
        )

    def load(self) -> worker_pb2.Load:
        """The counts by which the router places requests."""
        return worker_pb2.Load(
            slots=self.decode.slots.total,
            free_slots=self.decode.slots.free,
            blocks=self.model.pools.total,
            free_blocks=self.model.pools.free,
            block_tokens=self.model.layout.groups[0].block_tokens,
            queued_prefills=len(self.prefill.jobs),
            queued_prefill_tokens=self.prefill.steps.scheduler.queued_tokens,
            context_tokens=self.decode.allocation.context_tokens,
            step_costs=self._step_costs(),
        )

    def integrity_report(self, *, check_pools: bool = True) -> worker_pb2.IntegrityReport:
        """Counts of everything that a leak would show in; with `check_pools` the block pools are checked
        against the owners of their blocks."""
        prompts, decode, handoffs = self.prefill.steps, self.decode.loop, self.decode.handoffs
        allocation, sender = self.decode.allocation, self.prefill.sender.counters
        decoded, rates = decode.tokens_decoded, decode.draft_rates
        tokens, steps = self.decode.canary.without(
            decoded, decoded if rates is None else rates.verified.steps
        )
        report = worker_pb2.IntegrityReport(
            load=self.load(),
            engine_pid=os.getpid(),
            host=socket.gethostname(),
            device=str(self.model.device),
            devices=len(self.model.ranks),
            prompts_run=prompts.prompts_run,
            prompt_tokens_run=prompts.tokens_run,
            decode_steps=decode.ring.steps,
            tokens_decoded=tokens,
            sequence_steps=steps,
            ring_full_steps=decode.ring.full_steps,
            stalled_rows=decode.ring.stalled_rows,
            block_grants=allocation.allocations,
            sequences_preempted=allocation.preempted,
            sequences_swapped_out=allocation.swapped_out,
            speculative_steps=self.executor.speculative_steps,
            tokens_per_step=allocation.tokens_per_step,
            lookahead_cells=0 if decode.lookahead is None else decode.lookahead.used,
            lookahead_replaced=0 if decode.lookahead is None else decode.lookahead.replaced,
            drafts=self._drafts(),
            block_bytes=self.decode.handoffs.block_bytes,
            blocks_shipped=sender.blocks_shipped,
            bytes_shipped=sender.bytes_shipped,
            handoffs_committed=handoffs.committed,
            handoffs_local=handoffs.committed_locally,
            blocks_resident=handoffs.resident_blocks,
            bytes_resident=handoffs.resident_bytes,
            pinned_blocks=self.model.pools.pinned,
            live_tickets=self.decode.tickets.live,
            tombstones=self.decode.tickets.tombstones,
            links=self._links(),
            dropped_unknown=sender.dropped_unknown + self.decode.reserved.dropped_unknown,
            integrity_error=self._integrity_error() if check_pools else "",
            link_fallbacks=sender.link_fallbacks,
            links_returned=sender.links_returned,
            links_broken=sender.links_broken,
            slot_states=self.decode.reserved.slot_states(),
            recent_decode=worker_pb2.RecentSteps(**decode.times.recent()._asdict()),
            recent_prefill=worker_pb2.RecentSteps(**prompts.times.recent()._asdict()),
            decode_busy_ns=round(decode.times.busy_s * 1e9),
            prefill_busy_ns=round(prompts.times.busy_s * 1e9),
            prefixes=self._prefixes(),
            kv_bytes=self.model.cache.nbytes,
            kv_dtype=self.model.layout.cache_dtype,
            experts=self._experts(),
            device_memory=self.memory,
        )
        if self.decode.receiver is not None:
            receiver = self.decode.receiver.counters
            report.blocks_received = sum(receiver.blocks_received)
            report.bytes_received = receiver.bytes_received
            report.dropped_unknown += receiver.dropped_unknown
            report.checksum_failures = receiver.checksum_failures
            report.links_broken += receiver.links_broken
        return report

    def _step_costs(self) -> worker_pb2.StepCosts:
        recent = self.prefill.steps.times.recent()
        computing = recent.steps * recent.mean_ms / 1e3  # of the last second
        costs = self.decode.costs(computing if self.prefill.steps.state.in_turn else 0.0)
        return to_message(self.prefill.steps.scheduler.cost.added_to(costs))

    def _drafts(self) -> list[worker_pb2.DraftReport]:
        rates = self.decode.loop.draft_rates
        if rates is None:
            return []
        verified = zip(SOURCES, rates.verified.rows, rates.verified.accepted, strict=True)
        return [
            worker_pb2.DraftReport(source=source, rows=map(round, rows), accepted=map(round, accepted))
            for source, rows, accepted in verified
        ]

    def _experts(self) -> worker_pb2.ExpertsReport | None:
        config = self.model.config
        if config.experts is None or self.expert_load is None:
            return None
        total, active = parameter_counts(config)
        return worker_pb2.ExpertsReport(
            count=config.experts.count,
            taken=config.experts.top_k,
            total_parameters=total,
            active_parameters=active,
            imbalance=self.expert_load.imbalance,
        )

    def _links(self) -> list[worker_pb2.LinkReport]:
        receiver = self.decode.receiver
        return [*self.prefill.sender.links, *(receiver.links if receiver is not None else ())]

    def _prefixes(self) -> worker_pb2.PrefixCacheReport | None:
        cache = self.decode.prefix_cache
        if cache is None:
            return None
        cached, stored, hits = self.model.pools.cached, cache.stored, cache.hit_blocks
        return worker_pb2.PrefixCacheReport(
            hit_tokens=cache.hit_tokens,
            missed_tokens=cache.missed_tokens,
            device_blocks=len(cached),
            idle_blocks=cached.idle,
            evicted_blocks=cached.evicted,
            device_hits=hits["device"],
            host_hits=hits["host"],
            disk_hits=hits["disk"],
            host_blocks=stored.host_blocks,
            disk_blocks=stored.disk_blocks,
            block_bytes=sum(group.block_bytes for group in self.model.layout.groups),
            disk_dropped=stored.disk_dropped,
            disk_corrupt=stored.disk_corrupt,
            disk_failed=stored.disk_failed,
            disk_off=stored.disk_off,
        )

    def _integrity_error(self) -> str:
        owned = [
            *self.decode.reserved.owned_blocks(),
            *self.decode.canary.owned_blocks(),
            *self.prefill.jobs.owned_blocks(),
        ]
        try:
            self.model.pools.check_integrity(owned)
        except RuntimeError as error:
            return str(error)
        return ""
