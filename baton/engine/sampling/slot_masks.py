"""Which tokens a slot may draw next: a bit a token, made by the host for one position after the other.

A mask is tagged with the token that it is for, and the tag is written after it. A slot whose request wants
masks draws a token only by that token's mask, and is held until it is there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.device.side_copies import SideCopies

_NO_TOKEN = -1


class SlotMasks:
    """`bits` [slots, V / 32 rounded up] int32: token t is bit t % 32 of word t // 32. `tags` [slots] int64:
    generation << 32 | position, so that no tenant of a slot draws by the mask of another."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self.bits = torch.zeros(slots, self._words, dtype=torch.int32, device=device)
        self.tags = torch.full((slots,), _NO_TOKEN, dtype=torch.int64, device=device)
        self._copies = SideCopies(self.bits, self.tags)

    def write(self, slot: int, generation: int, position: int, bits: npt.NDArray[np.uint32]) -> None:
        """The mask of the token at `position` of its sequence. The mask before must have been drawn by, or
        be none. Raises ValueError where `bits` is not of the vocabulary's width."""
        if bits.shape != (self._words,):
            raise ValueError(f"a mask of {self._vocab_size} tokens has {self._words} words, not {bits.shape}")
        words = torch.from_numpy(bits.view(np.int32).copy())
        self._copies.send(slot, words, torch.tensor(generation << 32 | position))

    @property
    def arrived(self) -> bool:
        """Whether every mask that was written has reached the device."""
        return self._copies.arrived

    def ready(self, slots: Tensor, generations: Tensor, positions: Tensor) -> Tensor:
        """Whether each slot (all [B]) has the mask of its token at that position."""
        wanted: Tensor = (generations.long() << 32) | positions.long()
        return self.tags[slots] == wanted

    def allowed(self, slots: Tensor) -> Tensor:
        """slots [B] → [B, V] bool."""
        shifts = torch.arange(32, dtype=torch.int32, device=self.bits.device)
        bits = self.bits[slots][:, :, None] >> shifts & 1
        return bits.view(slots.shape[0], -1)[:, : self._vocab_size].bool()
