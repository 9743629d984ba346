"""Simulated steps and link of a decode side, and the texts that its blocks are filled with."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from baton.base.errors import BatonError
from baton.device.shared_memory import SharedMemory
from baton.engine.decode.slots import Grant
from baton.engine.memory.blocks import BlockTables
from baton.engine.shared_memory.slot_progress import SlotProgress, progress_bytes
from baton.engine.shared_memory.step_shape import StepShape
from baton.perf_model.step_costs import StepCosts
from kvtransfer.receiver.events import ReceiverEvent
from services.common.engine.attempt_key import AttemptKey
from services.worker.engine.decode.reservation import SlotKey

if TYPE_CHECKING:
    from tests.worker.engine.decode.decode_driver import Driver

BLOCK = 3
VOCAB = 50
BLOCK_BYTES = 48


class Text:
    """Tokens of a tenant, and the contents of the block that ends with the n-th of them."""

    def __init__(self, tenant: str, tokens: Sequence[int]) -> None:
        self.tenant = tenant
        self.tokens = list(tokens)
        self._full: list[bytes] = []

    def contents(self, group: int, end: int) -> bytes:
        """Contents of a block whose last token is the `end`-th."""
        while len(self._full) < (end - 1) // BLOCK:
            self._full.append(self._hash((len(self._full) + 1) * BLOCK))
        return hashlib.blake2b(self._hash(end), digest_size=BLOCK_BYTES, key=bytes([group])).digest()

    def _hash(self, end: int) -> bytes:
        begin = (end - 1) // BLOCK
        before = self._full[begin - 1] if begin else self.tenant.encode()
        return hashlib.blake2b(before + b"|" + bytes(self.tokens[begin * BLOCK : end])).digest()


@dataclass(eq=False)
class Slot:
    """An admitted sequence as the steps see it; `text` has its tokens with KV, `last` has none yet."""

    key: SlotKey
    attempt: AttemptKey
    text: Text
    last: int
    end: int
    table: list[list[int]]
    capacity: int
    emitted: list[int] = field(default_factory=list)
    active: bool = False


class SimulatedSteps:
    """The driver's `DecodeLoop`: entries take effect in a later step. A step advances a slot by up to
    `most_tokens` tokens."""

    measured_costs = StepCosts()

    def __init__(self, driver: Driver, shape: StepShape, most_tokens: int) -> None:
        self._driver = driver
        self._most_tokens = most_tokens
        self.shape = shape
        memory = SharedMemory.create("positions", progress_bytes(shape.slots))
        self.progress = SlotProgress(memory, 0, shape.slots)
        self.steps = self.full_steps = self.tokens_decoded = 0
        self.applied_entries = 0
        self.posted = 0
        self.entries: deque[tuple[Any, ...]] = deque()
        self.slots: dict[SlotKey, Slot] = {}

    @property
    def ring(self) -> SimulatedSteps:
        return self

    def learn(self, slot: int, generation: int) -> None: ...

    def limit_tpot(self, slot: int, tpot_s: float | None) -> None:
        """Does nothing: steps have no drafts."""

    def furthest_tags(self, more_steps: int) -> npt.NDArray[np.int64]:
        return self.progress.tags + more_steps * self.progress.tokens_a_step()

    @property
    def has_work(self) -> bool:
        return bool(self.slots)

    def begin_admission(self, grant: Grant, *, token_ids: Sequence[int], end: int, **_: Any) -> Slot:
        attempt, tenant = self._driver.committing
        table = [list(blocks) for blocks in grant.blocks]
        key, text = (grant.slot, grant.generation), Text(tenant, token_ids)
        return Slot(key, attempt, text, -1, end, table, grant.capacity, [])

    def complete(self, slot: Slot, *, last_token: int, **_: Any) -> None:
        assert not slot.emitted, "completed once"
        slot.last = last_token
        slot.emitted.append(last_token)

    def admit(self, slot: Slot) -> None:
        self.slots[slot.key] = slot
        self._post("admit", slot.key)

    def extend(
        self, slot: int, generation: int, more: BlockTables, held: tuple[int, ...], capacity: int
    ) -> None:
        one = self.slots[slot, generation]
        one.table = [mine[:n] + list(new) for mine, n, new in zip(one.table, held, more, strict=True)]
        self._post("grow", one.key, capacity)

    def stall(self, slot: int, generation: int) -> int:
        self._post("grow", (slot, generation), 0)
        return self.posted

    def applied(self, number: int) -> bool:
        return self.applied_entries >= number

    def preempt(self, slot: int, generation: int) -> None:
        self._post("end", (slot, generation))

    def cancel(self, slot: int, generation: int) -> None:
        self._post("end", (slot, generation))

    def _post(self, *entry: Any) -> None:
        self.entries.append(entry)
        self.posted += 1

    def step(self) -> None:
        """Applies some entries, then advances every slot as far as it has room."""
        for _ in range(self._driver.draw.randrange(len(self.entries) + 1)):
            kind, key, *capacity = self.entries.popleft()
            self.applied_entries += 1
            slot = self.slots.get(key)
            if slot is None:
                continue
            if kind == "end":
                self._end(slot)
            elif kind == "grow":
                slot.capacity = capacity[0]
            else:
                slot.active = True
        self.steps += 1
        for slot in [one for one in self.slots.values() if one.active]:
            tokens = 1 if self._most_tokens == 1 else self._driver.draw.randint(1, self._most_tokens)
            before = len(slot.text.tokens)
            for _ in range(tokens):
                if len(slot.text.tokens) < slot.capacity and slot.key in self.slots:
                    self._advance(slot)
            if accepted := len(slot.text.tokens) - before:
                counts = 1, self.shape.rows_per_slot - 1, accepted - 1, 0, 0
                self.progress.publish([slot.key[0]], [slot.key[1]], [len(slot.text.tokens)], counts)

    def _advance(self, slot: Slot) -> None:
        tokens = slot.text.tokens
        self._driver.read(slot)
        tokens.append(slot.last)
        place = (len(tokens) - 1) // BLOCK
        for group, blocks in enumerate(slot.table):
            self._driver.write(group, blocks[place], slot.text.contents(group, len(tokens)))
        slot.last = self._driver.draw.randrange(VOCAB)
        slot.emitted.append(slot.last)
        if len(tokens) + 1 >= slot.end:
            self._end(slot)

    def _end(self, slot: Slot) -> None:
        del self.slots[slot.key]
        self._driver.reports.append(slot)


class SimulatedLink:
    """The driver's `Receiver`: expected transfers, and the events of the next poll."""

    def __init__(self) -> None:
        self.expected: dict[int, tuple[list[int], list[int]]] = {}
        self.events: list[ReceiverEvent] = []
        self.refusals: list[BatonError] = []
        self.transfers = self

    def expect(self, transfer_id: int, counts: list[int], held: list[int]) -> None:
        self.expected[transfer_id] = counts, held or [0] * len(counts)

    def forget(self, transfer_id: int) -> None:
        self.expected.pop(transfer_id, None)

    def acknowledge(self, transfer_id: int) -> None:
        del self.expected[transfer_id]

    def refuse(self, transfer_id: int, error: BatonError) -> None:
        del self.expected[transfer_id]
        self.refusals.append(error)

    moving = False

    def poll(self, limit: int) -> list[ReceiverEvent]:
        events, self.events = self.events, []
        return events
