"""Drafts of which a given share is right: a model whose next token is known, and what proposes it.

The head of the model is its embedding shifted by one token, and its layers add little to what they are given:
so the likeliest token after t is t + 1. Weights keep their sizes, and their bits are as random as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

from baton.engine.kernels.gpu.step.step_kernels import RECORD_WORDS
from baton.engine.shared_memory.mailbox import field_offset
from baton.engine.shared_memory.step_shape import MOST_DRAFTS

if TYPE_CHECKING:
    from baton.engine.decode.slot_state import SlotState

_GENERATION = tl.constexpr(field_offset("generation") // 4)
_POSITION = tl.constexpr(field_offset("position") // 4)
_LAST_TOKEN = tl.constexpr(field_offset("last_token") // 4)
_WIDTH = tl.constexpr(MOST_DRAFTS)
_DEPTHS = triton.next_power_of_2(MOST_DRAFTS)
_SEED = tl.constexpr(58)
# What the products that add to the hidden state are scaled by.
_ADDED = 0.01


def count_up(weights: dict[str, Any]) -> None:
    """Makes the model that these weights are for count up. Raises ValueError where it cannot: its head is its
    embedding, or its layers' weights are quantised."""
    import torch

    embedding, head = weights["model.embed_tokens.weight"], weights.get("lm_head.weight")
    if not isinstance(head, torch.Tensor):
        raise ValueError("drafts that are right need a head of its own, not quantised")
    head[0].copy_(embedding[-1])
    head[1:].copy_(embedding[:-1])
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            if not isinstance(weight, torch.Tensor):
                raise ValueError("drafts that are right need weights that are not quantised")
            weight.mul_(_ADDED)


@triton.jit
def _propose(
    records,
    tokens,
    count,
    tag,
    accept,
    SLOTS: tl.constexpr,
    POWER: tl.constexpr,
    DEPTHS: tl.constexpr,
    MOST: tl.constexpr,
    VOCAB: tl.constexpr,
):
    """`accept`: the share of drafts that are right. Which ones are depends on slot and position alone."""
    slot = tl.arange(0, POWER)
    there = slot < SLOTS
    mine = records + slot * RECORD_WORDS
    position = tl.load(mine + _POSITION, mask=there, other=0)
    last = tl.load(mine + _LAST_TOKEN, mask=there, other=0)
    generation = tl.load(mine + _GENERATION, mask=there, other=0).to(tl.int64)
    behind = 1 + tl.arange(0, DEPTHS)[None, :]
    chance = tl.rand(_SEED, (slot[:, None] << 20) + position[:, None] + behind)
    draft = (last[:, None] + behind + tl.where(chance < tl.load(accept), 0, 7)) % VOCAB
    mask = there[:, None] & (behind <= _WIDTH)
    tl.store(tokens + slot[:, None] * _WIDTH + behind - 1, draft, mask=mask)
    tl.store(count + slot, MOST, mask=there)
    tl.store(tag + slot, (generation << 32) | position, mask=there)


class Oracle:
    """Launches, when called, what proposes to each slot of a model that counts up as many drafts as steps can
    verify."""

    def __init__(self, state: SlotState, vocab: int) -> None:
        import torch

        if state.drafts is None:
            raise ValueError("slots have one row each")
        self._drafts = state.drafts
        self._shape = state.shape
        self._vocab = vocab
        self._records = state.records.view(torch.int32)
        self._accept = torch.zeros(1, device=state.records.device)

    def accept(self, share: float) -> None:
        """Lets such a share of the drafts be right from the next step on."""
        self._accept.fill_(share)

    def __call__(self) -> None:
        drafts, slots = self._drafts, self._shape.slots
        _propose[(1,)](
            self._records, drafts.tokens, drafts.count, drafts.tag, self._accept, SLOTS=slots,
            POWER=triton.next_power_of_2(slots), DEPTHS=_DEPTHS, MOST=self._shape.rows_per_slot - 1,
            VOCAB=self._vocab, num_warps=4,
        )  # fmt: skip
