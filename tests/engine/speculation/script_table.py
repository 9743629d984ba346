"""Scripted drafts as tables on the device, so that a graph can propose them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from baton.engine.decode.slot_state import SlotState
from baton.engine.shared_memory.step_shape import MOST_DRAFTS
from baton.engine.speculation.drafts import Source
from baton.engine.speculation.proposer import Proposals
from tests.engine.speculation.scripted import SCRIPTS, VOCAB, Key


class ScriptTable:
    """The drafts of the tokens behind each position of up to `longest`, for each slot. Those of a slot are of
    the sequence that began last, and right for any other only by chance."""

    def __init__(self, state: SlotState, draw: random.Random, longest: int) -> None:
        shape, device = (state.shape.slots, longest), state.records.device
        self._position = state.position
        self._draw = draw
        self._tokens = torch.zeros(*shape, MOST_DRAFTS, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(shape, dtype=torch.int64, device=device)
        self._sources = torch.zeros(shape, dtype=torch.int64, device=device)

    def begin(self, key: Key, text: Sequence[int], script: str) -> None:
        """Scripts the drafts of a slot's sequence, whose whole text is `text`, to its end."""
        count = min(len(text), self._lengths.shape[1])
        tokens, lengths = torch.full((count, MOST_DRAFTS), self._draw.randrange(VOCAB)), []
        for position in range(count):
            right = list(text[position + 1 : position + 1 + MOST_DRAFTS])
            drafts = SCRIPTS[script](self._draw, right)[:MOST_DRAFTS] if right else []
            lengths.append(len(drafts))
            tokens[position, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
        slot = key[0]
        self._tokens[slot, :count] = tokens.to(self._tokens.device)
        self._lengths[slot, :count] = torch.tensor(lengths, device=self._lengths.device)
        self._sources[slot] = self._draw.choice(list(Source))

    def propose(self, slots: Tensor) -> Proposals:
        """Returns the script's drafts of these slots."""
        at = self._position[slots].long().clamp(max=self._lengths.shape[1] - 1)
        return Proposals(self._tokens[slots, at], self._lengths[slots, at], self._sources[slots, at])
