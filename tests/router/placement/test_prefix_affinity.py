"""Prefix affinity: workers are chosen by their cached prefixes, and no request waits for the index."""

from __future__ import annotations

import asyncio
from typing import cast

import grpc
import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.model_spec.block_hash import BlockHasher
from baton.v1.types_pb2 import WorkerIdentity, WorkerRole
from baton.v1.worker_pb2 import DescribeResponse, Load
from services.router.placement.claim import Claim
from services.router.placement.placement import NoRoom, Placement
from services.router.placement.pools import Pools
from services.router.placement.prefix_affinity import PrefixAffinity
from services.router.workers.directory import Directory
from services.router.workers.peer import Peer
from services.router.workers.worker import Worker
from tests.router.conftest import SiteMaker, ids_request, until
from tests.state.memory import Memory, memory_state

BLOCK, SECRET = 4, "a secret of sixteen"
PROMPT = list(range(1, 22))  # five full blocks; the last token has to be computed


def worker(number: int, *, fingerprint: bytes = b"same", role: str = "PREFILL", blocks: int = 100) -> Worker:
    described = DescribeResponse(
        identity=WorkerIdentity(
            name=f"w{number}", incarnation=bytes([number]) * 16, role=WorkerRole.Value(f"WORKER_ROLE_{role}")
        ),
        fingerprint=fingerprint,
        cache_dtype="float32",
        load=Load(slots=8, free_slots=8, blocks=blocks, block_tokens=BLOCK),
    )
    found = Worker(cast("Peer", None), described, lambda: None)
    found.following = True
    return found


class Workers(Directory):
    """The workers of a test, without any process."""

    def __init__(self, workers: list[Worker]) -> None:
        self.mine = workers

    @property
    def workers(self) -> list[Worker]:
        return self.mine


def names(count: int, *, tenant: str = "") -> tuple[bytes, ...]:
    hasher = BlockHasher(
        SECRET.encode(), tenant=tenant, fingerprint=b"same", cache_dtype="float32", block_tokens=BLOCK
    )
    return hasher.hashes(PROMPT)[:count]


async def test_a_prompt_that_was_sent_counts_as_cached() -> None:
    one, two = worker(1), worker(2)
    prefixes = PrefixAffinity(SECRET, lambda: [one, two])
    prompt = await prefixes.hash_prompt(PROMPT)
    assert prompt.hashes_for(one) == names(5)
    assert prefixes.cached_tokens(one, prompt) == 0
    prefixes.prompt_sent(one, await prefixes.hash_prompt(PROMPT[:14]))
    assert (prefixes.cached_tokens(one, prompt), prefixes.cached_tokens(two, prompt)) == (12, 0)
    assert (
        prefixes.cached_tokens(one, await prefixes.hash_prompt(PROMPT[:12])) == 8
    )  # one token is always computed
    assert prefixes.cached_tokens(one, await prefixes.hash_prompt([9, *PROMPT])) == 0


@pytest.mark.parametrize("role", ["PREFILL", "BOTH"])
async def test_also_of_one_worker_it_is_known_what_it_has_cached(role: str) -> None:
    """The number of prompts that may be queued there depends on the cached tokens."""
    one, decode = worker(1, role=role), worker(2, role="DECODE")
    prefixes = PrefixAffinity(SECRET, lambda: [one, decode] if role == "PREFILL" else [one])
    for exact in (PROMPT, PROMPT[:20]):  # decode takes over whole blocks up to the prompt's end
        prompt = await prefixes.hash_prompt(exact)
        assert prompt.hashes_for(decode) == prompt.hashes_for(one) == names(5)
        prefixes.prompt_sent(one, prompt)
        cached = [prefixes.cached_tokens(at, prompt) for at in (one, decode)]
        assert cached == [BLOCK * ((len(exact) - 1) // BLOCK), 0]


async def test_the_output_that_a_worker_has_decoded_counts_as_cached_but_for_its_last_token() -> None:
    one, two, decode = worker(1, role="BOTH"), worker(2, role="BOTH"), worker(3, role="DECODE")
    prefixes = PrefixAffinity(SECRET, lambda: [one, two, decode])
    sent: list[tuple[str, int]] = []
    prefixes.on_sent = lambda at, hashes: sent.append((at.name, len(hashes)))
    prompt = await prefixes.hash_prompt(PROMPT[:10], "a")
    next_turn = await prefixes.hash_prompt([*PROMPT, 50, 51], "a")
    prefixes.output_ended(one, prompt, PROMPT[:10], PROMPT[10:12])  # its 12th token has no KV
    assert (prefixes.cached_tokens(one, next_turn), sent) == (0, [])
    prefixes.output_ended(one, prompt, PROMPT[:10], PROMPT[10:])
    assert [prefixes.cached_tokens(at, next_turn) for at in (one, two, decode)] == [20, 0, 0]
    assert sent == [("w1", 5)]
    prefixes.output_ended(decode, prompt, PROMPT[:10], PROMPT[10:17])
    assert prefixes.cached_tokens(decode, next_turn) == 16
    assert prefixes.cached_tokens(one, await prefixes.hash_prompt(PROMPT, "b")) == 0
    short = await prefixes.hash_prompt(PROMPT[:3], "a")
    prefixes.output_ended(two, short, PROMPT[:3], PROMPT[3:10])
    assert prefixes.cached_tokens(two, next_turn) == 8


async def test_an_output_adds_nothing_without_a_cache_or_a_live_worker() -> None:
    without, one, lost = worker(1), worker(2), worker(3)
    without.described.cache_dtype = ""
    lost.lost = True
    prefixes = PrefixAffinity(SECRET, lambda: [without, one, lost])
    prompt = await prefixes.hash_prompt(PROMPT[:10])
    for at in (without, lost):
        prefixes.output_ended(at, prompt, PROMPT[:10], PROMPT[10:])
        assert prefixes.cached_tokens(at, await prefixes.hash_prompt(PROMPT)) == 0


async def test_long_outputs_are_hashed_in_a_thread_and_only_so_many() -> None:
    one, two = worker(1), worker(2)
    prefixes = PrefixAffinity(SECRET, lambda: [one, two], long_tokens=8, max_outputs=1)
    prompt, whole = await prefixes.hash_prompt(PROMPT[:10]), await prefixes.hash_prompt([*PROMPT, 50])
    for at in (one, two):
        prefixes.output_ended(at, prompt, PROMPT[:10], PROMPT[10:])
    assert prefixes.cached_tokens(one, whole) == 0
    await until(lambda: prefixes.cached_tokens(one, whole) == 20)
    assert prefixes.cached_tokens(two, whole) == 0
    await prefixes.close()


async def test_tenants_and_models_share_nothing_and_without_a_secret_there_is_no_view() -> None:
    one, other = worker(1), worker(2, fingerprint=b"other")
    all_there = [one, other, worker(3), worker(4, fingerprint=b"other")]
    prefixes = PrefixAffinity(SECRET, lambda: all_there)
    prompt = await prefixes.hash_prompt(PROMPT, "a")
    assert not set(prompt.hashes_for(one)) & set(prompt.hashes_for(other))
    prefixes.prompt_sent(one, prompt)
    assert prefixes.cached_tokens(one, await prefixes.hash_prompt(PROMPT, "a")) == 20
    assert prefixes.cached_tokens(one, await prefixes.hash_prompt(PROMPT, "b")) == 0
    disabled = PrefixAffinity("", lambda: all_there)
    disabled.prompt_sent(one, await disabled.hash_prompt(PROMPT))
    assert disabled.cached_tokens(one, await disabled.hash_prompt(PROMPT)) == 0


async def test_a_view_has_at_most_the_workers_blocks_and_ends_with_the_worker() -> None:
    one = worker(1, blocks=3)
    twin = worker(2)  # nothing is hashed for a single worker
    live = [one, twin]
    prefixes = PrefixAffinity(SECRET, lambda: live)
    prompt = await prefixes.hash_prompt(PROMPT)
    prefixes.prompt_sent(one, prompt)
    assert prefixes.cached_tokens(one, prompt) == 3 * BLOCK
    live.clear()
    prefixes.forget_lost()
    assert prefixes.cached_tokens(one, prompt) == 0


def placement_among(workers: list[Worker]) -> Placement:
    """Placement among these workers, which are one pool."""
    pools = Pools("", b"", None, lambda: workers)
    pools.review()
    return Placement(Workers(workers), pools, prefill_ahead_tokens=1000)


async def test_the_longest_prefix_wins_unless_its_queue_is_longer_by_more() -> None:
    one, two, decode = worker(1), worker(2), worker(3, role="DECODE")
    prefixes = PrefixAffinity(SECRET, lambda: [one, two, decode])
    prompt = await prefixes.hash_prompt(PROMPT)
    prefixes.prompt_sent(two, prompt)

    def pick() -> tuple[str, int]:
        placed = placement_among([one, two, decode]).pick(
            len(PROMPT), 5, lambda at: prefixes.cached_tokens(at, prompt)
        )
        assert not isinstance(placed, NoRoom)
        queued = placed.prefill.queued_tokens
        placed.release()
        return placed.prefill.name, queued

    assert pick() == ("w2", 1)  # of 21 tokens, 20 are there
    two.queued_tokens = 19
    assert pick()[0] == "w2"
    two.queued_tokens = 21
    assert pick() == ("w1", 21)


async def test_a_combined_worker_is_chosen_for_its_prefix_hits() -> None:
    one, two = worker(1, role="BOTH"), worker(2, role="BOTH")
    placement = placement_among([one, two])
    two.claimed_slots = 3
    claim = placement.pick(21, 5, lambda at: 20 if at is two else 0)
    assert not isinstance(claim, NoRoom)
    assert claim.decode is two
    two.queued_tokens = 20
    other = placement.pick(21, 5, lambda at: 20 if at is two else 0)
    assert not isinstance(other, NoRoom)
    assert other.decode is one


async def test_the_hits_of_each_worker_are_computed_once() -> None:
    several = [worker(1), worker(2), worker(3, role="DECODE"), worker(4, role="BOTH")]
    asked: list[str] = []

    def cached(at: Worker) -> int:
        asked.append(at.name)
        return 0

    assert isinstance(placement_among(several).pick(21, 5, cached), Claim)
    assert sorted(asked) == ["w1", "w2", "w3", "w4"]


async def test_the_index_corrects_the_view_in_the_background() -> None:
    state = memory_state(Memory())
    one, two = worker(1), worker(2)
    await state.prefix_index.apply(two.identity.incarnation.hex(), names(3), [], fresh=True)
    prefixes = PrefixAffinity(SECRET, lambda: [one, two], state)
    prompt = await prefixes.hash_prompt(PROMPT)
    assert prefixes.cached_tokens(two, prompt) == 0  # no request has waited
    await until(lambda: prefixes.cached_tokens(two, prompt) == 12)
    prefixes.prompt_sent(one, prompt)
    await prefixes.hash_prompt(PROMPT)
    await asyncio.sleep(0.05)
    assert prefixes.cached_tokens(one, prompt) == 20  # too young for the index to know better
    await prefixes.close()
    await state.close()


async def test_an_unavailable_index_delays_nothing() -> None:
    memory = Memory()
    state = memory_state(memory)
    memory.unavailable = True
    with pytest.raises(BatonError) as refused:
        await state.prefix_index.longest_prefix(names(1), ["x"])
    assert refused.value.kind is ErrorKind.UNAVAILABLE
    one = worker(1)
    prefixes = PrefixAffinity(SECRET, lambda: [one, worker(2)], state)
    prompt = await prefixes.hash_prompt(PROMPT)
    prefixes.prompt_sent(one, prompt)
    await asyncio.sleep(0.02)
    assert prefixes.cached_tokens(one, prompt) == 20
    await prefixes.close()
    await state.close(0.1)


async def test_prompts_with_a_common_prefix_go_to_the_same_worker(site: SiteMaker) -> None:
    async with site(prefill=3, decode=1, prefix_secret=SECRET) as here:
        last = [await here.generate(ids_request([*range(32), n])) for n in range(6)]
        assert len({answer[-1].trace.prefill_worker for answer in last}) == 1
        others = [await here.generate(ids_request([n + 40] * 33)) for n in range(6)]
        assert all(answer[-1].usage.cached_tokens == 0 for answer in others)
        await here.quiet()


async def test_of_equally_loaded_decode_workers_the_one_with_the_prompt_is_chosen() -> None:
    one, two = worker(1, role="DECODE"), worker(2, role="DECODE")
    placement = placement_among([one, two, worker(3)])

    def pick() -> Worker:
        claim = placement.pick(21, 5, lambda at: 8 if at is two else 0)
        assert not isinstance(claim, NoRoom)
        claim.release()
        return claim.decode

    assert pick() is two
    two.reserved_tokens = 1
    assert pick() is one
    one.claimed_slots = 1
    assert pick() is two


def names_of(ids: list[int]) -> list[bytes]:
    """The block hashes of the ids as the fakes compute them."""
    hasher = BlockHasher(
        SECRET.encode(), tenant="", fingerprint=b"same", cache_dtype="float32", block_tokens=16
    )
    return list(hasher.hashes(ids))


async def test_decode_gets_the_hashes_of_a_prompts_full_blocks(
    site: SiteMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site(decode=2, prefix_secret=SECRET) as here:
        prompts = [list(range(48)), list(range(48)), [*range(48), 50, 51], list(range(15))]
        for prompt in prompts:
            await here.generate(ids_request(prompt))
        first, second = (here.worker(name).decode.reserves for name in ("decode-0", "decode-1"))
        sent = first if len(first) > len(second) else second
        assert len(sent) >= 3, "a worker that was sent a prompt gets those that continue it"
        asked = {tuple(one.block_hashes) for one in (*first, *second)}
        assert asked == {tuple(names_of(prompt)) for prompt in prompts}
        monkeypatch.setattr("services.router.lifecycle.attempt_calls.MAX_RESERVE_HASHES", 2)
        await here.generate(ids_request(prompts[0]))
        assert list(sent[-1].block_hashes) == names_of(prompts[0])[:2]
        await here.quiet()


async def test_an_attempt_after_a_failed_one_sends_no_hashes(site: SiteMaker) -> None:
    """The next attempt sends all blocks, in case prefill and decode disagree about a hash."""
    async with site(prefix_secret=SECRET) as here:
        here.worker("prefill-0").behaviour.break_prefills = 1
        here.worker("prefill-0").behaviour.break_code = grpc.StatusCode.FAILED_PRECONDITION
        answer = await here.generate(ids_request(list(range(48))))
        assert answer[-1].trace.attempts == 2
        names = [list(one.block_hashes) for one in here.worker("decode-0").decode.reserves]
        assert names == [names_of(list(range(48))), []]
        await here.quiet()


@pytest.mark.parametrize("workers", [{"prefill": 0, "decode": 0, "both": 2}, {}], ids=["both", "no secret"])
async def test_combined_workers_and_routers_without_a_secret_send_no_hashes(
    site: SiteMaker, workers: dict[str, int]
) -> None:
    async with site(**workers, prefix_secret=SECRET if workers else "") as here:
        await here.generate(ids_request(list(range(48))))
        sent = [one for worker in here.cluster.workers.values() for one in worker.decode.reserves]
        assert [list(one.block_hashes) for one in sent] == [[]]


async def test_the_next_turn_of_a_conversation_is_known_to_have_the_answer_cached(site: SiteMaker) -> None:
    async with site(prefill=0, decode=0, both=2, prefix_secret=SECRET) as here:
        prefixes = here.router.prefixes
        answer = await here.generate(ids_request(list(range(40)), max_tokens=30))
        ids = [token for delta in answer for token in delta.token_ids]
        assert len(ids) == 30
        prompt = await prefixes.hash_prompt([*range(40), *ids, 9])
        cached = {at.name: prefixes.cached_tokens(at, prompt) for at in here.router.directory.workers}
        decode = answer[-1].trace.decode_worker
        assert cached.pop(decode) == 64  # 69 tokens have KV
        assert list(cached.values()) == [0]
        await here.quiet()
