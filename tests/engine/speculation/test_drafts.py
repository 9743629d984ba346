"""Drafts are those of one token of one sequence."""

from __future__ import annotations

import numpy as np
import torch

from baton.engine.shared_memory.output_ring import GENERATIONS
from baton.engine.shared_memory.slot_progress import position_tag
from baton.engine.shared_memory.step_shape import MOST_DRAFTS
from baton.engine.speculation.drafts import SlotDrafts, Source


def test_drafts_of_another_token_or_tenant_do_not_count() -> None:
    drafts = SlotDrafts(4, torch.device("cpu"))
    slots, newest = torch.tensor([3, 1]), GENERATIONS - 1
    tags = torch.tensor([position_tag(newest, 2**31 - 1), position_tag(2, 9)])
    tokens = torch.arange(2 * MOST_DRAFTS).view(2, MOST_DRAFTS)
    drafts.put(slots, tags, tokens, torch.tensor([7, 2]), torch.tensor([Source.TEXT, Source.PREDICTION]))
    assert drafts.tokens[1].tolist() == tokens[1].tolist()
    assert drafts.source.tolist() == [0, 1, 0, 0]

    def counts(generations: list[int], positions: list[int]) -> list[int]:
        return drafts.counts_of(slots, torch.tensor(generations), torch.tensor(positions)).tolist()

    assert counts([newest, 2], [2**31 - 1, 9]) == [7, 2]
    assert counts([newest, 2], [2**31 - 2, 8]) == [0, 0]
    assert counts([newest - 1, 3], [2**31 - 1, 9]) == [0, 0]


def test_a_slot_has_as_many_as_a_step_may_verify_for_it() -> None:
    drafts, slots = SlotDrafts(3, torch.device("cpu")), torch.arange(3)
    drafts.put(slots, slots, torch.zeros(3, MOST_DRAFTS), torch.tensor([7, 7, 1]), torch.zeros(3))
    assert drafts.counts_of(slots, torch.zeros(3), slots).tolist() == [7, 7, 1]
    drafts.limit(np.array([0, 3, 3]))
    assert drafts.counts_of(slots, torch.zeros(3), slots).tolist() == [0, 3, 1]
    assert drafts.most.dtype == torch.int32


def test_arrays_are_where_they_are_wanted_and_as_wide_as_kernels_read_them() -> None:
    drafts = SlotDrafts(3, torch.device("meta"))
    made = [(array.shape, array.dtype, array.device.type) for array in vars(drafts).values()]
    narrow, wide = (torch.int32, "meta"), (torch.int64, "meta")
    assert made == [((3, MOST_DRAFTS), *narrow), ((3,), *narrow), ((3,), *wide), *[((3,), *narrow)] * 2]


def test_a_new_slot_has_no_drafts() -> None:
    """Not even for the first token of its first tenant, whose tag is 0 where memory is zeroed."""
    drafts, slots = SlotDrafts(2, torch.device("cpu")), torch.arange(2)
    assert drafts.counts_of(slots, torch.zeros(2), torch.zeros(2)).tolist() == [0, 0]
    drafts.count[:] = 5
    assert drafts.counts_of(slots, torch.zeros(2), torch.zeros(2)).tolist() == [0, 0]
