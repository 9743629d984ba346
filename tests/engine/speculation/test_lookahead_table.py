"""The lookahead table beside a plain one, a dictionary of buckets: the same cells find the same drafts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from baton.engine.speculation.drafts import Source
from baton.engine.speculation.history import History
from baton.engine.speculation.lookahead_cells import (
    BUCKET_BYTES,
    COUNT_SHIFT,
    KEY_LENGTHS,
    MOST_COUNT,
    STAMP_SHIFT,
    WAYS,
    buckets_of,
    keys_of,
)
from baton.engine.speculation.lookahead_table import LookaheadTable
from baton.engine.speculation.prompt_lookup import PromptLookup

CPU, SECRET = torch.device("cpu"), b"secret"


def table_of(buckets: int, *, alone: bool = False, stamp: int = 0) -> LookaheadTable:
    return LookaheadTable(1, buckets * BUCKET_BYTES, 1000, CPU, secret=SECRET, alone=alone, stamp=stamp)


def learn(
    table: LookaheadTable, text: list[int], *, first: int = 0, tenant: str = "a", ring: int = 64
) -> None:
    history = History(1, ring, CPU)
    history.fill(0, text)
    table.begin(0, tenant, first)
    if (output := table.take_output(0, len(text))) is not None:
        table.learn(history, output)


def found(table: LookaheadTable, text: list[int], tenant: str = "a") -> tuple[int, list[int]]:
    table.begin(0, tenant, 0)
    length, ids = table.look_up(0, np.array(text, dtype=np.int32))
    return length, ids.tolist()


@dataclass
class Cell:
    key: int
    ids: tuple[int, ...]
    count: int
    touched: int


@dataclass
class PlainTable:
    """Votes one by one, in plain Python."""

    buckets: int
    seed: int
    cells: dict[int, list[Cell]] = field(default_factory=dict)
    outputs = replaced = 0

    def keys(self, text: list[int], end: int) -> list[int]:
        keys = keys_of(self.seed, np.array(text, dtype=np.int32), np.array([end]))[0]
        return [int(key) for key, length in zip(keys, KEY_LENGTHS, strict=True) if length <= end + 1]

    def bucket(self, key: int) -> list[Cell]:
        place = int(buckets_of(np.array([key], dtype=np.uint64), self.buckets)[0])
        return self.cells.setdefault(place, [])

    def learn(self, text: list[int], first: int) -> None:
        self.outputs += 1
        for end in range(first, len(text) - 1):
            for key in self.keys(text, end):
                self.vote(key, tuple(text[end + 1 : end + 8]))

    def vote(self, key: int, ids: tuple[int, ...]) -> None:
        bucket = self.bucket(key)
        cell = next((cell for cell in bucket if cell.key == key), None)
        if cell is None:
            cell = Cell(key, ids, 0, 0)
            if len(bucket) < WAYS:
                bucket.append(cell)
            else:
                oldest = min(range(WAYS), key=lambda way: bucket[way].touched)
                bucket[oldest] = cell
                self.replaced += 1
        cell.touched = self.outputs
        cell.count += 1 if cell.ids == ids else -1
        if not cell.count:
            cell.ids, cell.count = ids, 1
            self.replaced += 1

    def find(self, text: list[int]) -> tuple[int, list[int]]:
        for length, key in reversed(list(zip(KEY_LENGTHS, self.keys(text, len(text) - 1), strict=False))):
            for cell in self.bucket(key):
                if cell.key == key:
                    return length, list(cell.ids)
        return 0, []


@pytest.mark.parametrize("buckets", [1, 7, 500])
def test_random_outputs_beside_a_plain_table(buckets: int) -> None:
    """The outputs have few distinct tokens, so that keys come again, with the same continuation and with
    others."""
    draw, table = random.Random(buckets), table_of(buckets)
    plain, lengths = PlainTable(buckets, table.seed_of("a") % 2**64), set[int]()
    for _ in range(25):
        text = draw.choices(range(draw.choice((2, 3, 30))), k=draw.randint(1, 40))
        first = draw.randint(0, len(text) - 1)
        learn(table, text, first=first)
        if len(text) - first > 1:
            plain.learn(text, first)
        for _ in range(3):
            asked = text[: draw.randint(1, len(text))] or [0]
            assert found(table, asked) == plain.find(asked)
            lengths.add(plain.find(asked)[0])
    assert table.used == sum(map(len, plain.cells.values()))
    assert table.replaced == plain.replaced > 0
    assert lengths == {0, *KEY_LENGTHS}


def test_the_longest_key_is_found_and_what_followed_it() -> None:
    table = table_of(64)
    learn(table, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert found(table, [1, 2, 3, 4, 5, 6, 7]) == (7, [8, 9, 10])
    assert found(table, [0, 2, 3, 4, 5, 6, 7]) == (5, [8, 9, 10])
    assert found(table, [1, 2, 3]) == (3, [4, 5, 6, 7, 8, 9, 10])
    assert found(table, [2, 3]) == found(table, [7, 2, 1]) == (0, [])
    assert found(table, [8, 9, 10]) == (0, []), "nothing follows"


def test_outputs_are_learned_and_prompts_are_not() -> None:
    table = table_of(64)
    learn(table, [1, 2, 3, 4, 5, 6, 7, 8], first=5)
    assert found(table, [1, 2, 3, 4, 5]) == (0, [])
    assert found(table, [4, 5, 6]) == (3, [7, 8])
    learn(table, [20, 21, 22, 23, 24, 25, 26], ring=4)
    assert found(table, [20, 21, 22]) == found(table, [21, 22, 23]) == (0, []), "the ring lost 22 and before"
    assert found(table, [23, 24, 25]) == (3, [26])


def test_the_majority_remains() -> None:
    table = table_of(64)
    for last, then in ((9, 9), (9, 9), (8, 9), (8, 8), (8, 8), (7, 8), (7, 7)):
        learn(table, [1, 2, 3, last], first=2)
        assert found(table, [1, 2, 3]) == (3, [then])
    assert (table.used, table.replaced) == (1, 2)


def test_counts_have_an_end() -> None:
    table = table_of(1)
    learn(table, [1, 2, 3, 4], first=2)
    words, more = table.cells.view(-1), (1 ^ (MOST_COUNT - 1)) << COUNT_SHIFT
    words[0], words[3] = words[0] ^ more, words[3] ^ more
    for _ in range(3):
        learn(table, [1, 2, 3, 4], first=2)
    assert int(words[3]) >> COUNT_SHIFT & MOST_COUNT == MOST_COUNT
    assert int(words[3]) >> STAMP_SHIFT == 4, "the count has not run over into the stamp"


def test_the_cell_that_was_not_touched_for_longest_makes_room() -> None:
    """The rule holds also where stamps have started over."""
    table = table_of(1, stamp=2**16 - 4)
    for text in range(WAYS):
        learn(table, [text, 1, 2, 3], first=2)
    learn(table, [0, 1, 2, 3], first=2)
    learn(table, [7, 1, 2, 3], first=2)
    assert [bool(found(table, [text, 1, 2])[0]) for text in (0, 1, 2, 3, 7)] == [1, 0, 1, 1, 1]
    assert (table.used, table.replaced) == (WAYS, 1)


def test_tenants_find_their_own() -> None:
    table = table_of(64)
    learn(table, [1, 2, 3, 4], tenant="a")
    learn(table, [1, 2, 3, 5], tenant="b")
    assert [found(table, [1, 2, 3], tenant) for tenant in ("a", "b", "c", "")] == [
        *((3, [4]), (3, [5]), (0, []), (0, [])),
    ]  # fmt: skip
    table.begin(0, None, 0)
    assert table.look_up(0, np.array([1, 2, 3], dtype=np.int32))[0] == 0, "a canary finds nothing"
    assert table.take_output(0, 9) is None


def test_seeds_are_by_secret_model_and_tenant() -> None:
    def seed(secret: bytes | None, model: bytes, tenant: str) -> int:
        return LookaheadTable(1, BUCKET_BYTES, 9, CPU, secret=secret, model=model).seed_of(tenant)

    assert seed(SECRET, b"m", "a") == seed(SECRET, b"m", "a")
    others = (SECRET, b"m", "b"), (SECRET, b"n", "a"), (b"other", b"m", "a"), (None, b"m", "a")
    assert len({seed(SECRET, b"m", "a"), *(seed(*other) for other in others)}) == 5
    assert seed(None, b"m", "a") != seed(None, b"m", "a"), "it is drawn"


def test_an_output_is_learned_once() -> None:
    table = table_of(8)
    table.begin(0, "a", 3)
    assert table.take_output(0, 9) is not None
    assert table.take_output(0, 9) is None
    table.begin(0, "a", 3)
    assert table.take_output(0, 4) is None, "nothing follows its only token"


def test_a_cell_that_was_read_half_written_is_not_found() -> None:
    table = table_of(1)
    learn(table, [1, 2, 3, 4], first=2)
    before = table.cells.clone()
    learn(table, [1, 2, 3, 5], first=2)
    after = table.cells.clone()
    for words in range(1, 15):
        old = torch.tensor([bool(words >> word & 1) for word in range(4)])
        table.cells.copy_(torch.where(old, before, after))
        mixed = bool((table.cells != before).any() and (table.cells != after).any())
        assert (found(table, [1, 2, 3])[0] == 0) == mixed


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="at least 128 bytes, not 127"):
        LookaheadTable(1, BUCKET_BYTES - 1, 97, CPU)
    with pytest.raises(ValueError, match="ids below 2097151"):
        LookaheadTable(1, BUCKET_BYTES, 2**21, CPU)
    assert table_of(3).device_bytes == 3 * BUCKET_BYTES


@pytest.mark.parametrize(
    ("text", "prediction", "drafts", "source"),
    [
        ([1, 2, 3], [], [4, 5, 6], Source.TABLE),  # as many as 3 tokens bear out
        ([2, 3, 7, 1, 2, 3], [], [4, 5, 6], Source.TABLE),  # longer than the text's 2
        ([1, 2, 3, 7, 1, 2, 3], [], [7, 1, 2], Source.TEXT),  # of equals the text
        ([1, 2, 3, 7, 1, 2, 3], [1, 2, 3, 8], [8], Source.PREDICTION),  # and before it the prediction
        ([1, 2, 3, 4], [], [5, 6, 8], Source.TABLE),
        ([9, 8, 7], [], [], Source.TEXT),
    ],
)
def test_the_longest_match_of_all_sources(
    text: list[int], prediction: list[int], drafts: list[int], source: Source
) -> None:
    table, history = table_of(64), History(1, 64, CPU)
    learn(table, [1, 2, 3, 4, 5, 6, 8])
    table.begin(0, "a", 0)
    history.fill(0, text, prediction)
    made = PromptLookup(history, table).propose(torch.tensor([0]))
    assert made.tokens[0, : int(made.lengths[0])].tolist() == drafts
    assert Source(int(made.sources[0])) is source


def test_a_table_alone_proposes_nothing_else() -> None:
    table, history = table_of(64, alone=True), History(1, 64, CPU)
    learn(table, [1, 2, 3, 4])
    table.begin(0, "a", 0)
    history.fill(0, [5, 6, 5, 6])
    assert PromptLookup(history, table).propose(torch.tensor([0])).lengths.tolist() == [0]
    history.fill(0, [9, 1, 2, 3])
    assert PromptLookup(history, table).propose(torch.tensor([0])).tokens[0, 0] == 4
