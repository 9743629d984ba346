from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.engine.philox import philox, random_words, seed_key

# The known-answer vectors of Random123 (kat_vectors: philox4x32 10): counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    k0, k1 = (torch.tensor(word) for word in key)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), (k0, k1))) == words


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
