"""The resources that a ticket stands for: a slot, and blocks that are allocated as its sequence grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.engine.decode.slots import Grant
from baton.engine.memory.blocks import BlockTables
from baton.engine.sequence import SamplingParams
from baton.engine.shared_memory.mailbox import Entry
from baton.v1.decode_pb2 import Ticket
from baton.v1.types_pb2 import Attempt

SlotKey = tuple[int, int]
"""(slot, generation), as the output ring identifies a sequence."""


@dataclass(slots=True, eq=False)
class PreparedSequence:
    """A validated commit record, prepared for its slot.

    `entry`: the mailbox entry that admits the sequence. `block_hashes`: of the prompt's full blocks.
    `complete`: whether `entry` has the first token.
    """

    entry: Entry
    sampling: SamplingParams
    block_hashes: tuple[bytes, ...]
    complete: bool = False


@dataclass(slots=True, eq=False)
class Reservation:
    """A reserved slot with its blocks, owned by `ReservedSlots` until the slot's output has been read.

    `token_count`: tokens that prefill computes. `end`: length at which the sequence ends. `tenant` scopes the
    block hashes; `block_hashes` are those of the resident blocks, from admission on those of all full blocks
    of the prompt. `resident_blocks`: leading blocks of each cache group that were in the prefix cache at
    reservation; they are shared and read-only. `token_ids`: the prompt and the output of earlier attempts,
    from admission on.
    """

    attempt: Attempt
    ticket: Ticket
    grant: Grant
    token_count: int
    end: int
    tenant: str = ""
    block_hashes: tuple[bytes, ...] = ()
    resident_blocks: int = 0
    # Whether each token is sampled by a mask of its own.
    masked: bool = False
    # A cancellation or preemption was posted to its slot; its blocks will be free soon.
    ending: bool = False
    token_ids: tuple[int, ...] = ()
    # This worker's own prefill writes the blocks, and none are sent.
    own_prefill: bool = False
    # The request's TPOT limit, where it states one.
    tpot_s: float | None = None
    # Tokens that the output is expected to contain, in which drafts are looked up; until admission.
    prediction: Sequence[int] = ()
    # The most drafts that a step may verify for the sequence; None: as many as the steps do.
    max_draft_tokens: int | None = None
    # Prepared when the record arrived ahead of its blocks.
    prepared: PreparedSequence | None = None
    # Stops the prefill of this worker that writes into these blocks, where one does.
    revoke_loan: Callable[[], None] | None = None

    @property
    def key(self) -> SlotKey:
        """The slot and its generation."""
        return self.grant.slot, self.grant.generation

    @property
    def most_tokens(self) -> int:
        """The most tokens that will have KV: the last token ends the sequence and has none."""
        return self.end - 1

    @property
    def blocks(self) -> BlockTables:
        """The reservation's blocks now, by cache group."""
        return self.grant.blocks

    def take_blocks(self) -> BlockTables:
        """Removes and returns all of its blocks."""
        blocks = self.grant.blocks
        self.grant = replace(self.grant, blocks=tuple(() for _ in blocks), capacity=0)
        return blocks

    def append_blocks(self, more: BlockTables, capacity: int) -> None:
        """Appends blocks; all of them then have room for `capacity` tokens."""
        blocks = tuple(mine + new for mine, new in zip(self.grant.blocks, more, strict=True))
        self.grant = replace(self.grant, blocks=blocks, capacity=capacity)

    def replace_first(self, prefix: BlockTables) -> BlockTables:
        """Replaces as many leading blocks by those of `prefix`; returns the replaced ones."""
        before = self.grant.blocks
        blocks = tuple(new + mine[len(new) :] for new, mine in zip(prefix, before, strict=True))
        self.grant = replace(self.grant, blocks=blocks)
        return tuple(mine[: len(new)] for new, mine in zip(prefix, before, strict=True))
