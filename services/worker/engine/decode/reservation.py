"""What a ticket stands for: a slot, and blocks that grow with its sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from baton.engine.decode.slots import Grant
from baton.engine.memory.blocks import BlockTables
from baton.engine.rings.mailbox import Entry
from baton.engine.sequence import SamplingParams
from baton.v1.decode_pb2 import Ticket
from baton.v1.types_pb2 import Attempt

Key = tuple[int, int]
"""(slot, generation)."""


class Admission(NamedTuple):
    """A record that was found right, as what its sequence's slot is told but for the last token; how its
    tokens are drawn, and the names of its prompt's blocks."""

    entry: Entry
    sampling: SamplingParams
    names: tuple[bytes, ...]


@dataclass(slots=True, eq=False)
class Reservation:
    """Owned by the decode side from Reserve until its slot's last word was read."""

    attempt: Attempt
    ticket: Ticket
    grant: Grant
    token_count: int
    end: int  # length of the whole sequence at which it ends
    # Its slot was told to end, by a cancel or to be moved; its blocks are on their way back.
    leaving: bool = False
    # The prompt and what earlier attempts emitted, from its admission on.
    token_ids: tuple[int, ...] = ()
    # Whose blocks these are; the names of the leading ones that were here when it was made, and from its
    # admission on of all full ones of the prompt.
    tenant: str = ""
    names: tuple[bytes, ...] = ()
    # How many of each cache group were here: the sequence reads them, and nobody writes them.
    held: int = 0
    # Made when the record came ahead of its blocks; whether it has the last token, when the commit was here
    # before the last byte.
    admission: Admission | None = None
    complete: bool = False

    @property
    def key(self) -> Key:
        """By what the output ring names it."""
        return self.grant.slot, self.grant.generation

    @property
    def most_tokens(self) -> int:
        """Tokens whose KV it may come to hold: the last one ends the sequence, and has none."""
        return self.end - 1

    @property
    def blocks(self) -> BlockTables:
        """Those it has now, by cache group."""
        return self.grant.blocks

    def give_up_blocks(self) -> BlockTables:
        """What it had; nothing is left to it."""
        blocks = self.grant.blocks
        self.grant = replace(self.grant, blocks=tuple(() for _ in blocks), capacity=0)
        return blocks

    def grow(self, more: BlockTables, capacity: int) -> None:
        """Takes blocks behind its own, which then hold `capacity` tokens."""
        blocks = tuple(mine + new for mine, new in zip(self.grant.blocks, more, strict=True))
        self.grant = replace(self.grant, blocks=blocks, capacity=capacity)

    def replace_first(self, prefix: BlockTables) -> BlockTables:
        """Has the blocks of `prefix` in place of as many of its own first ones, which it gives up."""
        before = self.grant.blocks
        blocks = tuple(new + mine[len(new) :] for new, mine in zip(prefix, before, strict=True))
        self.grant = replace(self.grant, blocks=blocks)
        return tuple(mine[: len(new)] for new, mine in zip(prefix, before, strict=True))
