"""Drafts of the slots' next tokens, on the device: what is proposed and the step then verifies."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from baton.engine.shared_memory.step_shape import MOST_DRAFTS
from baton.engine.speculation.ranked_drafts import Slots

NO_TAG = -1


class Source(IntEnum):
    """The source that a slot's drafts come from."""

    TEXT = 0  # the sequence's own tokens
    PREDICTION = 1  # the output that the request predicts
    TABLE = 2  # outputs of the tenant's earlier requests


class SlotDrafts:
    """One row a slot. A slot's drafts are for one token of one sequence, and a step uses them only where that
    is the slot's last token: drafts of an earlier token or tenant are never verified.

    `tokens` [slots, MOST_DRAFTS] int32; `count` [slots] int32: how many of them there are; `tag` [slots]
    int64: generation << 32 | position of the token that the first draft follows, NO_TAG where there are none;
    `source` [slots] int32, a `Source`; `most` [slots] int32: how many of its drafts a step may verify.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self.tokens = torch.zeros(slots, MOST_DRAFTS, dtype=torch.int32, device=device)
        self.count = torch.zeros(slots, dtype=torch.int32, device=device)
        self.tag = torch.zeros(slots, dtype=torch.int64, device=device).fill_(NO_TAG)
        self.source = torch.zeros(slots, dtype=torch.int32, device=device)
        self.most = torch.zeros(slots, dtype=torch.int32, device=device).fill_(MOST_DRAFTS)

    def put(self, slots: Tensor, tags: Tensor, tokens: Tensor, lengths: Tensor, sources: Tensor) -> None:
        """Writes the drafts of some slots. slots, tags, lengths, sources [B]; tokens [B, MOST_DRAFTS], those
        from a slot's length on without meaning."""
        self.tokens[slots] = tokens.int()
        self.count[slots] = lengths.int()
        self.source[slots] = sources.int()
        self.tag[slots] = tags

    def limit(self, most: Slots) -> None:
        """Says how many of its drafts a step may verify for each slot."""
        self.most.copy_(torch.from_numpy(most.astype(np.int32)))

    def counts_of(self, slots: Tensor, generations: Tensor, positions: Tensor) -> Tensor:
        """Number of drafts of each slot that a step may verify behind its token at that position; all are
        [B]."""
        wanted = (generations.long() << 32) | positions.long()
        counts = torch.minimum(self.count[slots], self.most[slots])
        return torch.where(self.tag[slots] == wanted, counts, 0)
