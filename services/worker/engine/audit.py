"""What an engine is, owns and has done, as messages for its front."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from baton.perf_model.messages import to_message
from baton.v1.engine_pb2 import ReadyEvent
from baton.v1.worker_pb2 import Audit, LinkAudit, Load, Pool, PrefixAudit, StepCosts, WorkerLimits
from kvtransfer.transports.registry import reach_of
from services.common.config.worker import WorkerConfig
from services.worker.engine.decode.side import DecodeSide
from services.worker.engine.prefill.step_pipeline import PrefillPipeline
from services.worker.engine.startup.model_loader import LoadedModel


@dataclass(frozen=True, slots=True)
class EngineAudit:
    """Counts the resources and the work of one engine."""

    model: LoadedModel
    decode: DecodeSide
    prefill: PrefillPipeline

    def ready(self, config: WorkerConfig) -> ReadyEvent:
        """What the engine is. Its pool: all that two workers must have in common for a request to pass
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
            pool=Pool(
                model=config.served_name,
                checkpoint=model.checkpoint,
                tokenizer=model.tokenizer,
                kv_format=f"{model.layout.cache_dtype}/{blocks}/{config.transfer.kv_wire}",
                numerics="exact" if model.exact else "fast",
            ),
            weight_format=model.weight_format,
            limits=WorkerLimits(
                kv_tokens=model.pools.sequence_tokens,
                max_logprobs=model.max_logprobs,
                max_prefills=config.engine.prefill_queue,
                sends_over=reach_of(self.prefill.sender.connectors),
                receives_over=[endpoint.reach for endpoint in self.decode.endpoints],
            ),
        )

    def load(self) -> Load:
        """The counts by which the router places requests."""
        return Load(
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

    def report(self, *, integrity: bool = True) -> Audit:
        """Counts of everything that a leak would show in; with `integrity` the block pools are checked
        against the owners of their blocks."""
        prompts, decode, handoffs = self.prefill.steps, self.decode.loop, self.decode.handoffs
        allocation, sender = self.decode.allocation, self.prefill.sender.counters
        audit = Audit(
            load=self.load(),
            engine_pid=os.getpid(),
            host=socket.gethostname(),
            device=str(self.model.device),
            prompts_run=prompts.prompts_run,
            prompt_tokens_run=prompts.tokens_run,
            decode_steps=decode.ring.steps,
            tokens_decoded=self.decode.canary.without(decode.tokens_decoded),
            ring_full_steps=decode.ring.full_steps,
            stalled_rows=decode.ring.stalled_rows,
            block_grants=allocation.allocations,
            sequences_preempted=allocation.preempted,
            sequences_swapped_out=allocation.swapped_out,
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
            integrity_error=self._integrity_error() if integrity else "",
            link_fallbacks=sender.link_fallbacks,
            links_returned=sender.links_returned,
            links_broken=sender.links_broken,
            slot_states=self.decode.reserved.slot_states(),
            recent_decode=self.decode.clock.recent(),
            recent_prefill=self.prefill.clock.recent(),
            decode_busy_ns=self.decode.clock.busy_ns,
            prefill_busy_ns=self.prefill.clock.busy_ns,
            prefixes=self._prefixes(),
            kv_bytes=sum(pool.nbytes for pool in self.model.cache.storage),
            kv_dtype=self.model.layout.cache_dtype,
        )
        if self.decode.receiver is not None:
            receiver = self.decode.receiver.counters
            audit.blocks_received = sum(receiver.blocks_received)
            audit.bytes_received = receiver.bytes_received
            audit.dropped_unknown += receiver.dropped_unknown
            audit.checksum_failures = receiver.checksum_failures
            audit.links_broken += receiver.links_broken
        return audit

    def _step_costs(self) -> StepCosts:
        recent = self.prefill.clock.recent()
        computing = recent.steps * recent.mean_ms / 1e3  # of the last second
        costs = self.decode.costs(computing if self.prefill.steps.state.in_turn else 0.0)
        return to_message(self.prefill.steps.scheduler.cost.added_to(costs))

    def _links(self) -> list[LinkAudit]:
        receiver = self.decode.receiver
        return [*self.prefill.sender.links, *(receiver.links if receiver is not None else ())]

    def _prefixes(self) -> PrefixAudit | None:
        cache = self.decode.prefix_cache
        if cache is None:
            return None
        cached, stored, hits = self.model.pools.cached, cache.stored, cache.hit_blocks
        return PrefixAudit(
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
