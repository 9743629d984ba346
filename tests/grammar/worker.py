"""State of the other processes of a worker, beside the mask processes' client."""

from __future__ import annotations

import asyncio
from pathlib import Path

from baton.base.errors import BatonError, ErrorKind
from baton.device.shared_memory import SharedMemory
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.mask_board import MaskBoard
from baton.engine.shared_memory.output_ring import Finish
from baton.v1.types_pb2 import Grammar, Limits
from services.grammar.grammar_source import grammar_source
from services.grammar.process_client import MaskSetup
from tests.grammar.model import END_ID, OTHER_END_ID, VOCAB_SIZE, allowed, make_folder

LIMITS = Limits(max_tokens=100, stop_token_ids=(END_ID, OTHER_END_ID))
AB = grammar_source(Grammar(regex="(ab)+"))
SLOTS = 4
WAIT_S = 20.0


class Worker:
    """The ring's writer, the board's reader, and the sequences that were reported as failed."""

    def __init__(self, folder: Path, processes: int = 1, rows_per_slot: int = 1) -> None:
        rings = SharedRings(SLOTS, rows_per_slot=rows_per_slot)
        memory = SharedMemory.create("rings", rings.size)
        _, board = MaskBoard.create(SLOTS, VOCAB_SIZE)
        self.ring, self.reader = rings.writer(memory), rings.reader(memory)
        self.board = MaskBoard(board, SLOTS, VOCAB_SIZE)
        self.failed: asyncio.Queue[tuple[int, int, ErrorKind]] = asyncio.Queue()
        self.setup = MaskSetup(make_folder(folder), VOCAB_SIZE, rings, memory, board, processes=processes)

    def fail(self, slot: int, generation: int, error: BatonError) -> None:
        self.failed.put_nowait((slot, generation, error.kind))

    def draw(self, slot: int, generation: int, token: int, finish: Finish = Finish.NONE) -> None:
        self.ring.write([token], [slot], [generation], [finish])
        self.reader.read()

    async def next_mask(self) -> tuple[int, int, int, set[int]]:
        """(slot, generation, position, allowed ids) of the next mask on the board."""
        async with asyncio.timeout(WAIT_S):
            while not (taken := self.board.take()):  # noqa: ASYNC110  shared memory
                await asyncio.sleep(0.001)
        ((slot, generation, position, mask),) = taken
        return slot, generation, position, allowed(mask)
