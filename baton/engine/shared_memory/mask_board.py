"""The mask board: how grammar masks come from a worker's mask processes to its engine. Torch-free.

Shared memory with one row a slot: the tag of the token that the mask is for, and a bit a token of the
vocabulary. The mask process that follows a slot's sequence writes its row, the engine's loop reads it:

    writer   tag := none; the bits; tag := generation << 32 | position
    reader   tag; the bits; the same tag again, or the row is being written

A row is written again only once its token was drawn, or by the next tenant of the slot. Each mask process has
two more words, its heartbeat: a count of its iterations, and the slot that it computes for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton.base.errors import BatonError, ErrorKind
from baton.device.shared_memory import SharedMemory
from baton.engine.shared_memory.slot_progress import position_tag

NO_TAG = -1
MOST_PROCESSES = 8
"""Mask processes of one worker."""
_CACHE_LINE = 64
_HEADER_BYTES = MOST_PROCESSES * _CACHE_LINE

Mask = npt.NDArray[np.uint32]
"""Token t is bit t % 32 of word t // 32."""


SlotMask = tuple[int, int, int, Mask]
"""(slot, generation, position, mask) of one token of a slot's sequence."""


def mask_words(vocab_size: int) -> int:
    """32-bit words of a mask."""
    return -(-vocab_size // 32)


class MaskBoard:
    """The board, at either end; `begin`, `publish` and `beat` are a mask process's, `take` the engine's."""

    def __init__(self, memory: SharedMemory, slots: int, vocab_size: int, process: int = 0) -> None:
        """`process`: the number of the mask process whose heartbeat this is. Raises BatonError(INVALID) for
        memory of another board."""
        if memory.size != self.size(slots, vocab_size):
            sizes = f"{self.size(slots, vocab_size)} bytes for {slots} slots and {vocab_size} tokens"
            raise BatonError(ErrorKind.INVALID, f"a mask board of {memory.size} bytes, not {sizes}")
        words = mask_words(vocab_size)
        self.slots = slots
        self.vocab_size = vocab_size
        self._beat = memory.region(_CACHE_LINE * process, 2, np.int64)
        self._tags = memory.region(_HEADER_BYTES, slots, np.int64)
        bits = memory.region(_HEADER_BYTES + 8 * slots, slots * words, np.uint32)
        self.bits: npt.NDArray[np.uint32] = bits.reshape(slots, words)
        self._taken = np.full(slots, NO_TAG, dtype=np.int64)

    @classmethod
    def create(cls, slots: int, vocab_size: int) -> tuple[MaskBoard, SharedMemory]:
        """A board without masks, in new memory."""
        memory = SharedMemory.create("baton-masks", cls.size(slots, vocab_size))
        board = cls(memory, slots, vocab_size)
        board._tags[:] = NO_TAG
        return board, memory

    @staticmethod
    def size(slots: int, vocab_size: int) -> int:
        """Bytes of shared memory for a board of these sizes."""
        return _HEADER_BYTES + 8 * slots + 4 * slots * mask_words(vocab_size)

    def begin(self, slot: int) -> Mask:
        """The slot's row, to be written; no mask until it is published."""
        self._tags[slot] = NO_TAG
        row: Mask = self.bits[slot]
        return row

    def publish(self, slot: int, generation: int, position: int) -> None:
        """Makes the slot's row the mask of its token at `position`."""
        self._tags[slot] = position_tag(generation, position)

    def take(self) -> list[SlotMask]:
        """The masks written since the last call."""
        now = self._tags.copy()
        taken: list[SlotMask] = []
        for slot in np.flatnonzero((now != self._taken) & (now != NO_TAG)).tolist():
            tag, mask = int(now[slot]), self.bits[slot].copy()
            if int(self._tags[slot]) == tag:
                self._taken[slot] = tag
                taken.append((slot, tag >> 32, tag & 0xFFFFFFFF, mask))
        return taken

    def beat(self, slot: int = NO_TAG) -> None:
        """Records that the mask process makes progress, and for which slot it computes next."""
        self._beat[1] = slot
        self._beat[0] += 1

    @property
    def beats(self) -> int:
        """Number of calls of `beat` so far."""
        return int(self._beat[0])

    @property
    def computing(self) -> int:
        """The slot that the mask process computes for; negative: none."""
        return int(self._beat[1])
