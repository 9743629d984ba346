"""Engines that look drafts up, beside engines that do not: the same tokens behind handoffs, moves in
mid-stream, cached prefixes and cancels, the same tokens found in caches, and nothing left."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from baton.engine.shared_memory.output_ring import Finish
from baton.engine.shared_memory.slot_progress import Progress
from baton.engine.step_times import RecentSteps
from baton.v1.decode_pb2 import TicketBody
from baton.v1.engine_pb2 import CancelCommand
from baton.v1.types_pb2 import Attempt, Limits, Sampling
from services.worker.engine.decode import block_allocation
from tests.support.checkpoints import FAMILIES, MIXTURES
from tests.worker.engine.engine_pair import BLOCK, Pair
from tests.worker.engine.stepped_engine import SteppedEngine, prefill, reserve

ROWS: dict[str, Any] = {"speculation": "lookup", "draft_tokens": 7, "lookup_tokens": 64}
MOST = 24
AT_ONCE = 3


@dataclass(frozen=True)
class Ask:
    """A request: where it is computed and where it is decoded (0 or 1, engines of a pair), and after how many
    tokens it is moved to be decoded by the other one, or cancelled."""

    prompt: tuple[int, ...]
    sampling: Sampling
    limits: Limits
    computed_by: int
    decoded_by: int
    move_after: int | None = None
    cancel_after: int | None = None
    prediction: tuple[int, ...] = ()
    most_drafts: int | None = None


@dataclass(eq=False)
class Running:
    """One attempt of a request."""

    ask: Ask
    number: int
    emitted: list[int]
    attempt: Attempt
    key: tuple[int, int]
    transfer_id: int
    tokens: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE
    cancelled: bool = False


class Exchange:
    """Two engines of role both that hand sequences over to one another."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        settings |= {"reserve_output_tokens": 4, "kv_blocks": 41}
        self._pair = Pair(folder, combined=True, source=settings, **settings)
        self._engines: tuple[SteppedEngine, SteppedEngine] = self._pair.source, self._pair.target
        self._read = [0, 0]
        self._first = 1  # the request id of the first of those that run
        self._running: list[Running] = []
        self.progress: list[Progress] = []

    def run(self, asks: list[Ask]) -> list[tuple[list[int], Finish]]:
        """The outputs of all requests, of those that are cancelled their beginnings."""
        outputs: dict[int, tuple[list[int], Finish]] = {}
        waiting = list(enumerate(asks))
        while waiting or self._running:
            while waiting and len(self._running) < AT_ONCE and self._begin(*waiting[0], []):
                del waiting[0]
            self._pair.run_until(self._some_ended)
            for one in [one for one in self._running if self._has_ended(one)]:
                self._running.remove(one)
                tokens = one.emitted + one.tokens
                if one.finish is Finish.CANCELLED and one.ask.cancel_after is None:
                    other = replace(one.ask, decoded_by=1 - one.ask.decoded_by, move_after=None)
                    waiting.insert(0, (one.number, other))
                    while not self._begin(one.number, other, tokens):
                        self._pair.run_until(self._some_ended)
                    del waiting[0]
                else:
                    outputs[one.number] = tokens, one.finish
        self._first += len(asks)
        return [outputs[number] for number in range(len(asks))]

    def close(self) -> None:
        """Checks that nothing is left."""
        for engine in self._engines:
            engine.run_out()
            engine.assert_free()
            assert (engine.transfers, engine.receiving) == (0, 0)
            engine.close()

    @property
    def hit_tokens(self) -> int:
        """Tokens of prompts that were found in prefix caches."""
        return sum(
            engine.engine.commands.reports.integrity_report().prefixes.hit_tokens for engine in self._engines
        )

    def counted(self, name: str) -> int:
        """Drafts that the engines' reports count, or those that were accepted."""
        reports = [engine.engine.commands.reports.integrity_report() for engine in self._engines]
        counts = [drafts for report in reports for drafts in report.drafts]
        return sum(sum(each.rows if name == "drafts" else each.accepted) for each in counts)

    def _begin(self, number: int, ask: Ask, emitted: list[int]) -> bool:
        """Starts an attempt; False where its decoder has no slot or blocks."""
        decoder, own = self._engines[ask.decoded_by], ask.computed_by == ask.decoded_by
        tokens, request_id = [*ask.prompt, *emitted], (self._first + number).to_bytes(16, "little")
        command = reserve(tokens=len(tokens), most=ask.limits.max_tokens)
        command.attempt.CopyFrom(Attempt(request_id=request_id, number=1 + bool(emitted)))
        command.first_number, command.own_prefill = len(emitted), own
        command.prediction_token_ids.extend(ask.prediction)
        if ask.most_drafts is not None:
            command.max_draft_tokens = ask.most_drafts
        if not own:
            command.block_hashes.extend(self._pair.hashes(tokens))
        event = decoder.ask(reserve=command)
        if not event.HasField("reserved"):
            return False
        reserved = event.reserved
        start = prefill(reserved.ticket, tokens=1, sampling=ask.sampling, limits=ask.limits)
        start.attempt.CopyFrom(command.attempt)
        start.sampling.CopyFrom(ask.sampling)
        start.limits.CopyFrom(ask.limits)
        start.token_ids[:], start.prompt_length = tokens, len(ask.prompt)
        self._engines[ask.computed_by].send(prefill=start)
        transfer_id = TicketBody.FromString(reserved.ticket.body).transfer_id
        key = reserved.slot, reserved.generation
        self._running.append(Running(ask, number, emitted, command.attempt, key, transfer_id))
        return True

    def _some_ended(self) -> bool:
        """Reads what the engines have given out, and cancels what is due."""
        for index, engine in enumerate(self._engines):
            for record in engine.records[self._read[index] :]:
                key = record.slot, record.generation
                one = next(one for one in self._running if (one.ask.decoded_by, one.key) == (index, key))
                one.tokens += [record.token] * record.has_token
                one.finish = record.finish
                if one.finish is not Finish.NONE:
                    self.progress.append(engine.engine.decode.loop.progress.progress(*key))
            self._read[index] = len(engine.records)
        for one in self._running:
            after = one.ask.move_after if one.ask.cancel_after is None else one.ask.cancel_after
            due = after is not None and len(one.emitted + one.tokens) >= after
            if due and not one.cancelled and one.finish is Finish.NONE:
                one.cancelled = True
                self._engines[one.ask.decoded_by].send(cancel=CancelCommand(attempt=one.attempt))
        return any(map(self._has_ended, self._running))

    def _has_ended(self, one: Running) -> bool:
        tickets = self._engines[one.ask.decoded_by].engine.decode.tickets
        return one.finish is not Finish.NONE and tickets.find_transfer(one.transfer_id) is None


def asks(draw: random.Random, count: int) -> list[Ask]:
    """Some repeat the beginning of a prompt before them, so that it is in caches."""
    made: list[Ask] = []
    for _ in range(count):
        kinds = draw.sample(range(3, 97), 4)
        prompt = tuple(draw.choices(kinds, k=draw.randint(2, 5 * BLOCK)))
        if made and draw.random() < 0.5:
            prompt = (*draw.choice(made).prompt[: 4 * BLOCK], *prompt)[: 6 * BLOCK]
        penalised = draw.random() < 0.3
        sampling = Sampling(
            temperature=draw.choice((0, 0, 0.3, 1)),
            top_p=draw.choice((1, 0.9)),
            seed=draw.getrandbits(64),
            frequency_penalty=draw.uniform(-1, 1) if penalised else 0,
            repetition_penalty=1.2 if penalised else 1,
        )
        limits = Limits(
            max_tokens=MOST, stop_token_ids=draw.sample(range(97), 3), min_tokens=draw.randint(1, 12)
        )
        made.append(
            Ask(
                prompt,
                sampling,
                limits,
                computed_by=draw.randrange(2),
                decoded_by=draw.randrange(2),
                move_after=draw.randint(1, 8) if draw.random() < 0.3 else None,
                cancel_after=draw.randint(1, MOST) if draw.random() < 0.1 else None,
                most_drafts=draw.choice((None, None, 0, 2)),
            )
        )
    return made


@pytest.fixture
def exchanges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Exchange, Exchange]]:
    """One without drafts, and one with. Blocks come for 8 tokens at a time."""
    monkeypatch.setattr(block_allocation, "ALLOCATION_TOKENS", 8)
    made = Exchange(tmp_path), Exchange(tmp_path, **ROWS)
    yield made
    for one in made:
        one.close()


def test_the_same_tokens_as_without_drafts(exchanges: tuple[Exchange, Exchange]) -> None:
    plain, drafting = exchanges
    requests = asks(random.Random(4), 18)
    wanted = plain.run([replace(ask, move_after=None, cancel_after=None) for ask in requests])
    predicted = [
        replace(ask, prediction=tuple(tokens)) if number % 3 == 0 else ask
        for number, (ask, (tokens, _)) in enumerate(zip(requests, wanted, strict=True))
    ]
    for ask, (tokens, finish), (whole, end) in zip(requests, drafting.run(predicted), wanted, strict=True):
        if finish is Finish.CANCELLED:
            assert ask.cancel_after is not None
            assert tokens == whole[: len(tokens)]
        else:
            assert (tokens, finish) == (whole, end)
    assert not any(one.drafts for one in plain.progress)
    assert sum(one.accepted for one in drafting.progress) > MOST
    assert sum(one.accepted_predicted for one in drafting.progress) > 0
    assert len(drafting.progress) > len(plain.progress), "some were moved"
    assert drafting.counted("drafts") == sum(one.drafts for one in drafting.progress)
    assert drafting.counted("accepted") == sum(one.accepted for one in drafting.progress)


@pytest.mark.parametrize(
    ("name", "speculation"),
    [("mixtral-8-of-2", "table"), pytest.param("gemma3-windows", "lookup", marks=pytest.mark.slow)],
)
def test_the_same_tokens_of_mixtures_and_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, speculation: str
) -> None:
    """Two engines with caches in fp8 whose drafts come from lookahead tables, too."""
    monkeypatch.setattr(block_allocation, "ALLOCATION_TOKENS", 8)
    (case,) = [case for case in (*FAMILIES, *MIXTURES) if case.name == name]
    settings = {"checkpoint": case.make(tmp_path / "model"), "kv_dtype": "fp8"}
    drafts = {"speculation": speculation, "draft_tokens": 3, "lookahead_table_mb": 1}
    plain, drafting = Exchange(tmp_path, **settings), Exchange(tmp_path, **settings, **drafts)
    requests = [replace(ask, cancel_after=None) for ask in asks(random.Random(6), 4)]
    wanted = plain.run([replace(ask, move_after=None) for ask in requests])
    for _ in range(2):  # the second time tables have what the first one's steps gave out
        assert drafting.run(requests) == wanted
    assert 0 < drafting.counted("accepted") <= drafting.counted("drafts")
    for one in (plain, drafting):
        one.close()


def test_costs_of_steps_are_by_sequences_and_not_by_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SteppedEngine(tmp_path, **ROWS)
    decode, seen = engine.engine.decode, list[tuple[float, ...]]()
    decode.loop.progress.publish([0, 1], [1, 1], [30, 30], [[10, 70, 30, 0, 0], [10, 70, 10, 0, 0]])
    recent = RecentSteps(steps=10, tokens=60, mean_ms=2.0)
    monkeypatch.setattr(decode.loop.times, "recent", lambda: recent)
    monkeypatch.setattr(decode.fit, "observe", lambda *observed: seen.append(observed))
    decode.costs(0.0)
    sequences = rows = 2.0
    assert seen == [(sequences, 0.0, 0.002, rows)]
    engine.close()


def test_as_much_of_a_conversation_is_found_in_caches(exchanges: tuple[Exchange, Exchange]) -> None:
    """Each turn's prompt begins with all of the turn before, whose output had drafts: right ones, where it
    was predicted."""
    draw, plain, drafting = random.Random(5), *exchanges
    prompt: tuple[int, ...] = ()
    for turn in range(3):
        prompt += tuple(draw.randrange(3, 97) for _ in range(9))
        ask = Ask(prompt, Sampling(top_p=1), Limits(max_tokens=MOST), computed_by=1, decoded_by=1)
        ((tokens, _),) = plain.run([ask])
        assert drafting.run([replace(ask, prediction=tuple(tokens))]) == [(tokens, Finish.LENGTH)]
        assert drafting.hit_tokens == plain.hit_tokens >= turn * (MOST - BLOCK)
        prompt += tuple(tokens)
    assert sum(one.accepted_predicted for one in drafting.progress) > MOST
