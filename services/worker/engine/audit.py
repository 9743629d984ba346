"""What an engine holds and has done, as the wire tells it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from baton.engine.memory.blocks import BlockTables
from baton.engine.prefix_cache.cache import PrefixCache
from baton.v1.worker_pb2 import Audit, Load, PrefixAudit
from services.worker.engine.parts import Parts


def load(parts: Parts) -> Load:
    """Counts for the router's choice."""
    scheduler = parts.prefill.loop.scheduler
    return Load(
        slots=parts.slots.total,
        free_slots=parts.slots.free,
        blocks=parts.model.pools.total,
        free_blocks=parts.model.pools.free,
        block_tokens=parts.model.layout.groups[0].block_tokens,
        queued_prefills=parts.prefill.jobs,
        queued_prefill_tokens=scheduler.queued_tokens,
    )


def make(parts: Parts, *, integrity: bool = True) -> Audit:
    """Counts of everything a leak would show in, and, with `integrity`, whether pools and owners agree."""
    loop = parts.prefill.loop
    sender, receiver = parts.sender.counters, parts.receiver.counters if parts.receiver else None
    audit = Audit(
        load=load(parts),
        engine_pid=os.getpid(),
        host=socket.gethostname(),
        device=str(parts.model.device),
        prompts_run=loop.prompts_run,
        prompt_tokens_run=loop.tokens_run,
        decode_steps=parts.decode_loop.ring.steps,
        tokens_decoded=parts.decode_loop.tokens_decoded,
        ring_full_steps=parts.decode_loop.ring.full_steps,
        stalled_rows=parts.decode_loop.ring.stalled_rows,
        block_grants=parts.decode.growth.grown,
        sequences_preempted=parts.decode.growth.moved,
        sequences_swapped_out=parts.decode.growth.paused,
        block_bytes=parts.decode.wire.block_bytes,
        blocks_shipped=sender.blocks_shipped,
        bytes_shipped=sender.bytes_shipped,
        handoffs_committed=parts.decode.handoffs_committed,
        handoffs_local=parts.decode.handoffs_local,
        blocks_resident=parts.decode.blocks_resident,
        bytes_resident=parts.decode.bytes_resident,
        pinned_blocks=parts.model.pools.pinned,
        live_tickets=parts.decode.tickets.live,
        tombstones=parts.decode.tickets.tombstones,
        links=[*parts.sender.links, *(parts.receiver.links if parts.receiver else [])],
        dropped_unknown=sender.dropped_unknown + parts.decode.dropped_unknown,
        integrity_error=_integrity_error(parts) if integrity else "",
        link_fallbacks=sender.link_fallbacks,
        links_returned=sender.links_returned,
        links_broken=sender.links_broken,
        slot_states=parts.decode.slot_states(),
        recent_decode=parts.decode_clock.recent(),
        recent_prefill=parts.prefill_clock.recent(),
        decode_busy_ns=parts.decode_clock.busy_ns,
        prefill_busy_ns=parts.prefill_clock.busy_ns,
        prefixes=None if parts.prefixes is None else _prefixes(parts, parts.prefixes),
    )
    if receiver is not None:
        audit.blocks_received = sum(receiver.blocks_received)
        audit.bytes_received = receiver.bytes_received
        audit.dropped_unknown += receiver.dropped_unknown
        audit.checksum_failures = receiver.checksum_failures
        audit.links_broken += receiver.links_broken
    return audit


def _prefixes(parts: Parts, prefixes: PrefixCache) -> PrefixAudit:
    cached, stored, hits = parts.model.pools.cached, prefixes.stored, prefixes.hit_blocks
    return PrefixAudit(
        hit_tokens=prefixes.hit_tokens,
        missed_tokens=prefixes.missed_tokens,
        device_blocks=len(cached),
        idle_blocks=cached.idle,
        evicted_blocks=cached.evicted,
        device_hits=hits["device"],
        host_hits=hits["host"],
        disk_hits=hits["disk"],
        host_blocks=stored.host_blocks,
        disk_blocks=stored.disk_blocks,
        block_bytes=sum(group.block_bytes for group in parts.model.layout.groups),
        disk_dropped=stored.disk_dropped,
        disk_corrupt=stored.disk_corrupt,
    )


def _integrity_error(parts: Parts) -> str:
    try:
        parts.model.pools.check_integrity(_owned(parts))
    except RuntimeError as error:
        return str(error)
    return ""


def _owned(parts: Parts) -> Iterator[BlockTables]:
    yield from parts.decode.owned_blocks()
    yield from parts.prefill.owned_blocks()
