"""Only blocks that decode lacks are sent: two engines over a real link, the same tokens whatever was
resident, and nothing leaked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.base.errors import ErrorKind
from baton.engine.shared_memory.output_ring import Finish
from baton.v1.decode_pb2 import Ticket, TicketBody
from baton.v1.engine_pb2 import CancelCommand
from tests.worker.engine.engine_pair import BLOCK, Pair, PairRequest
from tests.worker.engine.stepped_engine import SteppedEngine
from tests.worker.engine.test_prefix_cache import ask


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


def words(count: int, seed: int = 1) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 97) for _ in range(count)]


def to_send(pair: Pair, request: PairRequest) -> int:
    """Bytes of the prompt's blocks that are not resident."""
    return (-(-len(request.prompt) // BLOCK) - request.resident) * pair.block_bytes


def test_turns_of_a_chat_send_only_new_blocks(pair: Pair, truth: SteppedEngine) -> None:
    conversation: list[int] = []
    shipped = resident = written = 0
    for turn in range(8):
        conversation = conversation + words(3 + 2 * turn % 7, seed=turn)
        tokens, request = pair.generate(conversation, most=6)
        assert tokens == ask(truth, conversation, most=6)[0]
        assert request.resident == written // BLOCK
        assert request.reserved.kv_bytes == to_send(pair, request)
        shipped, resident = shipped + request.reserved.kv_bytes, resident + request.resident
        written = len(conversation) + len(tokens) - 1  # the last token has no KV
        conversation = conversation + tokens
        pair.assert_free()
    sent, report = pair.source.engine.prefill.sender.counters.bytes_shipped, pair.report()
    assert (sent, report.bytes_received) == (shipped, shipped)
    assert (report.blocks_resident, report.bytes_resident) == (resident, resident * pair.block_bytes)
    assert report.prefixes.device_hits == resident > 20


def test_tokens_are_the_same_whatever_is_resident(pair: Pair, truth: SteppedEngine) -> None:
    """A prompt, the same again, and a longer one: the block that decode will write is never shared."""
    for length in (*range(1, BLOCK + 2), 2 * BLOCK - 1, 2 * BLOCK, 3 * BLOCK + 2, 4 * BLOCK, 4 * BLOCK + 1):
        prompt = words(length, seed=length)
        wanted = ask(truth, prompt)[0]
        for again in range(2):
            tokens, request = pair.generate(prompt)
            assert tokens == wanted
            assert request.resident == again * (length // BLOCK)
            assert request.reserved.kv_bytes == to_send(pair, request)
        longer = prompt + words(3, seed=90)
        tokens, request = pair.generate(longer)
        assert (tokens, request.resident) == (ask(truth, longer)[0], length // BLOCK)
        pair.assert_free()


def test_a_late_ticket_states_the_resident_blocks(tmp_path: Path, truth: SteppedEngine) -> None:
    """Prefill computes the prompt in three turns, and is ahead of its ticket by any number of turns."""
    pair = Pair(tmp_path, source={"prefix_cache": False})
    prompt = words(21)
    pair.generate(prompt)
    for turns in (0, 1, 2, 4):
        before = pair.source.engine.prefill.sender.counters.bytes_shipped
        tokens, request = pair.generate(prompt, follows_in=turns)
        assert (tokens, request.resident) == (ask(truth, prompt)[0], 5)
        assert pair.source.engine.prefill.sender.counters.bytes_shipped - before == pair.block_bytes
        pair.assert_free()
    pair.close()


def test_a_first_token_that_ends_the_request_frees_resident_blocks(pair: Pair) -> None:
    prompt = words(12)
    pair.generate(prompt)
    _, request = pair.generate(prompt, most=1)
    assert request.resident == 3
    pair.assert_free()
    assert pair.generate(prompt)[1].resident == 3


def test_a_request_shares_the_blocks_of_a_running_one(pair: Pair, truth: SteppedEngine) -> None:
    """The first is cancelled; the second continues to read the blocks that were sent for the first."""
    prompt = words(22)
    first = pair.begin(pair.reserve(prompt, 60), 60)
    pair.run_until(lambda: len(pair.tokens(first)) > 3)
    second = pair.begin(pair.reserve(prompt, 30), 30)
    assert second.resident == 5
    pair.run_until(lambda: len(pair.tokens(second)) > 3)
    pair.target.ask(cancel=CancelCommand(attempt=first.attempt))
    pair.run_until(lambda: pair.ended(first) and pair.ended(second))
    assert pair.tokens(second) == ask(truth, prompt, most=30)[0]
    done = pair.tokens(first)
    assert len(done) < 30
    pair.assert_free()
    tokens, third = pair.generate(prompt + done, most=5)
    assert third.resident == len(prompt + done) // BLOCK, "the second has written all of it"
    assert tokens == ask(truth, prompt + done, most=5)[0]


def test_a_ticket_that_ends_frees_resident_blocks(pair: Pair, truth: SteppedEngine) -> None:
    prompt = words(16)
    pair.generate(prompt)
    request = pair.reserve(prompt)
    assert request.resident == 4
    pair.target.ask(cancel=CancelCommand(attempt=request.attempt))
    pair.target.assert_free()
    pair.begin(request)  # too late
    pair.run_until(lambda: pair.ended(request))
    assert pair.failure(request)[0] in (ErrorKind.UNAVAILABLE, ErrorKind.CONFLICT)
    assert pair.generate(prompt)[0] == ask(truth, prompt)[0]
    pair.assert_free()


def test_tenants_share_nothing(pair: Pair, truth: SteppedEngine) -> None:
    prompt = words(21)
    assert pair.generate(prompt, tenant="a")[1].resident == 0
    for tenant in ("b", ""):
        tokens, request = pair.generate(prompt, tenant=tenant)
        assert (tokens, request.resident) == (ask(truth, prompt)[0], 0)
    for tenant in ("a", "b"):
        assert pair.generate(prompt, tenant=tenant)[1].resident == 5
    pair.assert_free()


INCOMPARABLE = [{"prefix_cache": False}, {"prefix_secret": ""}]


@pytest.mark.parametrize("source", INCOMPARABLE, ids=["no cache", "another secret"])
def test_prefill_that_cannot_compare_hashes_trusts_the_ticket(
    tmp_path: Path, truth: SteppedEngine, source: dict[str, Any]
) -> None:
    pair = Pair(tmp_path, source=source)
    prompt = words(21)
    for resident in (0, 5):
        tokens, request = pair.generate(prompt)
        assert (tokens, request.resident) == (ask(truth, prompt)[0], resident)
    pair.assert_free()
    pair.close()


@pytest.mark.parametrize("source", [{}, *INCOMPARABLE], ids=["same secret", "no cache", "another secret"])
@pytest.mark.parametrize("whose", ["", "b"], ids=["another prompt's", "another tenant's"])
def test_hashes_of_another_prompt_fail_the_attempt(
    tmp_path: Path, truth: SteppedEngine, source: dict[str, Any], whose: str
) -> None:
    """The router sends wrong hashes. Decode checks by itself where prefill cannot."""
    pair = Pair(tmp_path, source=source)
    prompt, other = words(18, seed=1), words(18, seed=2 if not whose else 1)
    pair.generate(other, tenant=whose)
    before = cached_bytes(pair)
    request = pair.reserve(prompt, names=pair.hashes(other, whose))
    assert request.resident == 4
    pair.begin(request)
    pair.run_until(lambda: "failed" in pair.source.of(request.number))
    kind, message = pair.failure(request)
    assert kind is ErrorKind.CONFLICT
    assert "not of these tokens" in message
    pair.target.ask(cancel=CancelCommand(attempt=request.attempt))  # as its router does
    assert pair.tokens(request) == []
    assert cached_bytes(pair) == before
    for tokens, tenant in ((prompt, ""), (other, whose)):
        assert pair.generate(tokens, tenant=tenant)[0] == ask(truth, tokens)[0]
    pair.assert_free()
    pair.close()


def cached_bytes(pair: Pair) -> dict[bytes, bytes]:
    """The contents of decode's cached blocks, by hash."""
    model = pair.target.model
    return {
        name: bytes(model.cache.read_block(0, blocks[0], 0, pair.block_bytes))
        for name, blocks in model.pools.cached.entries.items()
    }


@pytest.mark.parametrize("claimed", [1, 3, 5])
def test_a_forged_claim_is_refused(pair: Pair, claimed: int) -> None:
    """The ticket is tampered with: more or fewer resident blocks, even with the right hash."""
    prompt = words(21)
    pair.generate(prompt[:13])
    request = pair.reserve(prompt)
    assert request.resident == 3
    body = TicketBody.FromString(request.reserved.ticket.body)
    body.resident_counts[0], body.resident_hash = claimed, pair.hashes(prompt)[claimed - 1]
    if claimed == 3:
        body.token_count, body.resident_hash = 21, b"x" * 16
    forged = body.SerializeToString(deterministic=True)
    request.reserved.ticket.CopyFrom(Ticket(body=forged, signature=request.reserved.ticket.signature))
    pair.begin(request)
    pair.run_until(lambda: pair.ended(request) or "failed" in pair.source.of(request.number))
    refused = {1: ErrorKind.FORBIDDEN, 3: ErrorKind.CONFLICT, 5: ErrorKind.FORBIDDEN}
    assert pair.failure(request)[0] is refused[claimed]
    assert pair.tokens(request) == []
    pair.target.ask(cancel=CancelCommand(attempt=request.attempt))
    pair.assert_free()


@pytest.mark.parametrize("claimed", [[6], [2, 2]], ids=str)
def test_a_claim_that_the_prompt_does_not_fill_is_refused(pair: Pair, claimed: list[int]) -> None:
    request = pair.reserve(words(21))
    body = TicketBody.FromString(request.reserved.ticket.body)
    body.resident_counts[:] = claimed
    request.reserved.ticket.body = body.SerializeToString()
    pair.begin(request)
    pair.run_until(lambda: "failed" in pair.source.of(request.number))
    assert pair.failure(request)[0] is ErrorKind.CONFLICT
    pair.source.assert_free()


def test_idle_cached_blocks_are_evicted(tmp_path: Path, truth: SteppedEngine) -> None:
    """32 blocks and five chats of a dozen: the least recently used blocks are evicted, and tokens stay
    the same."""
    pair = Pair(tmp_path)
    prompts = [words(40 + seed, seed=seed) for seed in range(5)]
    for _ in range(2):
        for prompt in prompts:
            for _ in range(2):
                assert pair.generate(prompt)[0] == ask(truth, prompt)[0]
                pair.assert_free()
    report = pair.report()
    assert report.prefixes.evicted_blocks > 60
    assert report.blocks_resident > 60
    pair.close()


@pytest.mark.parametrize(
    "host_kv_mb", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["preempted", "swapped"]
)
def test_sequences_that_share_blocks_are_swapped_out_or_preempted(
    tmp_path: Path, truth: SteppedEngine, host_kv_mb: int
) -> None:
    pair = Pair(tmp_path, kv_blocks=25, reserve_output_tokens=4, host_kv_mb=host_kv_mb)
    begin = words(16)
    pair.generate(begin)
    prompts = [begin + words(4, seed=9), begin + words(4, seed=8)]
    request = [pair.begin(pair.reserve(prompt, 60), 60) for prompt in prompts]
    assert [one.resident for one in request] == [4, 4]
    pair.run_until(lambda: all(map(pair.ended, request)))
    report = pair.report()
    assert (report.sequences_preempted > 0) == (not host_kv_mb)
    assert (report.sequences_swapped_out > 0) == bool(host_kv_mb)
    for one in request:
        tokens, wanted = pair.tokens(one), ask(truth, one.prompt, most=60)[0]
        assert tokens == wanted[: len(tokens)]
        assert pair.finish(one) is (Finish.LENGTH if len(tokens) == 60 else Finish.PREEMPTED)
    pair.assert_free()
    # Wherever they were, the blocks that they left cached are right.
    for one in request:
        longer = one.prompt + pair.tokens(one)[:10]
        assert pair.generate(longer, most=12)[0] == ask(truth, longer, most=12)[0]
    pair.assert_free()
    pair.close()
