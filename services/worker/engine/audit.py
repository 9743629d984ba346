"""What an engine owns and has done, as messages for its front."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from itertools import chain

from baton.engine.memory.blocks import BlockTables
from baton.engine.prefix_cache.cache import PrefixCache
from baton.v1.worker_pb2 import Audit, LinkAudit, Load, PrefixAudit
from services.worker.engine.components import DecodeComponents, PrefillComponents
from services.worker.engine.startup.model_loader import LoadedModel
from services.worker.engine.step_clock import StepClock


class EngineAudit:
    """Counts the resources and the work of one engine."""

    def __init__(
        self,
        *,
        model: LoadedModel,
        decode: DecodeComponents,
        prefill: PrefillComponents,
        prefix_cache: PrefixCache | None,
        decode_clock: StepClock,
        prefill_clock: StepClock,
        block_bytes: Sequence[int],
    ) -> None:
        """`block_bytes`: bytes of a block on the wire, by cache group."""
        self._model = model
        self._decode = decode
        self._prefill = prefill
        self._prefix_cache = prefix_cache
        self._decode_clock = decode_clock
        self._prefill_clock = prefill_clock
        self._block_bytes = tuple(block_bytes)

    def load(self) -> Load:
        """The counts by which the router places requests."""
        return Load(
            slots=self._decode.slots.total,
            free_slots=self._decode.slots.free,
            blocks=self._model.pools.total,
            free_blocks=self._model.pools.free,
            block_tokens=self._model.layout.groups[0].block_tokens,
            queued_prefills=len(self._prefill.jobs),
            queued_prefill_tokens=self._prefill.loop.scheduler.queued_tokens,
        )

    def report(self, *, integrity: bool = True) -> Audit:
        """Counts of everything that a leak would show in; with `integrity` the block pools are checked
        against the owners of their blocks."""
        prompts, decode, handoffs = self._prefill.loop, self._decode.loop, self._decode.handoffs
        allocation, sender = self._decode.allocation, self._prefill.sender.counters
        audit = Audit(
            load=self.load(),
            engine_pid=os.getpid(),
            host=socket.gethostname(),
            device=str(self._model.device),
            prompts_run=prompts.prompts_run,
            prompt_tokens_run=prompts.tokens_run,
            decode_steps=decode.ring.steps,
            tokens_decoded=decode.tokens_decoded,
            ring_full_steps=decode.ring.full_steps,
            stalled_rows=decode.ring.held_rows,
            block_allocations=allocation.allocations,
            sequences_preempted=allocation.preempted,
            sequences_swapped_out=allocation.swapped_out,
            block_bytes=self._block_bytes,
            blocks_shipped=sender.blocks_shipped,
            bytes_shipped=sender.bytes_shipped,
            handoffs_committed=handoffs.committed,
            handoffs_local=handoffs.committed_locally,
            blocks_unsent=handoffs.resident_blocks,
            bytes_unsent=handoffs.resident_bytes,
            pinned_blocks=self._model.pools.pinned,
            live_tickets=self._decode.tickets.live,
            tombstones=self._decode.tickets.tombstones,
            links=self._links(),
            dropped_unknown=sender.dropped_unknown + self._decode.reserved.dropped_unknown,
            integrity_error=self._integrity_error() if integrity else "",
            link_fallbacks=sender.link_fallbacks,
            links_returned=sender.links_returned,
            links_broken=sender.links_broken,
            slot_states=self._decode.reserved.slot_states(),
            recent_decode=self._decode_clock.recent(),
            recent_prefill=self._prefill_clock.recent(),
            decode_busy_ns=self._decode_clock.busy_ns,
            prefill_busy_ns=self._prefill_clock.busy_ns,
            prefixes=None if self._prefix_cache is None else self._prefixes(self._prefix_cache),
        )
        if self._decode.receiver is not None:
            receiver = self._decode.receiver.counters
            audit.blocks_received = sum(receiver.blocks_received)
            audit.bytes_received = receiver.bytes_received
            audit.dropped_unknown += receiver.dropped_unknown
            audit.checksum_failures = receiver.checksum_failures
            audit.links_broken += receiver.links_broken
        return audit

    def _links(self) -> list[LinkAudit]:
        receiver = self._decode.receiver
        return [*self._prefill.sender.links, *(receiver.links if receiver is not None else ())]

    def _prefixes(self, cache: PrefixCache) -> PrefixAudit:
        cached, stored, hits = self._model.pools.cached, cache.stored, cache.hit_blocks
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
            block_bytes=sum(group.block_bytes for group in self._model.layout.groups),
            disk_dropped=stored.disk_dropped,
            disk_corrupt=stored.disk_corrupt,
        )

    def _integrity_error(self) -> str:
        try:
            self._model.pools.check_integrity(self._owned_blocks())
        except RuntimeError as error:
            return str(error)
        return ""

    def _owned_blocks(self) -> Iterator[BlockTables]:
        return chain(self._decode.reserved.owned_blocks(), self._prefill.jobs.owned_blocks())
