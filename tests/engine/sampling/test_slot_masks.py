"""Masks of slots: bits in their places, tags that name one token of one tenant."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from baton.engine.sampling.slot_masks import SlotMasks
from tests.engine.sampled_batch import mask_bits


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 97])
def test_a_mask_allows_the_tokens_whose_bits_are_set(vocab: int) -> None:
    masks = SlotMasks(3, vocab, torch.device("cpu"))
    rng = random.Random(vocab)
    chosen = tuple(sorted(rng.sample(range(vocab), rng.randint(1, vocab))))
    masks.write([(1, 5, 17, mask_bits(chosen, vocab))])
    allowed = masks.allowed(torch.tensor([1, 0]))
    assert allowed.shape == (2, vocab)
    assert torch.nonzero(allowed[0]).flatten().tolist() == list(chosen)
    assert not allowed[1].any()


def test_a_mask_is_for_one_position_of_one_tenant() -> None:
    masks = SlotMasks(2, 40, torch.device("cpu"))
    slots, zero = torch.tensor([0, 1]), torch.zeros(2, dtype=torch.int32)
    assert not masks.ready(slots, zero, zero).any()
    masks.write([(1, 65_535, 100_000, mask_bits((3,), 40))])
    for generation, position, ready in (
        (65_535, 100_000, True),
        (65_534, 100_000, False),
        (65_535, 99_999, False),
    ):
        reported = masks.ready(slots, zero + generation, zero + position)
        assert reported.tolist() == [False, ready]
    with pytest.raises(ValueError, match="2 words"):
        masks.write([(0, 1, 1, np.zeros(3, dtype=np.uint32))])


@pytest.mark.gpu
def test_masks_are_written_beside_what_runs_and_the_last_of_each_slot_stands() -> None:
    vocab, slots = 128_256, 16
    masks = SlotMasks(slots, vocab, torch.device("cuda"))
    draw = np.random.default_rng(1)
    last = {}
    for number in range(400):
        last[number % slots] = draw.integers(0, 1 << 32, vocab // 32, dtype=np.uint32)
        if number % 3 == 0:  # some alone, some two by two, their slots next to each other or not
            masks.write([(number % slots, 1, number, last[number % slots])])
        elif number % 3 == 2:
            others = (number - 1) % slots, number % slots
            masks.write([(slot, 1, number - (slot != others[1]), last[slot]) for slot in others])
    torch.cuda.synchronize()
    for slot, bits in last.items():
        assert np.array_equal(masks.bits[slot].cpu().numpy().view(np.uint32), bits)
        assert int(masks.tags[slot]) == 1 << 32 | 400 - slots + slot
