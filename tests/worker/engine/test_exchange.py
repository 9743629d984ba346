"""Engines of role both that exchange sequences: what one computes another may decode, and each computes and
decodes its own beside it. Tokens are the same either way, and nothing is left."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.v1.decode_pb2 import TicketBody
from tests.worker.engine.engine_pair import BLOCK, Pair
from tests.worker.engine.stepped_engine import SteppedEngine, prefill, reserve

PROMPT = [1 + n % 60 for n in range(3 * BLOCK + 2)]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path, combined=True)
    yield made
    for engine in (made.source, made.target):
        engine.run_out()
        engine.assert_free()
        assert (engine.transfers, engine.receiving) == (0, 0)
        engine.close()


def own(engine: SteppedEngine, prompt: list[int], name: bytes, most: int = 4) -> list[int]:
    """The output of a request that the engine computes and decodes itself."""
    command = reserve(name=name, tokens=len(prompt), most=most)
    command.own_prefill = True
    event = engine.ask(reserve=command).reserved
    assert not TicketBody.FromString(event.ticket.body).endpoints
    assert event.kv_bytes == 0
    start = prefill(event.ticket, tokens=1, most=most)
    start.attempt.CopyFrom(command.attempt)
    start.token_ids[:] = prompt
    start.prompt_length = len(prompt)
    number = engine.send(prefill=start)
    engine.run_out()
    assert engine.of(number)[-1] == "prefill_ended", engine.events[-3:]
    key = (event.slot, event.generation)
    return [one.token for one in engine.records if one.has_token and (one.slot, one.generation) == key]


def test_both_ways_give_the_same_tokens(pair: Pair) -> None:
    handed_over, request = pair.generate(PROMPT)
    assert request.reserved.kv_bytes == -(-len(PROMPT) // BLOCK) * pair.block_bytes
    for number, engine in enumerate((pair.source, pair.target)):
        assert own(engine, PROMPT, b"%d" % number) == handed_over
    reports = [engine.engine.commands.reports.integrity_report() for engine in (pair.source, pair.target)]
    assert [report.handoffs_local for report in reports] == [1, 1]
    assert [report.handoffs_committed for report in reports] == [1, 2]
    assert reports[0].bytes_shipped == reports[1].bytes_received > 0
    assert reports[0].bytes_received == reports[1].bytes_shipped == 0


def test_what_came_over_a_link_is_cached_for_own_prompts_and_the_other_way(pair: Pair) -> None:
    """Blocks that a worker has, however it came by them, are neither computed nor sent again."""
    pair.generate(PROMPT)
    target = pair.target.engine.commands.reports
    assert own(pair.target, PROMPT, b"again")
    assert target.integrity_report().prefixes.hit_tokens == 3 * BLOCK
    other = [2 + n % 50 for n in range(2 * BLOCK + 1)]
    wanted = own(pair.target, other, b"other")
    tokens, request = pair.generate(other)
    assert tokens == wanted
    assert request.resident == 2
    assert request.reserved.kv_bytes == pair.block_bytes


def test_a_ticket_for_own_prefill_is_refused_by_another_worker(pair: Pair) -> None:
    command = reserve(name=b"own", tokens=len(PROMPT), most=4)
    command.own_prefill = True
    event = pair.target.ask(reserve=command).reserved
    start = prefill(event.ticket, tokens=1, most=4)
    start.attempt.CopyFrom(command.attempt)
    start.token_ids[:] = PROMPT
    start.prompt_length = len(PROMPT)
    number = pair.source.send(prefill=start)
    pair.source.turn()
    assert "its issuer's own prefill" in pair.source.failure(number)[1]
    pair.target.engine.decode.reserved.end_unused(TicketBody.FromString(event.ticket.body).transfer_id)


def test_measured_step_costs_are_published(pair: Pair) -> None:
    """Step costs, from which routers predict latencies, are absent before any step, and then of this worker's
    own steps."""
    before = pair.target.engine.commands.reports.load()
    assert before.step_costs.decode_step_s == before.context_tokens == 0
    request = pair.begin(pair.reserve(PROMPT, most=12), most=12)
    pair.run_until(lambda: len(pair.tokens(request)) >= 3)
    during = pair.target.engine.commands.reports.load()
    assert len(PROMPT) <= during.context_tokens <= len(PROMPT) + 12
    pair.run_until(lambda: pair.ended(request))
    source, target = (engine.engine.commands.reports.load() for engine in (pair.source, pair.target))
    assert source.step_costs.prefill_token_s > 0
    assert source.step_costs.decode_step_s == 0
    assert target.step_costs.decode_step_s > 0
    assert target.context_tokens == 0


def test_prefill_knows_whether_sequences_are_decoded_beside_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, seen = pair.target.engine, list[bool]()
    turn = engine.turn

    def watched() -> bool:
        worked = turn()
        seen.append(engine.prefill.steps.scheduler.beside_decode)
        return worked

    monkeypatch.setattr(engine, "turn", watched)
    assert own(pair.target, PROMPT, b"one")
    assert not seen[0]
    assert any(seen)
    assert not seen[-1]
    assert math.isinf(engine.prefill.steps.scheduler.tpot_limit_s)
    engine.steps.planner.pacing.limit_s = lambda: 0.03
    engine.turn()
    assert engine.prefill.steps.scheduler.tpot_limit_s == 0.03
