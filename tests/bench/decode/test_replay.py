"""Replays of texts by lookup: what they count, and that a lookahead table helps from the second sight on."""

from __future__ import annotations

import json

import pytest
import torch

from baton.engine.speculation.lookahead_cells import BUCKET_BYTES
from baton.engine.speculation.lookahead_table import LookaheadTable
from bench.decode import drafts as replay
from bench.decode.drafts import Counts, Replay, Text


@pytest.mark.parametrize(
    ("answer", "counts"),
    [
        ([1, 2, 3, 4], Counts(steps=3)),
        ([1, 2, 9, 1, 2, 9, 1, 2], Counts(steps=5, drafts=2, accepted=2)),
        ([1, 2, 9, 1, 2, 7, 5], Counts(steps=6, drafts=1)),  # two are proposed, and the last token needs none
    ],
)
def test_steps_of_known_texts(answer: list[int], counts: Counts) -> None:
    made = Counts()
    Replay(None, 64).run(Text([5], answer), made)
    assert made == counts


def test_a_table_helps_from_the_second_sight_on() -> None:
    table = LookaheadTable(1, 500 * BUCKET_BYTES, 32_000, torch.device("cpu"))
    texts = replay.markov_texts(3, 60, 0.9)
    found = replay.sights(texts, table)
    assert found["own"].line()["tokens_a_step"] == found["first sight"].line()["tokens_a_step"]
    assert found["second sight"].line()["tokens_a_step"] > 3
    later = replay.later(texts, table, 2, lambda number: replay.random_text(number, 60))
    assert later.line()["tokens_a_step"] > 3
    assert table.replaced > 500


def test_the_program(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--answers", "1", "--tokens", "20", "--table-mb", "0.01", "--fills", "1", "--json"]
    monkeypatch.setattr("sys.argv", ["drafts", "--replay", *options])
    replay.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["sight"] for line in lines] == ["own", "first sight", "second sight", "second sight, later"]
    monkeypatch.setattr("sys.argv", ["drafts", "--replay", "--text", "prose"])
    with pytest.raises(SystemExit):
        replay.main()


@pytest.mark.slow
def test_a_task_of_the_demo_model() -> None:
    (text,) = replay.task_texts("copy", 1)
    assert len(text.prompt) > len(text.answer) > 3
