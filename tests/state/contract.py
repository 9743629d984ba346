"""Tests for every implementation of the stores. `test_contract.py` runs them on each.

Leases are short where a test waits for their end; everything else is as in production.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.base.errors import BatonError, ErrorKind, NameTakenError
from baton.state import JournalRecord, Member, State, new_incarnation
from baton.state.stores.protocols import MAX_DELTA, MAX_LOOKUP_BLOCKS
from baton.state.stores.records import JournalWrite
from tests.state.journal_reader import open_ids, read_journal, stored_entry

SHORT_S = 0.2
LONG_S = 60.0

_BLOCKS = [bytes([number]) * 32 for number in range(12)]
_model_settings = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def member(name: str = "decode-0", **fields: object) -> Member:
    """A fresh start of the worker `name`."""
    described = {"name": name, "incarnation": new_incarnation(), "role": "decode"} | fields
    return Member.model_validate(described)


async def names(state: State) -> set[str]:
    return {entry.member.name for entry in (await state.registry.listing()).entries}


class RegistryContract:
    async def test_what_is_announced_is_listed_whole(self, state: State) -> None:
        one = member(
            rank=1,
            rank_count=2,
            host="h",
            addresses={"grpc": "127.0.0.1:1", "transfer": "[::1]:2"},
            fingerprint="ab" * 32,
            limits={"slots": 16, "vocab_size": 2**40},
            draining=True,
        )
        generation = await state.registry.announce(one, 0, LONG_S)
        (entry,) = (await state.registry.listing()).entries
        assert (entry.member, entry.generation) == (one, generation)
        assert generation > 0

    async def test_an_empty_registry_lists_no_member(self, state: State) -> None:
        assert (await state.registry.listing()).entries == ()

    async def test_a_renewal_keeps_generation_and_takes_the_new_description(self, state: State) -> None:
        one = member()
        generation = await state.registry.announce(one, 0, LONG_S)
        drains = one.model_copy(update={"draining": True})
        assert await state.registry.announce(drains, generation, LONG_S) == generation
        # As after an answer that was lost on its way.
        assert await state.registry.announce(drains, 0, LONG_S) == generation
        (entry,) = (await state.registry.listing()).entries
        assert entry.member.draining

    async def test_a_newer_incarnation_has_the_name(self, state: State) -> None:
        old, new = member(), member()
        first = await state.registry.announce(old, 0, LONG_S)
        second = await state.registry.announce(new, 0, LONG_S)
        assert second > first
        with pytest.raises(BatonError) as refused:
            await state.registry.announce(old, first, LONG_S)
        assert refused.value.kind is ErrorKind.CONFLICT
        (entry,) = (await state.registry.listing()).entries
        assert entry.member == new

    async def test_a_refusal_says_who_has_the_name_and_where(self, state: State) -> None:
        old, new = member(), member(host="host-b", addresses={"grpc": "10.0.0.2:50060"})
        first = await state.registry.announce(old, 0, LONG_S)
        await state.registry.announce(new, 0, LONG_S)
        for start, generation, kept in ((old, first, False), (member(), 0, True)):
            with pytest.raises(NameTakenError, match=r"decode-0.*host-b at 10\.0\.0\.2:50060") as refused:
                await state.registry.announce(start, generation, LONG_S)
            assert (refused.value.host, refused.value.kept) == ("host-b", kept)

    async def test_two_that_live_do_not_take_turns(self, state: State) -> None:
        """A newer start takes the name of one that lives; that one's next start does not get it back."""
        old, new = member(), member()
        first = await state.registry.announce(old, 0, LONG_S)
        assert await state.registry.keeper(old.name) is None
        second = await state.registry.announce(new, 0, LONG_S)
        with pytest.raises(NameTakenError):
            await state.registry.announce(old, first, LONG_S)
        kept = await state.registry.keeper(old.name)
        assert kept is not None
        assert kept.member == new
        for _ in range(3):
            with pytest.raises(NameTakenError):
                await state.registry.announce(member(), 0, LONG_S)
        assert await state.registry.announce(new, second, LONG_S + 1) == second
        renewed = await state.registry.keeper(old.name)
        assert renewed is not None
        assert renewed.lease_end_ms > kept.lease_end_ms

    @pytest.mark.parametrize("end", ["withdrawn", "lapsed", "draining"])
    async def test_a_name_is_free_once_its_keeper_ends(self, state: State, end: str) -> None:
        old, new, next_ = member(), member(), member()
        first = await state.registry.announce(old, 0, LONG_S)
        second = await state.registry.announce(new, 0, LONG_S)
        with pytest.raises(NameTakenError):
            await state.registry.announce(old, first, LONG_S)
        if end == "withdrawn":
            await state.registry.withdraw(new.name, new.incarnation)
        elif end == "lapsed":
            await state.registry.announce(new, second, SHORT_S)
            await asyncio.sleep(2 * SHORT_S)
        else:
            await state.registry.announce(new.model_copy(update={"draining": True}), second, LONG_S)
        assert await state.registry.keeper(new.name) is None
        assert await state.registry.announce(next_, 0, LONG_S) > 0
        # It has taken the name from nobody that lives.
        assert await state.registry.announce(member(), 0, LONG_S) > 0

    async def test_who_drains_gives_its_name_away(self, state: State) -> None:
        """A worker that is stopping and whose successor has registered has lost nothing."""
        old, new = member(draining=True), member()
        first = await state.registry.announce(old, 0, LONG_S)
        await state.registry.announce(new, 0, LONG_S)
        with pytest.raises(NameTakenError):
            await state.registry.announce(old, first, LONG_S)
        assert await state.registry.keeper(new.name) is None
        assert await state.registry.announce(member(), 0, LONG_S) > 0

    async def test_order_survives_a_lapse_of_the_newer(self, state: State) -> None:
        old, new = member(), member()
        first = await state.registry.announce(old, 0, LONG_S)
        await state.registry.announce(new, 0, SHORT_S)
        await asyncio.sleep(2 * SHORT_S)
        with pytest.raises(BatonError):
            await state.registry.announce(old, first, LONG_S)

    async def test_a_lapsed_lease_drops_only_its_own_entry(self, state: State) -> None:
        short = member("short")
        await state.registry.announce(member("long"), 0, LONG_S)
        generation = await state.registry.announce(short, 0, SHORT_S)
        assert await names(state) == {"short", "long"}
        await asyncio.sleep(2 * SHORT_S)
        assert await names(state) == {"long"}
        assert await state.registry.announce(short, generation, LONG_S) == generation
        assert await names(state) == {"short", "long"}

    async def test_withdrawing_takes_only_ones_own(self, state: State) -> None:
        old, new = member(), member()
        await state.registry.announce(old, 0, LONG_S)
        await state.registry.announce(new, 0, LONG_S)
        await state.registry.withdraw(old.name, old.incarnation)
        assert await names(state) == {new.name}
        await state.registry.withdraw(new.name, new.incarnation)
        await state.registry.withdraw(new.name, new.incarnation)
        assert await names(state) == set()

    async def test_the_epoch_stays_as_long_as_the_registry_does(self, state: State) -> None:
        await state.registry.announce(member("a"), 0, LONG_S)
        first = (await state.registry.listing()).epoch
        await state.registry.announce(member("b"), 0, LONG_S)
        assert (await state.registry.listing()).epoch == first != ""

    @_model_settings
    @given(steps=st.lists(st.tuples(st.sampled_from("awr"), st.integers(0, 3)), max_size=25))
    async def test_the_name_is_the_newest_ones_that_it_is_not_kept_from(
        self, state: State, steps: list[tuple[str, int]]
    ) -> None:
        """announce (first time or again), withdraw, and a first announcement whose reply was lost."""
        name = f"w-{uuid.uuid4().hex}"
        starts = [member(name) for _ in range(4)]
        generations = [0] * 4
        holder: int | None = None
        keeper: int | None = None
        for action, who in steps:
            outranked = holder is not None and 0 < generations[who] < generations[holder]
            too_late = generations[who] == 0 and keeper is not None and keeper == holder != who
            if action == "w":
                await state.registry.withdraw(name, starts[who].incarnation)
                holder = None if holder == who else holder
                keeper = None if keeper == who else keeper
            elif outranked or too_late:
                with pytest.raises(NameTakenError):
                    await state.registry.announce(starts[who], generations[who], LONG_S)
                keeper = holder if outranked else keeper
            else:
                shown = 0 if action == "r" and holder == who else generations[who]
                generations[who] = await state.registry.announce(starts[who], shown, LONG_S)
                holder = who
            entries = (await state.registry.listing()).entries
            found = [entry.member.incarnation for entry in entries if entry.member.name == name]
            assert found == ([] if holder is None else [starts[holder].incarnation])


class PrefixIndexContract:
    async def test_the_longest_run_from_the_first_block(self, state: State) -> None:
        index, blocks = state.prefix_index, [os.urandom(32) for _ in range(100)]
        a, b, c, d = (new_incarnation() for _ in range(4))
        assert await index.apply(a, blocks, [], fresh=True)
        assert await index.apply(b, blocks[:33] + blocks[34:], [], fresh=True)
        assert await index.apply(c, blocks[1:], [], fresh=True)
        assert await index.longest_prefix(blocks, [a, b, c, d]) == {a: 100, b: 33}
        assert await index.longest_prefix(blocks[:7], [a, b, a]) == {a: 7, b: 7}
        assert await index.longest_prefix(blocks, []) == {}
        assert await index.longest_prefix([], [a]) == {}

    async def test_an_unknown_holder_must_begin_anew(self, state: State) -> None:
        index, holder = state.prefix_index, new_incarnation()
        assert not await index.apply(holder, _BLOCKS, [])
        assert await index.longest_prefix(_BLOCKS, [holder]) == {}
        assert await index.apply(holder, [], [], fresh=True)
        assert await index.apply(holder, _BLOCKS, [])
        assert await index.apply(holder, [], _BLOCKS)
        assert await index.apply(holder, _BLOCKS[:2], [])  # still known without a block
        assert await index.apply(holder, [_BLOCKS[0]], [], fresh=True)
        assert await index.longest_prefix(_BLOCKS, [holder]) == {holder: 1}
        await index.forget(holder)
        assert await index.longest_prefix(_BLOCKS, [holder]) == {}
        assert not await index.apply(holder, _BLOCKS, [])

    async def test_calls_are_bounded(self, state: State) -> None:
        index, holder = state.prefix_index, new_incarnation()
        blocks = [number.to_bytes(32, "big") for number in range(MAX_LOOKUP_BLOCKS + 100)]
        with pytest.raises(BatonError) as refused:
            await index.apply(holder, blocks[: MAX_DELTA + 1], [], fresh=True)
        assert refused.value.kind is ErrorKind.INVALID
        await index.apply(holder, blocks[:MAX_DELTA], [], fresh=True)
        await index.apply(holder, blocks[MAX_DELTA:], [])
        assert await index.longest_prefix(blocks, [holder]) == {holder: MAX_LOOKUP_BLOCKS}

    @_model_settings
    @given(
        st.lists(
            st.tuples(
                st.integers(0, 1),
                st.sets(st.sampled_from(_BLOCKS)),
                st.sets(st.sampled_from(_BLOCKS)),
                st.booleans(),
            ),
            max_size=12,
        )
    )
    async def test_it_is_the_set_that_was_described(
        self, state: State, steps: list[tuple[int, set[bytes], set[bytes], bool]]
    ) -> None:
        holders = [new_incarnation(), new_incarnation()]
        held: list[set[bytes] | None] = [None, None]
        for who, added, removed, fresh in steps:
            removed = removed - added
            known = set() if fresh else held[who]
            took = await state.prefix_index.apply(holders[who], sorted(added), sorted(removed), fresh=fresh)
            assert took == (known is not None)
            held[who] = None if known is None else (known | added) - removed
        expected = {}
        for holder, blocks in zip(holders, held, strict=True):
            if count := _run(_BLOCKS, blocks or set()):
                expected[holder] = count
        assert await state.prefix_index.longest_prefix(_BLOCKS, holders) == expected


def _run(hashes: Sequence[bytes], held: set[bytes]) -> int:
    return next((i for i, one in enumerate(hashes) if one not in held), len(hashes))


class JournalContract:
    async def test_an_entry_from_accepted_to_ended(self, state: State) -> None:
        journal, record = state.journal, JournalRecord(os.urandom(16), "tenant ä", (1, 2**32 - 1, 3))
        receipt = journal.append(record, LONG_S)
        assert not receipt.acknowledged
        assert await journal.flush(5)
        assert receipt.acknowledged
        assert await read_journal(journal, record.request_id) == record
        journal.mark_attempt(record.request_id, 3)
        journal.mark_attempt(record.request_id, 2)
        assert await journal.flush(5)
        found = await read_journal(journal, record.request_id)
        assert found is not None
        assert (found.attempt, found.token_ids) == (3, record.token_ids)
        assert (await journal.count_open(), await open_ids(state)) == (1, [record.request_id])
        journal.close(record.request_id)
        assert await journal.flush(5)
        assert (await journal.count_open(), await open_ids(state)) == (0, [])
        assert await read_journal(journal, record.request_id) is None

    async def test_an_entry_ends_with_its_deadline(self, state: State) -> None:
        brief, long = (JournalRecord(os.urandom(16), "t", (number,)) for number in range(2))
        state.journal.append(brief, SHORT_S)
        state.journal.append(long, LONG_S)
        assert await state.journal.flush(5)
        await asyncio.sleep(2 * SHORT_S)
        assert await open_ids(state) == [long.request_id]
        assert await state.journal.count_open() == 1
        assert await read_journal(state.journal, brief.request_id) is None
        assert await read_journal(state.journal, long.request_id) == long

    async def test_open_ones_come_by_deadline(self, state: State) -> None:
        ids = [os.urandom(16) for _ in range(5)]
        for number in (3, 0, 4, 1, 2):
            state.journal.append(JournalRecord(ids[number], "t", ()), LONG_S + number)
        assert await state.journal.flush(5)
        assert await open_ids(state) == ids

    async def test_more_than_a_batch(self, state: State) -> None:
        ids = [os.urandom(16) for _ in range(300)]
        for request_id in ids:
            state.journal.append(JournalRecord(request_id, "t", (7,) * 3000), LONG_S)
        assert await state.journal.flush(10)
        assert await state.journal.count_open() == 300
        for request_id in ids:
            state.journal.close(request_id)
        assert await state.journal.flush(10)
        assert await state.journal.count_open() == 0

    async def test_a_mark_opens_nothing(self, state: State) -> None:
        request_id = os.urandom(16)
        state.journal.mark_attempt(request_id, 2)
        state.journal.close(os.urandom(16))
        assert await state.journal.flush(5)
        assert await state.journal.count_open() == 0
        assert await read_journal(state.journal, request_id) is None

    async def test_another_key_reads_nothing(self, state: State, other: State) -> None:
        """`other` shares the store, not the key."""
        record = JournalRecord(os.urandom(16), "t", (1, 2, 3))
        state.journal.append(record, LONG_S)
        assert await state.journal.flush(5)
        with pytest.raises(BatonError) as refused:
            await read_journal(other.journal, record.request_id)
        assert refused.value.kind is ErrorKind.INTERNAL

    @_model_settings
    @given(
        st.lists(st.tuples(st.sampled_from("amc"), st.integers(0, 3), st.integers(1, 5)), max_size=25),
        st.integers(1, 6),
    )
    async def test_it_has_what_was_written(
        self, state: State, steps: list[tuple[str, int, int]], batch: int
    ) -> None:
        ids = [os.urandom(16) for _ in range(4)]
        model: dict[bytes, tuple[bytes, int]] = {}
        writes = []
        for number, (action, who, attempt) in enumerate(steps):
            request_id, body = ids[who], b"body %d" % number
            if action == "a":
                writes.append(JournalWrite(request_id, "append", attempt, body, LONG_S))
                model[request_id] = (body, attempt)
            elif action == "m":
                writes.append(JournalWrite(request_id, "attempt", attempt))
                if request_id in model:
                    model[request_id] = (model[request_id][0], max(attempt, model[request_id][1]))
            else:
                writes.append(JournalWrite(request_id, "close"))
                model.pop(request_id, None)
        store = state.journal_store
        for begin in range(0, len(writes), batch):
            await store.write(writes[begin : begin + batch])
        for request_id in ids:
            entry = await stored_entry(store, request_id)
            assert (None if entry is None else (entry.body, entry.attempt)) == model.get(request_id)
        assert set(ids) & set(await open_ids(state)) == set(model)
        await store.write([JournalWrite(request_id, "close") for request_id in ids])
