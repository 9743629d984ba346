"""Every store on every kind of Redis, and in memory: one suite."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest

from baton.state import State
from baton.state.stores.seal import new_journal_key
from tests.state.contract import (
    JournalContract,
    PrefixIndexContract,
    RegistryContract,
)
from tests.state.memory import Memory, memory_state
from tests.state.opened import open_state

Pair = tuple[State, State]


@pytest.fixture(params=["memory", "redis", "cluster", "sentinel"])
def url(request: pytest.FixtureRequest) -> str | None:
    """The URL of the store; None in memory."""
    if request.param == "memory":
        return None
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


@pytest.fixture
async def pair(url: str | None) -> AsyncIterator[Pair]:
    """Two users of one store, each with its own key for the journal."""
    if url is None:
        memory = Memory()
        one = memory_state(memory)
        memory.journal_key = new_journal_key()
        both = one, memory_state(memory)
    else:
        namespace = uuid.uuid4().hex
        both = await open_state(url, namespace=namespace), await open_state(url, namespace=namespace)
    yield both
    for state in both:
        await state.close()


@pytest.fixture
def state(pair: Pair) -> State:
    return pair[0]


@pytest.fixture
def other(pair: Pair) -> State:
    return pair[1]


class TestRegistry(RegistryContract):
    pass


class TestPrefixIndex(PrefixIndexContract):
    pass


class TestJournal(JournalContract):
    pass
