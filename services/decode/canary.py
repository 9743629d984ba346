"""The output of a worker's canary generation: read from the output ring, and seen by no router."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from baton.base.errors import BatonError, ErrorKind
from baton.engine.shared_memory.output_ring import Finish, Record
from baton.v1.engine_pb2 import CanaryEvent


@dataclass(slots=True, eq=False)
class CanaryOutput:
    """The output of one canary generation, `tokens` long if all is well."""

    slot: int
    generation: int
    tokens: int
    read: int = field(default=0, init=False)
    ended: asyncio.Future[Finish] = field(init=False)

    def __post_init__(self) -> None:
        self.ended = asyncio.get_running_loop().create_future()

    @classmethod
    def of(cls, event: CanaryEvent) -> CanaryOutput:
        return cls(event.slot, event.generation, event.tokens)

    def owns(self, record: Record) -> bool:
        """True if a record of the ring belongs to this output."""
        return (record.slot, record.generation) == (self.slot, self.generation)

    def take(self, record: Record) -> bool:
        """Reads a record; returns whether it was the last one."""
        self.read += record.has_token
        last = record.finish is not Finish.NONE
        if last and not self.ended.done():
            self.ended.set_result(record.finish)
        return last

    async def check(self) -> None:
        """Waits for its end. Raises BatonError(INTERNAL) where it was not as long as it should be."""
        finish = await asyncio.shield(self.ended)
        if finish is not Finish.LENGTH or self.read != self.tokens:
            message = f"it ended with {finish.name.lower()} after {self.read} of {self.tokens} tokens"
            raise BatonError(ErrorKind.INTERNAL, message)
