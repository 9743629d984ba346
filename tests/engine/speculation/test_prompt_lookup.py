"""Prompt lookup beside its definition: the longest match decides, of equals the prediction, then the last."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from baton.engine.speculation.drafts import Source
from baton.engine.speculation.history import History
from baton.engine.speculation.prompt_lookup import (
    DRAFTS_BEHIND_OTHER,
    DRAFTS_BY_MATCH,
    LONGEST_MATCH,
    PromptLookup,
    look_up,
)


def matched(where: list[int], end: int, last: list[int]) -> int:
    """The number of tokens before `end` that are the last of `last`."""
    length = 0
    while length < min(end, len(last), LONGEST_MATCH) and where[end - 1 - length] == last[-1 - length]:
        length += 1
    return length


def continued(text: list[int], begin: int, count: int, source: Source) -> list[int]:
    """Copies `count` tokens from `begin` on; a copy from the sequence's own text goes on with the drafts
    themselves."""
    after = text[begin : begin + count]
    while source is Source.TEXT and len(after) < count:
        after.append((text + after)[begin + len(after)])
    return after


def looked_up(text: list[int], prediction: list[int]) -> tuple[list[int], Source]:
    """Compares every place of both, the text first."""
    best, found = 1, ([], Source.TEXT)  # type: tuple[int, tuple[list[int], Source]]
    for where, source in ((text, Source.TEXT), (prediction, Source.PREDICTION)):
        for end in range(1, len(where)):
            length = matched(where, end, text)
            if length >= max(best, 2):
                best, found = length, (continued(where, end, DRAFTS_BY_MATCH[length], source), source)
    if best >= 2:
        return found
    for where, source in ((prediction, Source.PREDICTION), (text, Source.TEXT)):
        for end in range(1, len(where) - 1):
            length = matched(where, end, text[:-1])
            if length > max(best, 1):
                best, found = length, (continued(where, end + 1, DRAFTS_BEHIND_OTHER, source), source)
    return found


def test_random_texts_of_few_tokens() -> None:
    draw, seen = random.Random(3), set[tuple[int, Source]]()
    for _ in range(2000):
        kinds = draw.choice((2, 3, 9))
        text, prediction = (draw.choices(range(kinds), k=draw.randint(0, 30)) for _ in range(2))
        drafts, source, _ = look_up(np.array(text, dtype=np.int32), np.array(prediction, dtype=np.int32))
        assert (drafts.tolist(), source) == looked_up(text, prediction), (text, prediction)
        seen.add((len(drafts), source))
    assert {(count, Source.TEXT) for count in (0, 2, 3, 4, 5, 7)} <= seen
    assert {(count, Source.PREDICTION) for count in (1, 2, 3, 4, 5, 7)} <= seen


@pytest.mark.parametrize(
    ("text", "prediction", "drafts", "source"),
    [
        ([1, 2, 9, 1, 2], [], [9, 1], Source.TEXT),
        ([1, 2, 8, 1, 2, 9, 1, 2], [], [9, 1], Source.TEXT),  # the latest of equals
        ([5, 1, 2, 8, 1, 2, 9, 5, 1, 2], [], [8, 1, 2], Source.TEXT),  # the longest comes first
        ([4, 4, 4], [], [4, 4], Source.TEXT),  # of which one is in the text
        ([7, 1, 2], [3, 1, 2, 5, 6, 7], [5, 6], Source.PREDICTION),
        ([1, 2, 6, 1, 2], [3, 1, 2, 5], [5], Source.PREDICTION),  # of equals the prediction
        ([0, 1, 2], [0, 1, 2], [], Source.TEXT),  # nothing follows
        ([0, 1], [], [], Source.TEXT),
        # Another token is in the last one's place.
        ([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 9], [], [4, 5, 6, 7, 8], Source.TEXT),
        ([1, 2, 3, 4, 1, 2, 9], [], [4, 1, 2, 9, 4], Source.TEXT),  # and on with the drafts themselves
        ([1, 2, 3, 0, 1, 2, 4, 5, 1, 2, 9], [], [0, 1, 2, 4, 5], Source.TEXT),  # the earliest of equals
        (
            [1, 2, 3, 0, 6, 1, 2, 4, 5, 6, 1, 2, 9],
            [],
            [5, 6, 1, 2, 9],
            Source.TEXT,
        ),  # the longest comes first
        ([0, 1, 2, 9], [3, 1, 2, 4, 5, 6, 1, 2, 7, 8], [5, 6, 1, 2, 7], Source.PREDICTION),
        ([1, 2, 3, 4, 1, 2, 9], [1, 2, 4, 5], [5], Source.PREDICTION),  # of equals the prediction
        ([1, 2, 3, 4, 1, 2, 9], [1, 2, 4], [4, 1, 2, 9, 4], Source.TEXT),  # nothing follows
        ([3, 2, 4, 5, 1, 2, 9], [], [], Source.TEXT),  # one token is too few
    ],
)
def test_what_follows_a_match(
    text: list[int], prediction: list[int], drafts: list[int], source: Source
) -> None:
    made = look_up(np.array(text, dtype=np.int32), np.array(prediction, dtype=np.int32))
    assert (made[0].tolist(), made[1]) == (drafts, source)


def test_slots_are_looked_up_in_their_own_histories() -> None:
    """Also where the ring has wrapped, and a match would lie over its seam."""
    history = History(3, 12, torch.device("cpu"))
    history.fill(0, [1, 2, 9, 1, 2])
    history.fill(2, [0, 1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5, 6], [9, 6, 0])
    made = PromptLookup(history).propose(torch.tensor([2, 0]))
    assert made.lengths.tolist() == [2, 2], "of the second tenant's tokens the ring has the last nine"
    assert made.tokens[:, :2].tolist() == [[7, 1], [9, 1]]
    assert made.sources.tolist() == [Source.TEXT, Source.TEXT]
