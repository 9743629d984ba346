"""Requests of every kind on a mixture of experts: what they ask for does not change how rows are routed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton.engine.sequence import SamplingParams
from tests.engine.decode.test_draft_steps import LENGTH, PROMPTS, SAMPLINGS, Drafting
from tests.engine.decode.test_graph_sampler_steps import PROMPT as GUIDED
from tests.engine.decode.test_graph_sampler_steps import allow, held_for_a_while, steps_until
from tests.engine.local_engine import LocalEngine
from tests.engine.prompt_passes import FAMILIES

MIXTURE: dict[str, Any] = FAMILIES["mixture"]
PROMPT = [5, 6, 7, 8, 9]


@pytest.mark.parametrize("graph", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("script", ["right", "oracle 0.5"])
def test_drafts_change_no_token(tmp_path: Path, script: str, graph: bool) -> None:
    """A sequence's rows take experts of their own, those of rejected drafts too."""
    plain = LocalEngine(tmp_path / "model", changes=MIXTURE)
    asks = list(zip(PROMPTS, SAMPLINGS, strict=True))
    wanted = plain.run(*(plain.start(ids, max_tokens=LENGTH, sampling=how) for ids, how in asks))
    drafting = Drafting(tmp_path, 4, numerics="exact", graph=graph, changes=MIXTURE)
    mine = []
    for (prompt, sampling), output in zip(asks, wanted, strict=True):
        mine.append(drafting.engine.start(prompt, max_tokens=LENGTH, sampling=sampling))
        drafting.script.begin(mine[-1], [*prompt, *output], script)
    assert drafting.engine.run(*mine) == wanted
    assert all(drafting.engine.decode.progress.progress(*key).drafts > 0 for key in mine)


def test_a_guided_sequence_waits_for_its_masks_and_its_neighbour_does_not(tmp_path: Path) -> None:
    engine = LocalEngine(tmp_path / "model", changes=MIXTURE)
    alone = engine.run(engine.start(PROMPT, max_tokens=9))[0]
    engine.slots.release(0, 1)
    neighbour = engine.start(PROMPT, max_tokens=9)
    key = engine.start(GUIDED, max_tokens=4, masked=True)
    steps_until(engine, key, 1)
    for number, token in enumerate((40, 41, 42), 1):
        assert held_for_a_while(engine, key)
        allow(engine, key, number, token)
        steps_until(engine, key, 1 + number)
    assert engine.output[key][1:] == [40, 41, 42]
    engine.run(key, neighbour)
    assert engine.output[neighbour] == alone


def test_a_sequence_that_begins_with_anothers_tokens_continues_as_by_itself(tmp_path: Path) -> None:
    """Preempted, computed again behind its output, in chunks of other sizes beside others."""
    sampling = SamplingParams(0.9, seed=7, logprobs=2)
    whole = LocalEngine(tmp_path / "model", changes=MIXTURE, chunk=64)
    first = whole.start(PROMPT * 4, max_tokens=10, sampling=sampling)
    (expected,) = whole.run(first)
    again = LocalEngine(tmp_path / "model", changes=MIXTURE, chunk=3, slots=3, block_tokens=8)
    beside = again.start(PROMPT * 6, max_tokens=20)
    resumed = again.start(PROMPT * 4, max_tokens=10, sampling=sampling, emitted=tuple(expected[:4]))
    again.run(resumed, beside)
    assert again.output[resumed] == expected[4:]
    assert again.logprobs[resumed] == whole.logprobs[first][4:]
