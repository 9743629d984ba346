"""Masks of the tokens that a slot may draw next: a bit a token, made by the host for one position after the
other.

A mask is tagged with the token that it is for, and the tag is written after it. A slot whose request wants
masks draws a token only by that token's mask, and is held until it is there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton.engine.sampling.token_bits import allowed_tokens
from baton.engine.shared_memory.mask_board import SlotMask, mask_words
from baton.engine.shared_memory.slot_progress import position_tag

_NO_TOKEN = -1


class _SideCopies:
    """Sends rows of `arrays`, tensors with equal numbers of rows, one row of each together and in order: an
    observer of the last array's row sees those of the others. The copy engine does it, in parallel with the
    kernels that run there: `send` only enqueues, on a stream of its own. On a CPU it writes at once.

    Each row has its own pinned buffer, so `send` blocks until the one before has been copied: for
    microseconds, if at all.
    """

    def __init__(self, *arrays: Tensor) -> None:
        self._arrays = arrays
        self._on_chip = arrays[0].is_cuda
        if self._on_chip:
            self._stream = torch.cuda.Stream(arrays[0].device)  # type: ignore[no-untyped-call]
            self._pinned = [torch.empty(a.shape, dtype=a.dtype, pin_memory=True) for a in arrays]
            self._last = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, rows: Sequence[int], *values: Tensor) -> None:
        """`rows`: distinct, ascending; `values`: host tensors, one for each array, of as many rows."""
        index = torch.tensor(rows)
        if not self._on_chip:
            for array, value in zip(self._arrays, values, strict=True):
                array[index] = value
            return
        self._last.synchronize()
        with torch.cuda.stream(self._stream):
            for array, pinned, value in zip(self._arrays, self._pinned, values, strict=True):
                pinned[index] = value
                for first, behind in _runs(rows):
                    array[first:behind].copy_(pinned[first:behind], non_blocking=True)
            self._last.record()

    @property
    def arrived(self) -> bool:
        """True if everything sent is on the device."""
        return not self._on_chip or bool(self._last.query())  # type: ignore[no-untyped-call]


class SlotMasks:
    """Masks of all slots. `bits` [slots, V / 32 rounded up] int32: token t is bit t % 32 of word t // 32.
    `tags` [slots] int64: generation << 32 | position, so that no tenant of a slot draws by the mask of
    another."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._words = mask_words(vocab_size)
        self.bits = torch.zeros(slots, self._words, dtype=torch.int32, device=device)
        self.tags = torch.full((slots,), _NO_TOKEN, dtype=torch.int64, device=device)
        self._copies = _SideCopies(self.bits, self.tags)

    def write(self, masks: Sequence[SlotMask]) -> None:
        """Masks of different slots, each of the token at a position of its slot's sequence. The mask before
        must have been drawn by, or be none. Raises ValueError where one is not of the vocabulary's width."""
        for _, _, _, bits in masks:
            if bits.shape != (self._words,):
                message = f"a mask of {self._vocab_size} tokens has {self._words} words, not {bits.shape}"
                raise ValueError(message)
        masks = sorted(masks, key=lambda mask: mask[0])
        words = torch.from_numpy(np.stack([bits for _, _, _, bits in masks]).view(np.int32))
        tags = torch.tensor([position_tag(generation, position) for _, generation, position, _ in masks])
        self._copies.send([slot for slot, _, _, _ in masks], words, tags)

    @property
    def arrived(self) -> bool:
        """True if every mask that was written has reached the device."""
        return self._copies.arrived

    def ready(self, slots: Tensor, generations: Tensor, positions: Tensor) -> Tensor:
        """True for each slot (all [B]) that has the mask of its token at that position."""
        wanted: Tensor = (generations.long() << 32) | positions.long()
        return self.tags[slots] == wanted

    def allowed(self, slots: Tensor) -> Tensor:
        """slots [B] → [B, V] bool."""
        return allowed_tokens(self.bits[slots], self._vocab_size)


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending rows as runs (first, behind the last) of consecutive ones."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs
