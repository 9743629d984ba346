"""Which tokens a slot may draw next: a bit a token, made by the host for one position after the other.

A mask is tagged with the token that it is for, and the tag is written after it. A slot whose request wants
masks draws a token only by that token's mask, and is held until it is there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.engine.sampling.token_bits import allowed_tokens

_NO_TOKEN = -1


class _SideCopies:
    """Sends rows of `arrays`, tensors with equal numbers of rows, one row of each together and in order: an
    observer of the last array's row sees those of the others. The copy engine does it, in parallel with the
    kernels that run there: `send` only enqueues, on a stream of its own. On a CPU it writes at once.

    Each row has its own pinned buffer until it has been copied, so a second send of the same row blocks until
    the first is done: for microseconds, if at all.
    """

    def __init__(self, *arrays: Tensor) -> None:
        self._arrays = arrays
        self._on_chip = arrays[0].is_cuda
        if self._on_chip:
            self._stream = torch.cuda.Stream(arrays[0].device)  # type: ignore[no-untyped-call]
            self._pinned = [torch.empty(a.shape, dtype=a.dtype, pin_memory=True) for a in arrays]
            self._last = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent = [torch.cuda.Event() for _ in range(arrays[0].shape[0])]  # type: ignore[no-untyped-call]

    def send(self, row: int, *values: Tensor) -> None:
        """`values`: host tensors, one for each array, of the shape of its rows."""
        if not self._on_chip:
            for array, value in zip(self._arrays, values, strict=True):
                array[row].copy_(value)
            return
        self._sent[row].synchronize()
        with torch.cuda.stream(self._stream):
            for array, pinned, value in zip(self._arrays, self._pinned, values, strict=True):
                pinned[row].copy_(value)
                array[row].copy_(pinned[row], non_blocking=True)
            self._sent[row].record()
            self._last.record()

    @property
    def arrived(self) -> bool:
        """Whether everything sent is on the device."""
        return not self._on_chip or bool(self._last.query())  # type: ignore[no-untyped-call]


class SlotMasks:
    """`bits` [slots, V / 32 rounded up] int32: token t is bit t % 32 of word t // 32. `tags` [slots] int64:
    generation << 32 | position, so that no tenant of a slot draws by the mask of another."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self.bits = torch.zeros(slots, self._words, dtype=torch.int32, device=device)
        self.tags = torch.full((slots,), _NO_TOKEN, dtype=torch.int64, device=device)
        self._copies = _SideCopies(self.bits, self.tags)

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
        return allowed_tokens(self.bits[slots], self._vocab_size)
