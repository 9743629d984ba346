"""Incremental allocation of blocks, and which sequence is swapped out or preempted where there are none."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from baton.engine.decode.slots import Grant
from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.blocks import BlockTables
from baton.engine.memory.host_blocks import HostBlocks
from baton.engine.memory.kv_cache import KVCache
from baton.model_spec.layout import CacheGroup, Layout, Plane
from baton.v1.decode_pb2 import Ticket
from baton.v1.types_pb2 import Attempt
from services.worker.engine.decode.block_allocation import ALLOCATION_TOKENS, BlockAllocation
from services.worker.engine.decode.output_lengths import OutputLengths
from services.worker.engine.decode.reservation import Reservation, SlotKey

BLOCK = 16
PROMPT = 20


@dataclass
class Steps:
    """Stands in for a decode loop and its ring."""

    steps: int = 0
    applied_entries: int = 0
    posted: int = 0
    grown: list[tuple[SlotKey, int]] = field(default_factory=list)
    stalled: list[SlotKey] = field(default_factory=list)
    preempted: list[SlotKey] = field(default_factory=list)

    @property
    def ring(self) -> Steps:
        return self

    def extend(
        self, slot: int, generation: int, more: BlockTables, held: tuple[int, ...], capacity: int
    ) -> None:
        assert len(more[0]) + held[0] == -(-capacity // BLOCK)
        self.grown.append(((slot, generation), capacity))

    def stall(self, slot: int, generation: int) -> int:
        self.stalled.append((slot, generation))
        return len(self.stalled)

    def preempt(self, slot: int, generation: int) -> None:
        self.preempted.append((slot, generation))

    def applied(self, number: int) -> bool:
        return self.applied_entries >= number


@dataclass
class LateSteps(Steps):
    """Steps that apply an entry when the test has them."""

    def extend(
        self, slot: int, generation: int, more: BlockTables, held: tuple[int, ...], capacity: int
    ) -> None:
        super().extend(slot, generation, more, held, capacity)
        self.posted += 1


class Case:
    """A pool, its incremental allocation, and sequences that are admitted at once."""

    def __init__(self, blocks: int, host_blocks: int = 0, loop: Steps | None = None) -> None:
        layout = Layout((CacheGroup((0,), (Plane("k", "float32", 1, 4),), BLOCK),))
        self.pools = BlockPools(layout, [blocks + 1])
        self.loop = loop or Steps()
        self.cache = KVCache(layout, blocks + 1, "cpu")
        self.host = HostBlocks(self.cache, host_blocks * layout.groups[0].block_bytes)
        self.allocation = BlockAllocation(self.pools, self.loop, self.host)  # type: ignore[arg-type]
        self.reservations: dict[SlotKey, Reservation] = {}

    def admit(self, slot: int, tokens: int, end: int) -> SlotKey:
        key = (slot, 1)
        grant = Grant(*key, self.pools.allocate(tokens), tokens)
        reservation = Reservation(Attempt(), Ticket(), grant, PROMPT, end)
        self.reservations[key] = reservation
        self.allocation.add(reservation)
        return key

    def end(self, key: SlotKey) -> None:
        self.allocation.remove(key)
        self.pools.release(self.reservations.pop(key).grant.blocks)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.allocation.step()
            self.loop.steps += 1


def test_blocks_are_allocated_shortly_before_they_are_needed() -> None:
    case = Case(blocks=100)
    key = case.admit(0, tokens=PROMPT + 40, end=PROMPT + 200)
    case.run(30)
    assert not case.loop.grown
    case.run(10)  # at the 40th step its blocks would have been full
    assert case.loop.grown == [(key, PROMPT + 40 + ALLOCATION_TOKENS)]
    case.run(150)
    assert case.loop.grown[-1] == (key, PROMPT + 199), "the last token has no KV"
    assert case.allocation.allocations == 3
    assert not case.loop.preempted


def test_a_sequence_with_all_its_blocks_gets_no_more() -> None:
    case = Case(blocks=100)
    case.admit(0, tokens=PROMPT + 29, end=PROMPT + 30)
    case.run(50)
    assert not case.loop.grown


def test_the_sequence_with_the_most_output_left_is_preempted() -> None:
    case = Case(blocks=6)
    near = case.admit(0, tokens=PROMPT + 12, end=PROMPT + 40)
    far = case.admit(1, tokens=PROMPT + 12, end=PROMPT + 300)
    mid = case.admit(2, tokens=PROMPT + 12, end=PROMPT + 60)
    case.run(20)
    assert case.loop.preempted == [far], "its two blocks are enough for the first"
    assert case.allocation.waiting
    case.end(far)
    case.allocation.step()
    assert case.loop.grown == [(near, PROMPT + 39)]
    assert case.loop.preempted == [far, mid], "the second needs three, and has the most output left"
    case.end(mid)
    case.allocation.step()
    assert not case.allocation.waiting


def test_shared_blocks_of_an_ending_sequence_do_not_count_as_freed() -> None:
    case = Case(blocks=4)
    near = case.admit(0, tokens=PROMPT + 12, end=PROMPT + 40)
    far = case.admit(1, tokens=PROMPT + 12, end=PROMPT + 60)
    shared = case.reservations[near].blocks
    for block in shared[0]:
        case.pools.pools[0].retain(block)
    leaves = Reservation(Attempt(), Ticket(), Grant(2, 1, shared, PROMPT + 12), PROMPT, PROMPT + 40)
    leaves.ending = True
    case.reservations[leaves.key] = leaves
    case.allocation.add(leaves)
    case.run(20)
    assert case.loop.preempted == [far], "the two blocks of the ending one are shared with the first"
    case.end(far)
    case.allocation.step()
    assert case.loop.grown == [(near, PROMPT + 39)]


def test_a_single_sequence_is_preempted_where_reservations_have_the_rest() -> None:
    case = Case(blocks=4)
    case.pools.allocate(2 * BLOCK)
    key = case.admit(0, tokens=PROMPT + 12, end=PROMPT + 40)
    case.run(20)
    assert case.loop.preempted == [key]


def test_an_ended_or_ending_sequence_gets_no_blocks() -> None:
    case = Case(blocks=100)
    ended = case.admit(0, tokens=PROMPT + 20, end=PROMPT + 200)
    leaves = case.admit(1, tokens=PROMPT + 20, end=PROMPT + 200)
    case.end(ended)
    case.reservations[leaves].ending = True
    case.run(40)
    assert not case.loop.grown
    assert not case.allocation.waiting


def test_the_ninetieth_percentile_of_recent_outputs() -> None:
    lengths = OutputLengths()
    for tokens in range(31):
        lengths.add(tokens)
    assert lengths.most is None, "too few outputs"
    lengths.add(1000)
    assert lengths.most == 27
    for _ in range(256):
        lengths.add(5)
    assert lengths.most == 5, "recent ones only"


def test_only_sequences_that_ended_by_themselves_count_for_output_lengths() -> None:
    case = Case(blocks=1000)
    for number in range(40):
        key = case.admit(number, tokens=PROMPT + 29, end=PROMPT + 30)
        case.run(10)
        case.reservations[key].ending = number % 2 == 0
        case.end(key)
    assert case.allocation.output_lengths.most is None
    for number in range(12):
        key = case.admit(number, tokens=PROMPT + 29, end=PROMPT + 30)
        case.run(10)
        case.end(key)
    assert case.allocation.output_lengths.most == 10


class SwappedOut(Case):
    """Two slots and blocks for one of them: the second, which has the most output left, is stalled."""

    def __init__(self, host_blocks: int = 10) -> None:
        super().__init__(blocks=4, host_blocks=host_blocks)
        self.near = self.admit(0, tokens=PROMPT + 12, end=PROMPT + 40)
        self.far = self.admit(1, tokens=PROMPT + 12, end=PROMPT + 44)
        for block in self.table(self.far):
            self.cache.block_bytes_view(0, block).fill_(block)
        self.run(20)

    def table(self, key: SlotKey) -> tuple[int, ...]:
        return self.reservations[key].blocks[0]


def test_a_sequence_is_swapped_out_and_in_with_its_bytes() -> None:
    case = SwappedOut()
    before = case.table(case.far)
    assert (case.loop.stalled, case.loop.preempted, case.allocation.swapped_out) == ([case.far], [], 1)
    case.allocation.step()
    assert case.table(case.far) == before, "a step that has not applied the entry may still write there"
    case.loop.applied_entries = 1
    case.allocation.step()
    assert case.table(case.far) == ()
    case.allocation.step()
    assert case.loop.grown == [(case.near, PROMPT + 39)]
    assert case.allocation.waiting, "the second waits for its blocks"
    for block in case.table(case.near):
        case.cache.block_bytes_view(0, block).fill_(99)
    case.end(case.near)
    case.allocation.step()
    assert case.loop.grown[1:] == [(case.far, PROMPT + 43)]
    bytes_now = [int(case.cache.block_bytes_view(0, block)[-1]) for block in case.table(case.far)]
    assert bytes_now[: len(before)] == list(before)
    assert case.host.free == 10
    assert not case.allocation.waiting
    case.end(case.far)
    assert case.pools.free == case.pools.total


@pytest.mark.parametrize("applied_entries", [0, 1])
def test_a_sequence_that_ends_while_it_is_swapped_out_frees_everything(applied_entries: int) -> None:
    case = SwappedOut()
    case.loop.applied_entries = applied_entries
    case.allocation.step()
    case.reservations[case.far].ending = True
    case.allocation.step()
    case.end(case.far)
    assert case.host.free == 10
    case.end(case.near)
    case.allocation.step()
    assert case.pools.free == case.pools.total
    assert not case.allocation.waiting


def test_a_sequence_that_ended_before_it_was_stalled_does_not_count_for_output_lengths() -> None:
    """Its last record was already written; without its blocks its position is not known."""
    case = Case(blocks=1000)
    for number in range(31):
        key = case.admit(number, tokens=PROMPT + 29, end=PROMPT + 30)
        case.run(10)
        case.end(key)
    swapped = SwappedOut()
    swapped.allocation.output_lengths = case.allocation.output_lengths
    swapped.loop.applied_entries = 1
    swapped.allocation.step()
    assert swapped.table(swapped.far) == ()
    swapped.end(swapped.far)
    assert case.allocation.output_lengths.most is None, "31 are too few outputs"
    swapped.end(swapped.near)
    assert case.allocation.output_lengths.most == 10


def test_a_sequence_is_preempted_where_host_memory_is_full() -> None:
    case = SwappedOut(host_blocks=1)
    assert (case.loop.stalled, case.loop.preempted) == ([], [case.far])


def test_steps_in_which_a_slot_is_stalled_do_not_count() -> None:
    """Each time its blocks end it waits 50 steps for more, and 3 more until the steps apply the entry."""
    case = Case(blocks=100, loop=LateSteps())
    key = case.admit(0, tokens=PROMPT + 12, end=PROMPT + 1000)
    running, position = case.allocation._running[key], PROMPT
    case.allocation.step()
    for _ in range(3):
        case.loop.steps += case.reservations[key].grant.capacity - position + 50
        position = case.reservations[key].grant.capacity
        case.allocation.step()
        for _ in range(3):
            case.loop.steps += 1
            case.allocation.step()
        case.loop.applied_entries = case.loop.posted
        case.allocation.step()
        assert case.allocation._position(running) == position
        case.loop.steps += 7
        assert case.allocation._position(running) == position + 7
        position += 7


def test_a_known_output_length_is_not_estimated() -> None:
    """Steps run between a slot's last record and the time at which it is read."""
    case = Case(blocks=1000)
    for number in range(32):
        key = case.admit(number, tokens=PROMPT + 29, end=PROMPT + 30)
        case.run(25)
        case.allocation.remove(key, 8)
        case.pools.release(case.reservations.pop(key).grant.blocks)
    assert case.allocation.output_lengths.most == 7, "the last token has no KV"
