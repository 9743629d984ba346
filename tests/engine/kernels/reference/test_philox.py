from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.engine.kernels.reference.philox import philox, random_words, seed_key
from baton.engine.sampling.reference import gumbel
from tests.support.sampling.philox_noise import KNOWN_ANSWERS, draw_noise, philox_words


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    k0, k1 = (torch.tensor(word) for word in key)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), (k0, k1))) == words
    assert tuple(philox_words(np.array(counter, dtype=np.uint64), key).tolist()) == words


def test_the_noise_of_a_draw_is_that_of_the_reference() -> None:
    seeds = [0, 7, 2**32 + 5, 2**63, 2**64 - 1]
    positions = [0, 1, 900, 2**20, 2**31]
    signed = torch.tensor(np.array(seeds, dtype=np.uint64).astype(np.int64))
    noise = gumbel(signed, torch.tensor(positions), 321)
    for seed, position, ours in zip(seeds, positions, noise.tolist(), strict=True):
        assert draw_noise(seed, position, 321) == pytest.approx(ours, rel=1e-12, abs=1e-12)


def test_a_seed_with_the_top_bit_set_splits_into_its_words() -> None:
    seed = torch.tensor(np.array([0x89ABCDEF01234567], dtype=np.uint64).astype(np.int64))
    low, high = seed_key(seed)
    assert (int(low[0]), int(high[0])) == (0x01234567, 0x89ABCDEF)


def test_a_word_depends_on_seed_position_purpose_and_index_alone() -> None:
    seeds, positions = torch.tensor([7, -3, 7]), torch.tensor([5, 900, 6])
    words = random_words(seeds, positions, 0, 131)
    assert words.shape == (3, 131)
    assert words.min() >= 0
    assert words.max() < 1 << 32
    assert torch.equal(random_words(seeds[1:2], positions[1:2], 0, 50)[0], words[1, :50])
    for other in (
        random_words(seeds[:1] + 1, positions[:1], 0, 131),
        random_words(seeds[:1], positions[:1] + 1, 0, 131),
        random_words(seeds[:1], positions[:1], 1, 131),
    ):
        assert int((other[0] == words[0]).sum()) <= 1


def test_counter_layout_is_index_position_purpose() -> None:
    word = random_words(torch.tensor([9]), torch.tensor([12]), 3, 100)[0, 42]
    zero = torch.tensor(0)
    counter = (zero + 42 // 4, zero + 12, zero + 3, zero)
    assert word == philox(counter, (zero + 9, zero))[42 % 4]
