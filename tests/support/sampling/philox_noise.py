"""The noise of a draw once more, in numpy: Philox4x32-10 (Salmon et al. 2011), and Gumbel from its words."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

# The known-answer vectors of Random123 (kat_vectors: philox4x32 10): counter, key, words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox_words(counter: Words, key: tuple[int, int]) -> Words:
    """counter [..., 4], words below 2^32 → words [..., 4] after ten rounds with this key."""
    words = counter.copy()
    for turn in range(10):
        first = words[..., 0] * np.uint64(0xD2511F53)
        third = words[..., 2] * np.uint64(0xCD9E8D57)
        keys = [np.uint64((key[half] + turn * step) % 2**32) for half, step in enumerate(_WEYL)]
        words = np.stack(
            [
                (third >> _HALF) ^ words[..., 1] ^ keys[0],
                third & _LOW,
                (first >> _HALF) ^ words[..., 3] ^ keys[1],
                first & _LOW,
            ],
            axis=-1,
        )
    return words


def draw_noise(seed: int, position: int, count: int) -> list[float]:
    """The Gumbel noise of the draw of the token at `position`, one number for each of `count` ids."""
    counter = np.zeros((-(-count // 4), 4), dtype=np.uint64)
    counter[:, 0] = np.arange(len(counter))
    counter[:, 1] = position
    words = philox_words(counter, (seed % 2**32, seed >> 32)).reshape(-1)[:count]
    noise: list[float] = (-np.log(-np.log((words + 0.5) / 2**32))).tolist()
    return noise
