"""Two engines whose devices write to each other's memory, some turns late: the same tokens, and nothing
leaked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.engine.executor.step_handle import ChunkResult, StepHandle
from baton.v1.decode_pb2 import Ticket, TicketBody
from baton.v1.engine_pb2 import CancelCommand
from baton.v1.prefill_pb2 import FirstToken
from kvtransfer.sender.events import SenderEvent
from kvtransfer.sender.transfer import Transfer, TransferState
from services.common.config.worker import EngineConfig
from services.worker.engine.prefill.reply import PrefillReply
from services.worker.engine.startup.memory_plan import link_bytes
from tests.kvtransfer.support.fake_device import FakeDevice, Pump
from tests.worker.engine.engine_pair import Pair
from tests.worker.engine.prefill.test_step_pipeline import LateStream
from tests.worker.engine.stepped_engine import SteppedEngine
from tests.worker.engine.test_prefix_cache import ask


@pytest.fixture
def pair(tmp_path: Path, truth: SteppedEngine, pump: Pump) -> Iterator[Pair]:
    """`truth` was built before: its blocks are in host memory."""
    made = Pair(tmp_path)
    made.each_turn = pump.some
    yield made
    made.close()


def words(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 97) for _ in range(count)]


def test_codes_and_scales_are_moved(tmp_path: Path, quantised: SteppedEngine, pump: Pump) -> None:
    pair = Pair(tmp_path, source={"kv_dtype": "fp8"}, kv_dtype="fp8")
    pair.each_turn = pump.some
    for length in (3, 9, 30):
        prompt = words(length, seed=length)
        assert pair.generate(prompt, most=12)[0] == ask(quantised, prompt, most=12)[0]
    assert pump.steps > 0
    pair.assert_free()
    pair.close()


def test_prompts_of_every_length(pair: Pair, truth: SteppedEngine, pump: Pump) -> None:
    for length in (1, 3, 4, 5, 9, 16, 23, 30):
        prompt = words(length, seed=length)
        assert pair.generate(prompt)[0] == ask(truth, prompt)[0]
        pair.assert_free()
    (link,) = pair.source.engine.prefill.sender.links
    assert link.transport == "ipc"
    assert pump.steps > 0, "the devices have done it"
    sent = pair.source.engine.prefill.sender.counters.bytes_shipped
    assert pair.report().bytes_received == sent > 0


def test_the_commit_is_sent_before_the_first_token(
    pair: Pair, pump: Pump, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = transfers_begun(pair, monkeypatch)
    pair.generate(words(9, 1))  # opens a link
    states: list[TransferState] = []
    first_token = PrefillReply.first_token

    def look(reply: PrefillReply, first: FirstToken) -> None:
        states.append(begun[-1].state)
        first_token(reply, first)

    monkeypatch.setattr(PrefillReply, "first_token", look)
    pair.generate(words(9, 2))
    assert states == [TransferState.COMMITTING]
    pair.generate(words(9, 3), most=1)  # its first token is its last: the ticket goes back
    assert states[1:] == [TransferState.SENDING]
    pair.run_until(lambda: pump.idle() and not pair.source.engine.prefill.sender.busy_poll)
    pair.assert_free()


def test_a_link_takes_the_memory_that_is_planned_for_one(
    pair: Pair, pump: Pump, devices: list[FakeDevice]
) -> None:
    """A sender takes none: its blocks are read where they are."""
    pair.generate(words(9, 1))
    for end, device, links in zip((pair.source, pair.target), devices, (0, 1), strict=True):
        planned = link_bytes(EngineConfig(gpu_links=links), end.model.layout)
        assert sum(memory.size for memory in device.allocated) == planned


def test_blocks_of_a_cancelled_request_are_reused_at_once(
    pair: Pair, truth: SteppedEngine, pump: Pump
) -> None:
    dice = random.Random(4)
    for seed in range(12):
        request = pair.begin(pair.reserve(words(30, seed), names=()))
        for _ in range(dice.randint(1, 9)):
            pair.source.play()
            pair.target.play()
        if dice.random() < 0.5:
            pair.target.ask(cancel=CancelCommand(attempt=request.attempt))
        else:
            pair.source.ask(cancel=CancelCommand(attempt=request.attempt))
            pair.target.ask(cancel=CancelCommand(attempt=request.attempt))
        prompt = words(30, 100 + seed)
        assert pair.generate(prompt)[0] == ask(truth, prompt)[0]
        pair.run_until(lambda request=request: pair.ended(request))  # type: ignore[misc]
        pair.run_until(lambda: pump.idle() and not pair.source.engine.prefill.sender.pinned_blocks)
        pair.run_until(lambda: not pair.target.receiving)
        pair.assert_free()


def test_completed_blocks_are_sent_before_the_next_step_begins(
    tmp_path: Path, pump: Pump, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "services.worker.engine.startup.prefill_setup.compute_stream", lambda device: LateStream()
    )
    pair = Pair(tmp_path)
    pair.each_turn = pump.some
    side = pair.source.engine.prefill
    pair.generate(words(4, 1))  # opens a link
    shipped: list[int] = []
    executor = pair.source.engine.steps
    take, begin = side.steps.ended, executor.step_prompts
    ended: list[int] = []

    def count_ended() -> list[ChunkResult]:
        results = take()
        ended.append(len(results))
        return results

    def look() -> StepHandle | None:
        if sum(ended):  # a step has ended
            shipped.append(side.sender.counters.bytes_shipped - before)
        return begin()

    monkeypatch.setattr(side.steps, "ended", count_ended)
    monkeypatch.setattr(executor, "step_prompts", look)
    before = side.sender.counters.bytes_shipped
    request = pair.begin(pair.reserve(words(16, 2)))
    pair.run_until(lambda: pair.ended(request))
    pair.close()
    assert shipped[0] >= 2 * pair.block_bytes, "of the first chunk's eight tokens"


def test_a_handoff_that_is_acknowledged_at_once_sends_all_replies_in_order(
    pair: Pair, truth: SteppedEngine, pump: Pump, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks are resident at decode, which acknowledges at once."""
    sender, prefixes = pair.source.engine.prefill.sender, pair.source.engine.decode.prefix_cache
    assert prefixes is not None
    begun = transfers_begun(pair, monkeypatch)
    pair.generate(words(9, 1))  # opens a link
    poll = sender.poll

    def commits() -> bool:
        return any(transfer.state is TransferState.COMMITTING for transfer in begun)

    def patient(max_pieces: int) -> list[SenderEvent]:
        events = poll(max_pieces)
        for _ in range(2000):
            if events or not commits():
                break
            pump.some()
            pair.target.play()
            events = poll(max_pieces)
        return events

    monkeypatch.setattr(sender, "poll", patient)
    before = len(firsts(pair))
    prompt = words(16, seed=5)
    assert pair.generate(prompt)[0] == ask(truth, prompt)[0]
    assert len(firsts(pair)) == before + 1
    assert prefixes.hashes() >= set(pair.hashes(prompt)[:4])


def transfers_begun(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[Transfer]:
    """The transfers that prefill's sender begins from now on."""
    sender, found = pair.source.engine.prefill.sender, list[Transfer]()
    begin = sender.begin

    def kept(ticket: Ticket, body: TicketBody) -> Transfer:
        found.append(begin(ticket, body))
        return found[-1]

    monkeypatch.setattr(sender, "begin", kept)
    return found


def firsts(pair: Pair) -> list[int]:
    """First tokens that prefill has replied."""
    return [e.prefill.first_token.token_id for e in pair.source.events if e.prefill.HasField("first_token")]
