"""The lookahead table's kernels do what the plain twin does: the same cells, the same drafts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.engine.kernels.gpu.speculation.find_match import find_match
from baton.engine.kernels.gpu.speculation.lookahead import fill_table
from baton.engine.shared_memory.step_shape import MOST_DRAFTS
from baton.engine.speculation.drafts import SlotDrafts, Source
from baton.engine.speculation.history import History
from baton.engine.speculation.lookahead_cells import BUCKET_BYTES, COUNT_SHIFT, KEY_LENGTHS, MOST_COUNT
from baton.engine.speculation.lookahead_table import LookaheadTable
from baton.engine.speculation.prompt_lookup import PromptLookup
from tests.engine.kernels.gpu.speculation.slot_arrays import DEVICE, Slot, SlotArrays

Text = tuple[list[int], list[int]]
TENANTS = "a", "b", None


class Twins:
    """Two tables of equal size, one filled by kernels, and the histories of `slots` slots."""

    def __init__(self, slots: int, length: int, buckets: int, *, alone: bool = False, stamp: int = 0) -> None:
        size, place = buckets * BUCKET_BYTES, torch.device(DEVICE)
        self.mine, self.plain = (
            LookaheadTable(slots, size, 2000, place, secret=b"s", alone=alone, stamp=stamp) for _ in range(2)
        )
        self.history = History(slots, length, place)
        self.slots = slots

    def begin(self, slot: int, text: Text, tenant: str | None, first: int = 0) -> None:
        self.history.fill(slot, *text)
        self.mine.begin(slot, tenant, first)
        self.plain.begin(slot, tenant, first)

    def learn(self, slot: int, end: int) -> None:
        output, same = self.mine.take_output(slot, end), self.plain.take_output(slot, end)
        assert output == same
        if output is not None:
            # The interpreter has one program run at a time anyway.
            at_once = 1 if DEVICE == "cuda" else None
            fill_table(self.mine, self.history, output, places_at_once=at_once)
            self.plain.learn(self.history, output)
        assert torch.equal(self.mine.cells, self.plain.cells)
        assert self.mine.counts.tolist() == self.plain.counts.tolist()

    def drafts(self, *, most_drafts: int = 7) -> SlotDrafts:
        """Drafts of all slots by the kernels, compared with the twin's."""
        slots = [Slot(int(end) - 1, most_drafts=most_drafts) for end in self.history.end]
        arrays, best = SlotArrays(slots, 1), torch.zeros(self.slots, dtype=torch.int32, device=DEVICE)
        active = torch.ones(self.slots, dtype=torch.bool, device=DEVICE)
        find_match(self.history, arrays.drafts, active, arrays.records, best, self.mine)
        assert not best.any()
        drafts, numbers = arrays.drafts, torch.arange(self.slots, device=DEVICE)
        if most_drafts:
            tokens, lengths, sources = PromptLookup(self.history, self.plain).propose(numbers)
            assert drafts.count.tolist() == lengths.tolist()
            assert drafts.source.tolist() == sources.tolist()
            there = torch.arange(MOST_DRAFTS, device=DEVICE) < lengths[:, None]
            assert torch.where(there, drafts.tokens, 0).tolist() == torch.where(there, tokens, 0).tolist()
        return drafts


def compare(seed: int, rounds: int, most: int, *, slots: int = 4, length: int = 24, buckets: int = 9) -> None:
    draw, twins = np.random.default_rng(seed), Twins(slots, length, buckets)
    sources, learned = set[int](), [list[int]() for _ in range(slots)]
    for _ in range(rounds):
        for slot in range(slots):
            kinds = int(draw.choice((2, 40, 1999)))
            text = draw.integers(0, kinds, int(draw.integers(4, most))).tolist()
            if draw.random() < 0.7:  # what was learned, once more to somewhere
                text = learned[slot][: max(len(text) // 2, 4)] or text
            prediction = [*text[-int(draw.integers(1, 9)) :], 7] if draw.random() < 0.4 else []
            first = int(draw.integers(0, 1 + len(text) // 3))
            learned[slot] = text
            twins.begin(slot, (text, prediction), TENANTS[slot % len(TENANTS)], first)
        sources |= set(twins.drafts().source.tolist())
        for slot in range(slots):
            twins.learn(slot, len(learned[slot]))
    assert sources == set(map(int, Source))
    assert twins.mine.counts.tolist()[1] > 0


def test_the_same_cells_and_drafts_as_the_twin() -> None:
    compare(seed=3, rounds=3, most=20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_the_same_of_more_outputs(seed: int) -> None:
    compare(seed, rounds=12, most=60, length=24 + seed, buckets=2**seed)


def test_ids_counts_and_stamps_at_their_bounds() -> None:
    twins = Twins(1, 16, 1, stamp=2**16 - 2)
    largest = 2**21 - 2
    for text in ([5, largest, 6, *[largest] * 8], [5, largest, 6, 0], [5, largest, 6, 0]):
        twins.begin(0, (text, []), "a")
        twins.learn(0, len(text))
    twins.begin(0, ([5, largest, 6], []), "a")
    drafts = twins.drafts()
    assert drafts.tokens[0, : int(drafts.count[0])].tolist() == [0]
    twins.begin(0, ([0] * 3 + [largest] * 7, []), "a")
    assert twins.drafts().tokens.tolist() == [[largest] * 7]


def test_a_count_that_is_as_high_as_it_can_be() -> None:
    twins = Twins(1, 16, 1)
    for number in range(3):
        twins.begin(0, ([1, 2, 3, 4], []), "a", 2)
        twins.learn(0, 4)
        more = (MOST_COUNT - 1 ^ 1) << COUNT_SHIFT if number == 0 else 0
        for table in (twins.mine, twins.plain):
            words = table.cells.view(-1)
            words[0], words[3] = words[0] ^ more, words[3] ^ more
    assert int(twins.mine.cells.view(-1)[3]) >> COUNT_SHIFT & MOST_COUNT == MOST_COUNT


def test_a_text_that_is_shorter_than_a_key() -> None:
    """The text's first token does not stand for those that it lacks."""
    twins = Twins(1, 16, 64)
    twins.begin(0, ([5, 5, 6, 7, 8], []), "a")
    twins.learn(0, 5)
    for text, count in (([5, 5, 6], 2), ([5, 6], 0)):
        twins.begin(0, (text, []), "a")
        assert twins.drafts().count.tolist() == [count]


def test_an_output_of_which_the_history_has_less() -> None:
    """Neither tokens that left the ring are learned, nor those that are not there yet."""
    twins = Twins(1, 8, 64)
    text = list(range(10, 30))
    twins.begin(0, (text, [3, 4]), "a", 5)
    twins.learn(0, len(text) + 6)
    assert twins.mine.counts.tolist() == [3 + 1, 0], "of the last 6 tokens 3 have 3 before them, and 1 has 5"


def test_nothing_is_looked_up_for_slots_without_drafts_or_tenant() -> None:
    twins = Twins(2, 16, 64, alone=True)
    twins.begin(0, ([1, 2, 3, 4, 5], []), "a")
    twins.learn(0, 5)
    twins.begin(0, ([9, 1, 2, 3], []), "a")
    twins.begin(1, ([9, 1, 2, 3], []), None)
    assert twins.drafts().count.tolist() == [2, 0]
    assert twins.drafts().source.tolist() == [int(Source.TABLE), 0]
    assert twins.drafts(most_drafts=0).count.tolist() == [0, 0]


@pytest.mark.gpu
def test_outputs_of_thousands_of_tokens_on_a_gpu() -> None:
    """An output's keys are filled in at the same time there: two of the same bucket in either order, or one
    of them is lost."""
    slots, tokens, buckets = 64, 4000, 500_000
    draw, twins = np.random.default_rng(9), Twins(slots, 8192, buckets)
    for slot in range(slots):
        twins.begin(slot, (draw.integers(0, 1999, tokens).tolist(), []), TENANTS[slot % 2])
        output, same = twins.mine.take_output(slot, tokens), twins.plain.take_output(slot, tokens)
        assert output is not None
        assert same is not None
        fill_table(twins.mine, twins.history, output)
        twins.plain.learn(twins.history, same)
    pairs_of_a_bucket = slots * (len(KEY_LENGTHS) * tokens) ** 2 / 2 / buckets
    differ = int((twins.mine.cells != twins.plain.cells).any(-1).sum())
    assert differ < 2 * pairs_of_a_bucket
    assert (twins.mine.counts - twins.plain.counts).abs().max() < 2 * pairs_of_a_bucket
    print(f"\nPROOF of 2,000,000 cells that kernels filled {differ} are not the twin's")
