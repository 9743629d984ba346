"""The history of a slot, beside a list of its tokens; a ring that wraps, with predictions of every length."""

from __future__ import annotations

import random

import pytest
import torch

from baton.engine.speculation.history import History

CPU = torch.device("cpu")


@pytest.mark.parametrize("length", [2, 7, 16])
def test_the_latest_tokens_are_kept_beside_the_prediction(length: int) -> None:
    draw, wrapped = random.Random(length), 0
    history = History(3, length, CPU)
    texts: dict[int, list[int]] = {}
    predictions: dict[int, list[int]] = {}
    for _ in range(200):
        slot = draw.randrange(3)
        if slot not in texts or draw.random() < 0.2:
            texts[slot] = [draw.randrange(1000) for _ in range(draw.randint(0, 2 * length))]
            predictions[slot] = [draw.randrange(1000) for _ in range(draw.randint(0, length))]
            history.fill(slot, texts[slot], predictions[slot])
            history.add(slot, len(texts[slot]), 1000)
            texts[slot].append(1000)
        more = [draw.randrange(1000) for _ in range(draw.randint(1, 8))]
        more = more[: length - int(history.fixed[slot])]
        positions = torch.arange(len(more)) + len(texts[slot])
        history.append(torch.full((len(more),), slot), positions, torch.tensor(more))
        texts[slot] += more
        for other, text in texts.items():
            kept = predictions[other][: length // 2]
            ring = length - len(kept)
            assert history.prediction(other).tolist() == kept
            assert history.text(other).tolist() == text[-ring:]
            assert int(history.end[other]) == len(text)
            wrapped += len(text) > ring
    assert wrapped > 50


def test_tokens_of_several_slots_are_appended_at_once() -> None:
    history = History(2, 6, CPU)
    history.fill(0, [1, 2])
    history.fill(1, [5], [9, 9, 9])
    history.append(torch.tensor([1, 0, 0, 1]), torch.tensor([1, 2, 3, 2]), torch.tensor([6, 3, 4, 7]))
    assert history.text(0).tolist() == [1, 2, 3, 4]
    assert history.text(1).tolist() == [5, 6, 7]


def test_its_memory_is_four_bytes_a_token() -> None:
    assert History(5, 32, CPU).device_bytes == 5 * 32 * 4
