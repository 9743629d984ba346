"""The canary generation of an engine's decode side: a few tokens in a slot of its own.

They are decoded like any others. The first one is at position 0, so no KV of a prompt is needed. The sequence
has no ticket and no stream at a router. Its blocks come from the pools and are never named in the prefix
cache; where no other block is free, the one least recently used there is evicted. Its tokens and steps are
left out of the integrity report; it has no drafts, so that each step gives it one token.
"""

from __future__ import annotations

from baton.base.errors import BatonError, ErrorKind
from baton.engine.decode.slots import Grant, SlotPool
from baton.engine.executor.decode_loop import DecodeLoop
from baton.engine.memory.blocks import BlockTables
from baton.engine.sequence import Limits, SamplingParams
from baton.v1.engine_pb2 import CanaryEvent
from services.worker.engine.startup.model_loader import LoadedModel

# Tokens that are decoded, behind the one that the sequence is admitted with.
CANARY_TOKENS = 4


class DecodeCanary:
    """The canary sequences of a decode worker, at most one at a time. All calls come from the engine's
    loop."""

    def __init__(self, model: LoadedModel, loop: DecodeLoop, slots: SlotPool) -> None:
        self._pools = model.pools
        self._tokens = min(CANARY_TOKENS, model.max_context_tokens - 1)
        self._loop = loop
        self._slots = slots
        self._grant: Grant | None = None
        self._admitted = False
        # Tokens, and as many steps, of canaries that have ended; the counts reported last.
        self._decoded = 0
        self._reported_tokens = self._reported_steps = 0

    def grant(self, *, crowded: bool) -> CanaryEvent:
        """Takes a slot and blocks for the sequence, which `admit` starts. `crowded`: running sequences wait
        for blocks.

        Raises BatonError: CONFLICT where one runs, OVERLOADED where there is no slot or block for it.
        """
        if self._grant is not None:
            raise BatonError(ErrorKind.CONFLICT, "a canary generation is running already")
        if crowded:
            raise BatonError(ErrorKind.OVERLOADED, "running sequences wait for KV blocks")
        grant = self._grant = self._allocate()
        return CanaryEvent(slot=grant.slot, generation=grant.generation, tokens=self._tokens + 1)

    def admit(self) -> None:
        """Starts the sequence, since its front knows the slot. Raises BatonError(CONFLICT) where none waits
        for that."""
        grant = self._grant
        if grant is None or self._admitted:
            raise BatonError(ErrorKind.CONFLICT, "no canary generation waits for its admission")
        self._admitted = True
        sampling = SamplingParams()
        entry = self._loop.begin_admission(
            grant,
            token_ids=(),
            prompt_length=1,
            end=self._tokens + 1,
            sampling=sampling,
            limits=Limits(self._tokens),
            most_drafts=0,
        )
        self._loop.complete(entry, token_ids=(), prompt_length=1, sampling=sampling, last_token=0)
        self._loop.admit(entry)

    def cancel(self) -> None:
        """Ends the sequence where there is one; the output ring reports the end of one that was admitted."""
        grant = self._grant
        if grant is None:
            return
        if self._admitted:
            self._loop.cancel(grant.slot, grant.generation)
        else:
            self._release(grant)

    def slot_ended(self, slot: int, generation: int) -> bool:
        """Frees the sequence's slot and blocks; False where that slot is not the canary's."""
        grant = self._grant
        if grant is None or (grant.slot, grant.generation) != (slot, generation):
            return False
        self._decoded += self._loop.progress.progress(slot, generation).steps
        self._release(grant)
        return True

    def owned_blocks(self) -> list[BlockTables]:
        """The block tables of the running sequence."""
        return [] if self._grant is None else [self._grant.blocks]

    def without(self, tokens_decoded: int, sequence_steps: int) -> tuple[int, int]:
        """Decoded tokens and sequences' steps without those of canaries; never less than returned before,
        since a canary that runs is left out at its end."""
        self._reported_tokens = max(self._reported_tokens, tokens_decoded - self._decoded)
        self._reported_steps = max(self._reported_steps, sequence_steps - self._decoded)
        return self._reported_tokens, self._reported_steps

    def _release(self, grant: Grant) -> None:
        self._grant, self._admitted = None, False
        self._pools.release(grant.blocks)
        self._slots.release(grant.slot, grant.generation)

    def _allocate(self) -> Grant:
        slot, generation = self._slots.grant()
        try:
            return Grant(slot, generation, self._pools.allocate(self._tokens), self._tokens)
        except BatonError:
            self._slots.release(slot, generation)
            raise
