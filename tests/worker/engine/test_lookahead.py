"""An engine with a lookahead table: what it learns of, whose requests find it again, and that its tokens are
those of an engine without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.device.streams.stream import HostEvent
from baton.engine.decode.slots import Grant
from baton.engine.sequence import Limits, SamplingParams
from baton.engine.shared_memory.slot_progress import Progress
from baton.engine.speculation.lookahead_cells import NO_TOKEN
from baton.v1.engine_pb2 import CanaryCommand
from baton.v1.types_pb2 import Attempt, WorkerRole
from baton.v1.worker_pb2 import GetAuditRequest
from services.common.config.worker import EngineConfig
from services.worker.engine.startup.lookahead_setup import lookahead_table
from tests.worker.engine.stepped_engine import SteppedEngine, prefill, reserve

TABLE: dict[str, Any] = {
    "speculation": "table", "lookup_tokens": 64, "lookahead_table_mb": 1, "prefix_cache": False,
}  # fmt: skip
PROMPT, OUTPUT = 9, 14


class Asker:
    """An engine that answers one request after another."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.engine = SteppedEngine(folder, "both", **settings)
        self._requests = 0

    def ask(self, tenant: str, *, most_drafts: int | None = None) -> tuple[list[int], Progress]:
        """The output for one prompt, and what became of its drafts."""
        engine = self.engine
        self._requests += 1
        attempt = Attempt(request_id=self._requests.to_bytes(16, "little"), number=1)
        command = reserve(tokens=PROMPT, most=OUTPUT)
        command.attempt.CopyFrom(attempt)
        command.own_prefill, command.tenant = True, tenant
        if most_drafts is not None:
            command.max_draft_tokens = most_drafts
        reserved, before = engine.ask(reserve=command).reserved, len(engine.records)
        start = prefill(reserved.ticket, tokens=PROMPT, most=OUTPUT)
        start.attempt.CopyFrom(attempt)
        start.tenant = tenant
        engine.send(prefill=start)
        engine.run_out()
        tokens = [record.token for record in engine.records[before:] if record.has_token]
        return tokens, engine.progress.progress(reserved.slot, reserved.generation)

    @property
    def cells(self) -> int:
        """Cells in use, as the engine reports them."""
        return self.engine.ask(report=GetAuditRequest(skip_integrity=True)).report.lookahead_cells


@pytest.fixture
def asker(tmp_path: Path) -> Iterator[Asker]:
    made = Asker(tmp_path, **TABLE)
    yield made
    made.engine.assert_free()
    made.engine.close()


def test_a_tenants_second_request_has_drafts_of_its_first(asker: Asker, tmp_path: Path) -> None:
    (tokens, first), cells = asker.ask("a"), asker.cells
    assert len(tokens) == OUTPUT
    assert first.drafts == 0
    assert cells > OUTPUT
    for _ in range(2):
        same, again = asker.ask("a")
        assert same == tokens
        assert again.drafts == again.drafts_shared >= again.accepted == again.accepted_shared > OUTPUT // 2
        assert asker.cells == cells, "nothing is new"
    plain = Asker(tmp_path)
    assert plain.ask("a") == (tokens, Progress(steps=OUTPUT - 1))
    assert plain.cells == 0
    plain.engine.close()


def test_another_tenants_request_has_none(asker: Asker) -> None:
    tokens, _ = asker.ask("a")
    for tenant in ("b", ""):
        assert asker.ask(tenant) == (tokens, Progress(steps=OUTPUT - 1))
    assert asker.ask("b")[1].accepted_shared > 0


def test_what_is_not_learned(asker: Asker) -> None:
    """Requests without drafts, and canaries."""
    asker.ask("a", most_drafts=0)
    side = WorkerRole.WORKER_ROLE_DECODE
    for _ in range(2):
        asker.engine.send(canary=CanaryCommand(side=side))
        asker.engine.run_out()
        asker.engine.send(canary=CanaryCommand(side=side, admit=True))
        asker.engine.run_out()
    assert asker.cells == 0
    asker.ask("a")
    assert asker.cells > 0


@pytest.mark.parametrize(("masked", "learned"), [(True, False), (False, True)])
def test_guided_sequences_are_not_learned(asker: Asker, *, masked: bool, learned: bool) -> None:
    loop, grant = asker.engine.engine.decode.loop, Grant(1, 7, ((1,),), 8)
    loop.begin_admission(
        grant, token_ids=range(9), prompt_length=2, end=20, sampling=SamplingParams(), limits=Limits(18),
        masked=masked, tenant="a",
    )  # fmt: skip
    assert loop.lookahead is not None
    assert (loop.lookahead.take_output(1, 12) is not None) == learned


def test_a_history_is_overwritten_when_it_has_been_read(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learning from a slot may run beside the steps while its next sequence comes."""
    loop, seen = asker.engine.engine.decode.loop, list[tuple[int, int]]()
    history, table = loop.state.history, loop.lookahead
    assert history is not None
    assert table is not None
    seeds = table.seeds
    history.fill(1, [5, 6, 7])
    end = history.end

    class Reading(HostEvent):
        def synchronize(self) -> None:
            seen.append((int(end[1]), int(seeds[1])))

    monkeypatch.setattr(loop, "take_reading", {1: Reading()}.get)
    loop.begin_admission(
        Grant(1, 7, ((1,),), 8), token_ids=range(9), prompt_length=2, end=20, sampling=SamplingParams(),
        limits=Limits(18), tenant="a",
    )  # fmt: skip
    assert seen == [(3, 0)]
    assert int(end[1]) == 9
    assert int(seeds[1]) != 0


def test_a_table_that_the_host_has_no_memory_for_is_refused(asker: Asker, tmp_path: Path) -> None:
    model, memory = asker.engine.model, tmp_path / "meminfo"
    memory.write_text("MemTotal:  9000 kB\nMemAvailable:       7000 kB\n")
    engine = EngineConfig(speculation="lookup", lookahead_table_mb=7)
    assert lookahead_table(model, engine, memory) is not None
    with pytest.raises(BatonError) as refused:
        lookahead_table(model, engine.model_copy(update={"lookahead_table_mb": 8}), memory)
    assert refused.value.kind is ErrorKind.INVALID
    assert refused.value.message == (
        "engine.lookahead_table_mb of 0.008 GB does not fit: 0.00717 GB of memory are available"
    )
    assert lookahead_table(model, EngineConfig(speculation="lookup"), memory) is None
    assert lookahead_table(model, EngineConfig(lookahead_table_mb=8), memory) is None


@pytest.mark.parametrize(
    ("speculation", "unset", "two"), [("off", 0, 0), ("lookup", 0, 2), ("auto", 64, 2), ("table", 64, 2)]
)
def test_who_has_a_table(speculation: Any, unset: int, two: int) -> None:
    sizes = [EngineConfig(speculation=speculation, lookahead_table_mb=mb) for mb in (None, 2)]
    assert [size.lookahead_table_bytes for size in sizes] == [unset * 10**6, two * 10**6]


@pytest.mark.parametrize("how", [{"speculation": "table"}, {"speculation": "auto", "lookahead_table_mb": 1}])
def test_a_vocabulary_of_more_ids_than_cells_hold_is_refused(asker: Asker, how: dict[str, Any]) -> None:
    model, engine = asker.engine.model, EngineConfig(**how)
    most, more = (
        replace(model, config=replace(model.config, vocab_size=ids)) for ids in (NO_TOKEN, NO_TOKEN + 1)
    )
    assert lookahead_table(most, engine) is not None
    with pytest.raises(BatonError) as refused:
        lookahead_table(more, engine)
    assert (refused.value.kind, refused.value.message) == (
        ErrorKind.INVALID,
        "engine.lookahead_table_mb: the table holds ids of vocabularies of up to 2097151, not 2097152",
    )
    assert lookahead_table(more, engine.model_copy(update={"speculation": "off"})) is None
