"""Graph steps that verify drafts draw the tokens of plain steps, whatever was proposed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.decode.slot_state import SlotState
from baton.engine.plan.decode_rows import next_rows
from baton.engine.sequence import SamplingParams
from baton.engine.speculation.size_times import StepSize
from bench.engine_driver import decode_step
from tests.engine.local_engine import LocalEngine
from tests.engine.speculation.script_table import ScriptTable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [list(range(5, 5 + n)) for n in (1, 3, 4)]
LENGTH = 12
PENALIZED = SamplingParams(
    0.8, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3, logprobs=3, seed=5
)
SAMPLINGS = [SamplingParams(), SamplingParams(0.9, seed=2**63 + 11), PENALIZED]


class Drafting:
    """An engine of three slots, of graphs by default, whose proposer has scripts."""

    def __init__(self, folder: Path, rows_per_slot: int, **options: Any) -> None:
        self.engine = LocalEngine(
            folder / "model", slots=3, device=DEVICE, rows_per_slot=rows_per_slot,
            proposer=self._scripts, **({"graph": True} | options),
        )  # fmt: skip

    def settle(self) -> None:
        """Waits for the steps that were launched, and reads what they emitted."""
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        self.engine.read()

    def _scripts(self, state: SlotState) -> ScriptTable:
        self.script = ScriptTable(state, random.Random(3), 400)
        return self.script


@pytest.mark.parametrize(
    ("script", "rows_per_slot", "numerics"),
    [
        ("right", 4, "exact"),
        pytest.param("oracle 0.5", 8, "fast", marks=pytest.mark.slow),
        pytest.param("wrong", 3, "fast", marks=pytest.mark.slow),
    ],
)
def test_drafts_change_no_token_and_no_logprob(
    tmp_path: Path, script: str, rows_per_slot: int, numerics: str
) -> None:
    plain = LocalEngine(tmp_path / "model", device=DEVICE)
    keys = [
        plain.start(prompt, max_tokens=LENGTH, sampling=sampling)
        for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)
    ]
    wanted = plain.run(*keys)
    drafting = Drafting(tmp_path, rows_per_slot, numerics=numerics)
    mine = []
    for prompt, sampling, output in zip(PROMPTS, SAMPLINGS, wanted, strict=True):
        mine.append(drafting.engine.start(prompt, max_tokens=LENGTH, sampling=sampling))
        drafting.script.begin(mine[-1], [*prompt, *output], script)
    assert drafting.engine.run(*mine) == wanted
    for logprobs, expected in zip(drafting.engine.logprobs[mine[2]], plain.logprobs[keys[2]], strict=True):
        assert logprobs is not None
        assert expected is not None
        assert [token for token, _ in logprobs.top] == [token for token, _ in expected.top]
        assert logprobs.logprob == pytest.approx(expected.logprob, abs=1e-4)
    for key in mine:
        progress = drafting.engine.decode.progress.progress(*key)
        assert progress.steps + progress.accepted == LENGTH - 1
        assert progress.drafts > 0
        if script != "oracle 0.5":
            assert progress.accepted == (progress.drafts if script == "right" else 0)


def test_steps_that_join_prompts_leave_drafts_out(tmp_path: Path) -> None:
    """And the one behind them verifies drafts again."""
    plain = LocalEngine(tmp_path / "model", device=DEVICE)
    starts = [(PROMPTS[0], 40), (list(range(30, 63)), 6)]
    wanted = [plain.run(plain.start(prompt, max_tokens=most))[0] for prompt, most in starts]
    drafting = Drafting(tmp_path, 4, numerics="fast", mixed="eager")
    engine = drafting.engine
    first = engine.start(starts[0][0], max_tokens=starts[0][1])
    drafting.script.begin(first, [*starts[0][0], *wanted[0]], "right")
    while engine.decode.progress.progress(*first).drafts == 0:
        engine.step()
    before = engine.decode.progress.progress(*first)
    second = engine.start(starts[1][0], max_tokens=starts[1][1])
    drafting.script.begin(second, [*starts[1][0], *wanted[1]], "right")
    assert engine.mixed_steps > 0
    joined = engine.decode.progress.progress(*first)
    assert joined.steps > before.steps
    while (behind := engine.decode.progress.progress(*first)).steps == joined.steps:
        assert first not in engine.finish
        engine.step()
        drafting.settle()
    assert behind.drafts - joined.drafts == 3 * (behind.steps - joined.steps)
    assert engine.run(first, second) == wanted


@pytest.mark.parametrize("graph", [False, True])
def test_the_step_that_admits_a_sequence_verifies_drafts(tmp_path: Path, *, graph: bool) -> None:
    """Also beside a sequence that goes on."""
    plain = LocalEngine(tmp_path / "model", device=DEVICE)
    wanted = plain.run(*(plain.start(prompt, max_tokens=LENGTH) for prompt in PROMPTS[:2]))
    drafting = Drafting(tmp_path, 4, graph=graph)
    mine = []
    for prompt, output in zip(PROMPTS[:2], wanted, strict=True):
        mine.append(drafting.engine.start(prompt, max_tokens=LENGTH))
        drafting.script.begin(mine[-1], [*prompt, *output], "right")
        while not drafting.engine.output[mine[-1]]:
            drafting.engine.step()
        drafting.settle()
        assert len(drafting.engine.output[mine[-1]]) >= 1 + 4, "the token of its admission, and a step's"
    assert drafting.engine.run(*mine) == wanted
    for key in mine:
        progress = drafting.engine.decode.progress.progress(*key)
        assert (progress.steps, progress.accepted) == (3, LENGTH - 1 - 3)


@pytest.mark.parametrize(
    ("graph", "length", "apart"), [(False, 40, 3), pytest.param(True, 13, 9, marks=pytest.mark.slow)]
)
def test_a_sequence_that_is_handed_over_goes_on_as_it_would_have(
    tmp_path: Path, length: int, apart: int, *, graph: bool
) -> None:
    """Drafts follow from the text alone, so that the steps behind a handoff accept what those of one engine
    accept, from the first one on."""
    few = SamplingParams(1.0, seed=4, logit_bias=((7, 100.0), (8, 100.0), (9, 98.0)))
    options: dict[str, Any] = {
        "slots": 2,
        "device": DEVICE,
        "graph": graph,
        "rows_per_slot": 4,
        "lookup_tokens": 64,
    }
    engines = [LocalEngine(tmp_path / "model", **options) for _ in range(2)]
    prompt = [7, 8, 9, 7, 7, 8]
    text, accepted = _steps_of(engines[0], engines[0].start(prompt, max_tokens=length, sampling=few))
    accepting = [given for given, count in accepted.items() if count > 0]
    assert len(accepting) > 1
    for given in accepting[1::apart]:
        emitted = tuple(text[: given - 1])
        key = engines[1].start(prompt, emitted=emitted, max_tokens=length, sampling=few)
        mine, its = _steps_of(engines[1], key)
        assert [*emitted, *mine] == text
        behind = {before + len(emitted): count for before, count in its.items()}
        assert behind == {before: count for before, count in accepted.items() if before >= given}
        engines[1].slots.release(*key)


@pytest.mark.parametrize("graph", [False, True])
def test_steps_have_rows_for_drafts_while_some_slot_may_have_any(tmp_path: Path, *, graph: bool) -> None:
    engine = LocalEngine(
        tmp_path / "model", slots=3, device=DEVICE, graph=graph, rows_per_slot=4, lookup_tokens=64
    )

    def planned() -> bool:
        engine.decode.observe()
        rows = next_rows(engine.decode.steps)
        assert rows is not None
        return rows.drafts

    assert not engine.decode.steps.has_effect
    engine.start(PROMPTS[0], max_tokens=LENGTH, most_drafts=0)
    engine.start(PROMPTS[2], max_tokens=LENGTH, masked=True)
    assert not planned()
    engine.step()
    assert not planned()
    drafting = engine.start(PROMPTS[1], max_tokens=4)
    assert planned()
    engine.step()
    assert planned() or drafting in engine.finish
    engine.run(drafting)
    assert not planned()


def _steps_of(engine: LocalEngine, key: tuple[int, int]) -> tuple[list[int], dict[int, int]]:
    """Runs a sequence to its end: its output, and by the tokens before each step the drafts accepted."""
    accepted: dict[int, int] = {}
    before = 1
    while key not in engine.finish:
        engine.step()
        if (now := len(engine.output[key])) > before:
            accepted[before] = now - before - 1
            before = now
    return engine.output[key], accepted


@pytest.mark.gpu
def test_a_late_reader_stops_the_steps_and_loses_nothing(tmp_path: Path) -> None:
    """Slots whose first rows alone fit into the ring go on."""
    size: dict[str, Any] = {"blocks": 400, "longest": 400}
    plain = LocalEngine(tmp_path / "model", device=DEVICE, **size)
    keys = [plain.start(prompt, max_tokens=360) for prompt in PROMPTS]
    wanted = plain.run(*keys)
    late = Drafting(tmp_path, 4, **size)
    engine = late.engine
    mine = [engine.start(prompt, max_tokens=360) for prompt in PROMPTS]
    for key, prompt, output in zip(mine, PROMPTS, wanted, strict=True):
        late.script.begin(key, [*prompt, *output], "right")
    for _ in range(600):
        decode_step(engine.decode)
        torch.cuda.synchronize()
    assert not decode_step(engine.decode)
    assert engine.reader.full_steps > 0
    engine.read()
    assert engine.run(*mine) == wanted
    accepted = [engine.decode.progress.progress(*key).accepted for key in mine]
    assert min(accepted) > 200


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_mode_fast_the_same_rows_have_the_same_bits(tmp_path: Path, dtype: str) -> None:
    """The sequences do not end, since a step has fewer rows as soon as the host has seen an end."""
    runs = []
    for _ in range(2):
        drafting = Drafting(tmp_path, 8, numerics="fast", dtype=dtype, blocks=192)
        sampled = [SamplingParams(1.0, seed=seed, logprobs=5) for seed in range(3)]
        keys = [
            drafting.engine.start(prompt, max_tokens=240, sampling=sampling)
            for prompt, sampling in zip(PROMPTS, sampled, strict=True)
        ]
        for key, prompt in zip(keys, PROMPTS, strict=True):
            drafting.script.begin(key, [*prompt, *(5 + n % 7 for n in range(60))], "noise")
        while min(len(drafting.engine.output[key]) for key in keys) < 60:
            drafting.engine.step()
        assert not drafting.engine.finish
        runs.append([(drafting.engine.output[key][:60], drafting.engine.logprobs[key][:60]) for key in keys])
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    "row_s", [1e-6, pytest.param(1.0, marks=pytest.mark.slow)], ids=["cheap rows", "dear rows"]
)
def test_a_policy_changes_no_token(tmp_path: Path, row_s: float) -> None:
    """And has drafts verified where they pay, as the plan of each launched step says."""
    plain = LocalEngine(tmp_path / "model", device=DEVICE)
    wanted = plain.run(plain.start(PROMPTS[1], max_tokens=LENGTH))
    drafting = Drafting(tmp_path, 4, numerics="exact", adaptive=True)
    engine, loop = drafting.engine, drafting.engine.decode
    sizes = [(rows, False) for rows in loop.steps.batches] + [
        (rows, True) for rows in loop.steps.draft_batches
    ]
    loop.size_times.measured({StepSize(rows, 1, drafts): 0.001 + row_s * rows for rows, drafts in sizes})
    loop.size_times.observe = lambda size, seconds: None  # type: ignore[method-assign]
    key = engine.start(PROMPTS[1], max_tokens=LENGTH)
    drafting.script.begin(key, [*PROMPTS[1], *wanted[0]], "right")
    assert engine.run(key) == wanted
    drafting.settle()
    loop.observe()
    assert (engine.executor.speculative_steps > 0) is (row_s < 1)
    assert not loop.steps.queued, "all launched steps were seen to end"
    assert loop.draft_rates is not None
    assert (loop.draft_rates.tokens_a_step > 1.2) is (row_s < 1)
