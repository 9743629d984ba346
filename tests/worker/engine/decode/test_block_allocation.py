"""Incremental allocation of blocks, and which sequence is swapped out or preempted where there are none."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from baton.device.shared_memory import SharedMemory
from baton.engine.decode.slots import Grant
from baton.engine.memory.block_pools import BlockPools
from baton.engine.memory.blocks import BlockTables
from baton.engine.memory.host_blocks import HostBlocks
from baton.engine.memory.kv_cache import KVCache
from baton.engine.shared_memory.slot_progress import SlotProgress, progress_bytes
from baton.engine.shared_memory.step_shape import StepShape
from baton.model_spec.layout import CacheGroup, Layout, Plane
from baton.v1.decode_pb2 import Ticket
from baton.v1.types_pb2 import Attempt
from services.worker.engine.decode.block_allocation import ALLOCATION_TOKENS, BlockAllocation
from services.worker.engine.decode.output_lengths import OutputLengths
from services.worker.engine.decode.reservation import Reservation, SlotKey

BLOCK = 16
PROMPT = 20
SLOTS = 64


def _positions() -> SlotProgress:
    return SlotProgress(SharedMemory.create("positions", progress_bytes(SLOTS)), 0, SLOTS)


@dataclass
class Steps:
    """Stands in for a decode loop of which `launched` steps are under way."""

    launched: int = 0
    shape: StepShape = field(default_factory=lambda: StepShape(SLOTS))
    progress: SlotProgress = field(default_factory=_positions)
    applied_entries: int = 0
    grown: list[tuple[SlotKey, int]] = field(default_factory=list)
    stalled: list[SlotKey] = field(default_factory=list)
    preempted: list[SlotKey] = field(default_factory=list)

    def furthest_tags(self, more_steps: int) -> npt.NDArray[np.int64]:
        return self.progress.tags + (self.launched + more_steps) * self.progress.tokens_a_step()

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

    def run(self, steps: int, tokens: int = 1) -> None:
        """Turns, with a step after each that advances every slot by `tokens`, as far as its blocks reach."""
        for _ in range(steps):
            self.allocation.step()
            for key, reservation in self.reservations.items():
                if key not in self.loop.stalled:
                    at = min(self.position(key) + tokens, reservation.grant.capacity)
                    accepted = max(at - self.position(key) - 1, 0)
                    self.loop.progress.publish([key[0]], [key[1]], [at], (1, 3, accepted, 0, 0))

    def position(self, key: SlotKey) -> int:
        return self.loop.progress.position(*key) or PROMPT


def test_blocks_are_allocated_shortly_before_they_are_needed() -> None:
    case = Case(blocks=100)
    key = case.admit(0, tokens=PROMPT + 40, end=PROMPT + 200)
    case.run(30)
    assert not case.loop.grown
    case.run(9)  # the 40th step would have filled its blocks
    assert case.loop.grown == [(key, PROMPT + 40 + ALLOCATION_TOKENS)]
    case.run(150)
    assert case.loop.grown[-1] == (key, PROMPT + 199), "the last token has no KV"
    assert case.allocation.allocations == 3
    assert not case.loop.preempted


def test_tokens_a_step_are_those_of_running_sequences() -> None:
    case = Case(blocks=100)
    assert case.allocation.tokens_per_step == 0
    one, other = (case.admit(slot, tokens=PROMPT + 40, end=PROMPT + 200) for slot in range(2))
    assert case.allocation.tokens_per_step == 0
    case.run(3)
    assert case.allocation.tokens_per_step == 1
    case.loop.progress.publish([one[0]], [one[1]], [PROMPT + 9], [(2, 6, 4, 0, 0)])
    assert case.allocation.tokens_per_step == 1 + 4 / (5 + 3)
    case.end(one)
    assert case.allocation.tokens_per_step == 1
    case.end(other)
    assert case.allocation.tokens_per_step == 0


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
    for number in range(40, 52):
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
            self.cache.block(0, block).fill_(block)
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
        case.cache.block(0, block).fill_(99)
    case.end(case.near)
    case.allocation.step()
    assert case.loop.grown[1:] == [(case.far, PROMPT + 43)]
    bytes_now = [int(case.cache.block(0, block)[-1]) for block in case.table(case.far)]
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


def test_the_length_of_a_sequence_that_ended_before_it_was_stalled_is_known() -> None:
    """The sequence's last record was already written, and its position with it."""
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
    assert case.allocation.output_lengths.most is None, "31 are too few outputs"
    swapped.end(swapped.far)
    assert case.allocation.output_lengths.most == 10


def test_a_sequence_is_preempted_where_host_memory_is_full() -> None:
    case = SwappedOut(host_blocks=1)
    assert (case.loop.stalled, case.loop.preempted) == ([], [case.far])


def test_steps_that_were_launched_count_and_steps_that_advance_nothing_do_not() -> None:
    """Blocks for 12 tokens: they are short when the launched steps may come within six of their end."""
    case = Case(blocks=100)
    key = case.admit(0, tokens=PROMPT + 12, end=PROMPT + 1000)
    case.run(4)
    assert not case.loop.grown
    for _ in range(50):  # steps in which the slot is held
        case.allocation.step()
    assert not case.loop.grown
    case.loop.launched = 3
    case.allocation.step()
    assert case.loop.grown == [(key, PROMPT + 12 + ALLOCATION_TOKENS)]
    assert case.allocation.context_tokens == PROMPT + 4, "launched steps have written nothing yet"


def test_the_position_of_a_slots_sequence_before_is_not_taken_for_its_own() -> None:
    case = Case(blocks=100)
    case.loop.progress.publish([0], [0], [PROMPT + 11])
    case.admit(0, tokens=PROMPT + 12, end=PROMPT + 1000)
    case.allocation.step()
    assert case.allocation.context_tokens == PROMPT
    assert not case.loop.grown


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_blocks_are_wanted_as_early_as_a_sequences_own_steps_need_them(tokens: int) -> None:
    """Whatever rows its slot has. Its blocks never end."""
    case = Case(blocks=100, loop=Steps(shape=StepShape(SLOTS, 8), launched=2))
    key = case.admit(0, tokens=PROMPT + 80, end=PROMPT + 400)
    while not case.loop.grown:
        case.run(1, tokens)
    assert case.position(key) - tokens == PROMPT + 80 - (6 + 2) * tokens
    while case.position(key) < PROMPT + 399:
        case.run(1, tokens)
        launched = case.position(key) + 2 * tokens
        assert min(launched, PROMPT + 399) <= case.reservations[key].grant.capacity
    assert case.loop.grown[-1] == (key, PROMPT + 399)


def test_a_sequence_whose_drafts_begin_to_be_right_wants_its_blocks_earlier_from_then_on() -> None:
    case = Case(blocks=100, loop=Steps(shape=StepShape(SLOTS, 8)))
    key = case.admit(0, tokens=PROMPT + 60, end=PROMPT + 400)
    case.run(20)
    case.run(4, tokens=6)  # 44 tokens in 24 steps: two a step, rounded up
    assert not case.loop.grown
    assert case.position(key) == PROMPT + 44
    case.run(1, tokens=5)
    case.allocation.step()
    assert case.loop.grown


def test_a_known_output_length_is_not_estimated() -> None:
    """Steps run between a slot's last record and the time at which it is read."""
    case = Case(blocks=1000)
    for number in range(32):
        key = case.admit(number, tokens=PROMPT + 29, end=PROMPT + 30)
        case.run(25)
        case.allocation.remove(key, 8)
        case.pools.release(case.reservations.pop(key).grant.blocks)
    assert case.allocation.output_lengths.most == 7, "the last token has no KV"
