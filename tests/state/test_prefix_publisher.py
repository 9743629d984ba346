"""The publisher brings the index to what the worker holds, through wipes and outages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.state import State, new_incarnation
from baton.state.client.counters import Counters
from baton.state.prefix_publisher import PrefixPublisher
from tests.state.memory import Memory, MemoryPrefixIndex, memory_state
from tests.support.waiting import until

BLOCKS = [number.to_bytes(32, "big") for number in range(3000)]


@pytest.fixture
async def memory() -> Memory:
    return Memory()


@pytest.fixture
async def state(memory: Memory) -> AsyncIterator[State]:
    state = memory_state(memory)
    yield state
    await state.close(0.5)


def held(memory: Memory, holder: str) -> set[bytes]:
    return memory.held.get(holder, (set(), 0.0))[0]


async def test_more_than_one_message_and_what_comes_after(state: State, memory: Memory) -> None:
    holder = new_incarnation()
    publisher = state.publish_prefixes(holder)
    publisher.add(BLOCKS)
    await until(lambda: held(memory, holder) == set(BLOCKS))
    publisher.remove(BLOCKS[1000:])
    publisher.add(BLOCKS[2500:])
    await until(lambda: held(memory, holder) == set(BLOCKS[:1000] + BLOCKS[2500:]))


async def test_a_wiped_index_gets_everything_again(state: State, memory: Memory) -> None:
    holder = new_incarnation()
    publisher = state.publish_prefixes(holder)
    publisher.add(BLOCKS[:2000])
    await until(lambda: len(held(memory, holder)) == 2000)
    memory.wipe()
    publisher.remove(BLOCKS[:1])
    await until(lambda: held(memory, holder) == set(BLOCKS[1:2000]))
    assert state.counters.prefix_resyncs == 1


async def test_an_outage_delays_and_loses_nothing(state: State, memory: Memory) -> None:
    holder = new_incarnation()
    publisher = state.publish_prefixes(holder)
    memory.unavailable = True
    publisher.add(BLOCKS[:10])
    await until(lambda: state.counters.prefix_publishes_failed > 0)
    publisher.remove(BLOCKS[:5])
    memory.unavailable = False
    await until(lambda: held(memory, holder) == set(BLOCKS[5:10]))


async def test_closing_takes_the_holder_out(memory: Memory) -> None:
    state, holder = memory_state(memory), new_incarnation()
    state.publish_prefixes(holder).add(BLOCKS[:10])
    await until(lambda: len(held(memory, holder)) == 10)
    await state.close()
    assert held(memory, holder) == set()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "remove", "send", "away", "back", "wipe"]),
            st.sets(st.sampled_from(BLOCKS[:8])),
        ),
        max_size=30,
    )
)
async def test_whatever_happens_it_ends_right(steps: list[tuple[str, set[bytes]]]) -> None:
    memory, counters, limit = Memory(), Counters(), 6
    publisher = PrefixPublisher(MemoryPrefixIndex(memory), counters, "holder", max_blocks=limit)
    cached: set[bytes] = set()
    for event, blocks in steps:
        if event == "add":
            for one in sorted(blocks):
                if len(cached) < limit:
                    cached.add(one)
                publisher.add([one])
        elif event == "remove":
            cached -= blocks
            publisher.remove(sorted(blocks))
        elif event == "send":
            await publisher.send()
        elif event == "wipe":
            memory.wipe()
        else:
            memory.unavailable = event == "away"
    memory.unavailable = False
    for _ in range(3):
        await publisher.send()
    assert held(memory, "holder") == cached


class CountingIndex(MemoryPrefixIndex):
    """Counts the changes that it is given while the memory is there."""

    changes = 0

    async def apply(
        self, holder: str, added: Sequence[bytes], removed: Sequence[bytes], *, fresh: bool = False
    ) -> bool:
        known = await super().apply(holder, added, removed, fresh=fresh)
        self.changes += len(added) + len(removed)
        return known


async def test_changes_that_wait_are_bounded(memory: Memory) -> None:
    """More of them than there are blocks say less than the blocks themselves."""
    index, limit = CountingIndex(memory), 6
    publisher = PrefixPublisher(index, Counters(), "holder", max_blocks=limit)
    memory.unavailable = True
    for one in BLOCKS:
        publisher.add([one])
        publisher.remove([one])
    publisher.add(BLOCKS[:3])
    memory.unavailable = False
    await publisher.send()
    assert held(memory, "holder") == set(BLOCKS[:3])
    assert index.changes <= 3 * limit
