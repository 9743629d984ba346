"""Decides which rows of a step count: the rule by which drafts are accepted, in plain torch.

A token is a function of logits, seed and position, so a draft is right exactly if it is the token that the
row before it has drawn. What a step gives out are the tokens that plain steps would have drawn one after the
other, whatever was proposed; no random number is spent on acceptance, and no distribution is corrected.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accepted(depth: Tensor, tokens: Tensor, drawn: Tensor, ends: Tensor) -> Tensor:
    """Returns which rows count [R] bool: the first of each slot, and each draft behind rows that count, if it
    is what the row before it has drawn and did not end the sequence with.

    Rows of a slot lie side by side. All are [R]: `depth` 0 for a slot's first row, d for its d-th draft;
    `tokens` the rows' inputs, of deeper rows their drafts; `drawn` what they have drawn; `ends` bool, whether
    the token drawn ends the sequence.
    """
    first = depth == 0
    before = torch.roll(drawn, 1) == tokens
    wrong = ~first & (~before | torch.roll(ends, 1))
    wrongs = wrong.cumsum(0)
    # A slot's first row is never wrong, so the count there is that of all slots before.
    others = wrongs[first].repeat_interleave(torch.diff(_bounds(first)))
    return wrongs == others


def _bounds(first: Tensor) -> Tensor:
    """Indices at which the slots' rows begin, and at which the last ones end."""
    begins = torch.nonzero(first).flatten()
    return torch.cat((begins, begins.new_tensor([len(first)])))
