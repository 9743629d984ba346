"""The latest tokens of each slot's sequence, and the output that its request predicts, on the device.

A slot's row:   │ prediction │ ring of the sequence's own tokens │
                0            fixed                               length

Token n of a sequence is at place fixed + n % (length - fixed). The row is filled when the sequence is
admitted; every step appends what it gives out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from baton.device.streams.upload import UploadBuffer


class History:
    """Text of all slots. `tokens` [slots, length] int32; `end` [slots] int32: tokens of each sequence so far,
    those that have left the ring included; `fixed` [slots] int32: tokens of its prediction."""

    def __init__(self, slots: int, length: int, device: torch.device) -> None:
        """`length`: at least 2, a prediction's half and the ring's."""
        self.length = length
        self.tokens = torch.zeros(slots, length, dtype=torch.int32, device=device)
        self.end = torch.zeros(slots, dtype=torch.int32, device=device)
        self.fixed = torch.zeros(slots, dtype=torch.int32, device=device)
        self._upload = UploadBuffer(4 * length, device)
        self._row = np.frombuffer(self._upload.bytes, dtype=np.int32)
        self._fixed = [0] * slots  # what the host last gave each of them

    @property
    def most_predicted(self) -> int:
        """The most tokens of a prediction that are kept."""
        return self.length // 2

    def fill(self, slot: int, token_ids: Sequence[int], prediction: Sequence[int] = ()) -> None:
        """Begins a sequence, its tokens by one copy; it stands when this returns, for every stream. A
        prediction longer than `most_predicted` keeps its beginning; `token_ids` keep as many of their last as
        the ring holds."""
        fixed, count = min(len(prediction), self.most_predicted), len(token_ids)
        ring = self.length - fixed
        kept = min(count, ring)
        row = self._row
        row[:fixed] = np.fromiter(islice(prediction, fixed), np.int32, fixed)
        latest = np.fromiter(islice(token_ids, count - kept, count), np.int32, kept)
        row[fixed : fixed + kept] = np.roll(latest, count % ring) if count > ring else latest
        self._upload.put(self.tokens[slot, : fixed + kept], torch.int32)
        self._put(self.fixed[slot : slot + 1], fixed)
        self._put(self.end[slot : slot + 1], count)
        self._fixed[slot] = fixed

    def add(self, slot: int, position: int, token: int) -> None:
        """Appends the token that a sequence is admitted with; it stands when this returns, for every
        stream."""
        fixed = self._fixed[slot]
        place = fixed + position % (self.length - fixed)
        self._put(self.tokens[slot, place : place + 1], token)
        self._put(self.end[slot : slot + 1], position + 1)

    def _put(self, target: Tensor, value: int) -> None:
        # An assignment would be a kernel of the current stream, which a step on another one may overtake.
        self._row[0] = value
        self._upload.put(target, torch.int32)

    def append(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Appends tokens that a step gives out; slots, the tokens' positions in their sequences and the
        tokens [B]. A slot's tokens are in order and follow its last one."""
        fixed = self.fixed[slots].long()
        place = fixed + positions.long() % (self.length - fixed)
        self.tokens[slots, place] = tokens.int()
        self.end.scatter_reduce_(0, slots, (positions + 1).int(), "amax")

    @property
    def device_bytes(self) -> int:
        """Memory of the rows on the device."""
        return self.tokens.numel() * self.tokens.element_size()

    def text(self, slot: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """The sequence's tokens that the ring still has, oldest first."""
        fixed, end = int(self.fixed[slot]), int(self.end[slot])
        ring = self.tokens[slot, fixed:].cpu().numpy()
        return ring[:end] if end <= len(ring) else np.roll(ring, -(end % len(ring)))

    def prediction(self, slot: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """The prediction's tokens that are kept."""
        return self.tokens[slot, : int(self.fixed[slot])].cpu().numpy()
