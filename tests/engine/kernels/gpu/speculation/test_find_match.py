"""The lookup's kernels propose what the plain twin does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.kernels.gpu.speculation.find_match import find_match
from baton.engine.shared_memory.mailbox import Feature
from baton.engine.shared_memory.step_shape import MOST_DRAFTS
from baton.engine.speculation.drafts import NO_TAG, SlotDrafts, Source
from baton.engine.speculation.history import History
from baton.engine.speculation.prompt_lookup import PromptLookup
from tests.engine.kernels.gpu.speculation.slot_arrays import DEVICE, Slot, SlotArrays

Texts = Sequence[tuple[Sequence[int], Sequence[int]]]


def search(
    texts: Texts,
    length: int,
    slots: list[Slot] | None = None,
    inactive: tuple[int, ...] = (),
    **options: Any,
) -> tuple[SlotDrafts, History]:
    """The drafts of slots with these (texts, predictions)."""
    slots = slots or [Slot(position=len(text) - 1, generation=3 + n) for n, (text, _) in enumerate(texts)]
    arrays, history = SlotArrays(slots, 1), History(len(slots), length, torch.device(DEVICE))
    active = torch.ones(len(slots), dtype=torch.bool, device=DEVICE)
    for slot, (text, prediction) in enumerate(texts):
        history.fill(slot, text, prediction)
        active[slot] = slot not in inactive
    best = torch.zeros(len(slots), dtype=torch.int32, device=DEVICE)
    find_match(history, arrays.drafts, active, arrays.records, best, **options)
    assert not best.any(), "the scratch space is left as it was found"
    return arrays.drafts, history


def agree(drafts: SlotDrafts, history: History) -> None:
    slots = torch.arange(len(drafts.count), device=DEVICE)
    tokens, lengths, sources = PromptLookup(history).propose(slots)
    assert drafts.count.tolist() == lengths.tolist()
    assert drafts.source.tolist() == sources.tolist()
    there = torch.arange(MOST_DRAFTS, device=DEVICE) < lengths[:, None]
    assert torch.where(there, drafts.tokens, 0).tolist() == torch.where(there, tokens, 0).tolist()


# Few ids, so that there are matches of all lengths; texts shorter and longer than the ring.
ids = st.lists(st.integers(0, 2), max_size=40)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(ids.filter(bool), ids), min_size=1, max_size=4), st.sampled_from([2, 7, 16, 33]))
def test_it_proposes_what_the_twin_does(texts: Texts, length: int) -> None:
    agree(*search(texts, length))


def test_matches_are_found_over_the_ends_of_chunks_and_of_the_ring() -> None:
    draw = np.random.default_rng(4)
    texts = [
        (draw.integers(0, 3, int(count)).tolist(), draw.integers(0, 3, int(predicted)).tolist())
        for count, predicted in zip(draw.integers(1, 300, 24), draw.integers(0, 60, 24), strict=True)
    ]
    agree(*search(texts, 100, chunk=16))


def test_the_longest_match_the_latest_of_equals_and_the_prediction_before_the_text() -> None:
    text = [1, 2, 3, 7, 9, 2, 3, 8, 9, 2, 3, 6, 5, 1, 2, 3]
    for prediction, tokens, source in (
        ([], [7, 9, 2], Source.TEXT),  # 1 2 3, the longest
        ([1, 2, 3, 4, 4], [4, 4], Source.PREDICTION),  # as long
        ([5, 1, 2, 3, 4, 6], [4, 6], Source.PREDICTION),  # longer, and what follows ends
    ):
        drafts, history = search([(text, prediction)], 64)
        assert drafts.tokens[0, : int(drafts.count[0])].tolist() == tokens
        assert Source(int(drafts.source[0])) is source
        agree(drafts, history)
    drafts, _ = search([([2, 3, 8, 2, 3, 6, 2, 3], [])], 64)
    assert drafts.tokens[0, : int(drafts.count[0])].tolist() == [6, 2]


def test_a_match_is_no_longer_than_the_text() -> None:
    drafts, history = search([([1, 1], [1, 1, 1, 1, 2, 3, 4, 5, 1, 1, 9])], 64)
    assert drafts.tokens[0, : int(drafts.count[0])].tolist() == [9]
    agree(drafts, history)


def test_a_loop_is_continued_beyond_the_text() -> None:
    drafts, _ = search([([5, 9, 1, 2, 1, 2, 1, 2], [])], 64)
    assert drafts.tokens[0].tolist()[: int(drafts.count[0])] == [1, 2, 1, 2]


def test_another_token_may_be_in_the_last_ones_place() -> None:
    for text, prediction, tokens, source in (
        ([1, 2, 3, 0, 1, 2, 4, 5, 1, 2, 9], [], [0, 1, 2, 4, 5], Source.TEXT),
        ([1, 2, 3, 0, 6, 1, 2, 4, 5, 6, 1, 2, 9], [], [5, 6, 1, 2, 9], Source.TEXT),
        ([0, 1, 2, 9], [3, 1, 2, 4, 5, 6, 1, 2, 7, 8], [5, 6, 1, 2, 7], Source.PREDICTION),
        ([1, 2, 3, 4, 1, 2, 9], [1, 2, 4, 5], [5], Source.PREDICTION),
        ([1, 2, 3, 4, 1, 2, 9], [1, 2, 4], [4, 1, 2, 9, 4], Source.TEXT),
    ):
        drafts, history = search([(text, prediction)], 32)
        assert drafts.tokens[0, : int(drafts.count[0])].tolist() == tokens
        assert Source(int(drafts.source[0])) is source
        agree(drafts, history)


def test_drafts_say_what_they_are_drafts_for() -> None:
    text: tuple[list[int], list[int]] = ([1, 2, 1, 2], [])
    slots = [Slot(position=3, generation=2000 + n) for n in range(4)]
    slots[1] = Slot(position=3, features=int(Feature.MASKED))
    slots[2] = Slot(position=3, most_drafts=0)
    drafts, _ = search([text] * 4, 8, slots, inactive=(3,))
    assert drafts.tag.tolist() == [2000 << 32 | 3, NO_TAG, NO_TAG, NO_TAG]
    assert drafts.count.tolist() == [2, 0, 0, 0]


def test_a_history_that_is_too_long_is_refused() -> None:
    arrays, history = SlotArrays([Slot(position=1)], 1), History(1, 8, torch.device(DEVICE))
    history.tokens = history.tokens[:, :1].expand(1, 1 << 27)
    active, best = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="134217727 can be searched"):
        find_match(history, arrays.drafts, active, arrays.records, best)


@pytest.mark.gpu
def test_long_histories_of_many_slots_on_a_gpu() -> None:
    draw = np.random.default_rng(5)
    texts = [
        (
            draw.integers(0, 3 + slot % 60, int(count)).tolist(),
            draw.integers(0, 3, 3000 * (slot % 3)).tolist(),
        )
        for slot, count in enumerate(draw.integers(2, 60_000, 64))
    ]
    drafts, history = search(texts, 32_768)
    agree(drafts, history)
    counts = torch.bincount(drafts.count.cpu(), minlength=8).tolist()
    print(f"\nPROOF lookup of 64 histories of 32,768 tokens agrees with the twin; drafts of 0 to 7: {counts}")
