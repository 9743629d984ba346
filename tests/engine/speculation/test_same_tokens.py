"""The same tokens with drafts as without, whatever is proposed: many requests of every kind at once, which
grow, are swapped out and in, preempted, moved to an engine of another shape, and cancelled.

Mode `exact` in plain torch: output, logprobs and ends are compared with those of an engine whose slots have
one row. Steps with and without drafts follow one another at random, as where some of them join prefill steps.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from baton.engine.decode.slot_state import SlotState
from baton.engine.sequence import SamplingParams
from baton.engine.shared_memory.output_ring import Finish
from baton.engine.shared_memory.step_shape import MOST_DRAFTS
from services.worker.engine.decode import block_allocation
from tests.engine.crowd import Answer, Request
from tests.engine.local_engine import LocalEngine
from tests.engine.speculation.draft_crowd import DraftCrowd, Job, mask_of
from tests.engine.speculation.script_table import ScriptTable
from tests.engine.speculation.scripted import LOOKUP, PROPOSERS, VOCAB, ScriptedProposer, wrong
from tests.engine.test_gpu_requests import check
from tests.support.sampling.random_sampling import random_features, random_limits, random_params

CONTEXT = 64
# Every other layer has rows that see their last six tokens, so that drafts see one another and ever less of
# the text; its rotary embeddings, norms and scale are others.
WINDOWS = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 10,
    "query_pre_attn_scalar": 30,
    "sliding_window": 6,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def _small_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks come for 8 tokens at a time, so that drafts reach the end of a sequence's blocks."""
    monkeypatch.setattr(block_allocation, "ALLOCATION_TOKENS", 8)


def random_jobs(draw: random.Random, count: int, scripts: Sequence[str]) -> list[Job]:
    made = []
    for number in range(count):
        features = random_features(draw) if draw.random() < 0.6 else frozenset[str]()
        params = random_params(draw, features, VOCAB)
        if not features and draw.random() < 0.5:
            params = SamplingParams(draw.choice((0.5, 1.0)), seed=draw.getrandbits(64))
        # Often of few kinds of tokens, so that the lookup finds some of them again.
        prompt = tuple(draw.choices(range(draw.choice((3, VOCAB))), k=draw.randint(1, 20)))
        length = draw.randint(2, 32)
        limits = random_limits(draw, features, VOCAB, length)
        if "min_tokens" not in features and draw.random() < 0.3:
            limits = replace(limits, stop_token_ids=tuple(draw.sample(range(VOCAB), 4)))
        request = Request(
            prompt,
            params,
            limits,
            cancel_after=draw.randint(1, length) if draw.random() < 0.1 else None,
            masked=draw.random() < 0.15,
            most_drafts=draw.choice((None, None, None, *range(8))),
        )
        move_after = draw.randint(1, length) if draw.random() < 0.2 else None
        made.append(Job(request, scripts[number % len(scripts)], move_after))
    return made


class Engines:
    """Runs jobs with drafts; counts what happened to them, drafts by the names of their proposers."""

    # (rows a slot, slots, blocks, blocks in the host's memory) of the two engines that take turns.
    shapes = (8, 8, 44, 4), (3, 5, 30, 40)
    # Options of the engine without drafts alone.
    without: ClassVar[dict[str, Any]] = {}
    # Options of those with drafts alone.
    with_: ClassVar[dict[str, Any]] = {}
    # Whether drafts are from scripts, or all looked up as a worker's are.
    scripted = True
    _made: ScriptedProposer | ScriptTable | None = None
    # Of a slot's history, by engine.
    lookup_tokens = 24, CONTEXT

    def __init__(self, folder: Path, dtype: str, seed: int, **how: Any) -> None:
        """`how`: options of `LocalEngine` for all engines."""
        self.draw = random.Random(seed)
        self._folder, self._how = folder / "model", {"dtype": dtype, "longest": CONTEXT, **how}
        self.accepted: Counter[str] = Counter()
        self.drafts: Counter[str] = Counter()
        self.ended: Counter[Finish] = Counter()
        self.moved = self.swapped_out = 0
        self.drafts_shared = self.accepted_shared = 0

    def without_drafts(self, jobs: Sequence[Job]) -> list[Answer]:
        """All of them by an engine with one row a slot, to their ends."""
        engine = LocalEngine(self._folder, slots=8, blocks=400, **self._how, **self.without)
        jobs = [replace(job, request=replace(job.request, cancel_after=None)) for job in jobs]
        return DraftCrowd(engine, jobs, self.draw).run_all()

    def with_drafts(self, jobs: Sequence[Job], wanted: Sequence[Answer]) -> list[Answer]:
        """The same by two engines in turn: those that are preempted or moved continue on the other one, until
        all have ended."""
        answers = {number: Answer([], [], Finish.NONE) for number in range(len(jobs))}
        left = {number: self._with_prediction(job, wanted[number]) for number, job in enumerate(jobs)}
        for turn in range(100):
            if not left:
                return list(answers.values())
            now = [_with_cancel(job) for job in left.values()]
            made = self._run(turn, now, [wanted[number] for number in left])
            for number, answer in zip(list(left), made, strict=True):
                before = answers[number]
                tokens, logprobs = before.tokens + answer.tokens, before.logprobs + answer.logprobs
                answers[number] = Answer(tokens, logprobs, answer.finish)
                self.ended[answer.finish] += 1
                job = self._continued(left.pop(number), answers[number])
                if job is not None and len(wanted[number].tokens) == len(tokens) + 1:
                    answers[number] = wanted[number]  # the last token is prefill's to draw
                elif job is not None:
                    left[number] = job
        raise AssertionError("requests do not end")

    def _with_prediction(self, job: Job, wanted: Answer) -> Job:
        """Predicts the output, except for some tokens, where drafts are looked up."""
        if job.script != LOOKUP:
            return job
        prediction = tuple(wrong(token) if self.draw.random() < 0.1 else token for token in wanted.tokens)
        return replace(job, request=replace(job.request, prediction=prediction))

    def _continued(self, job: Job, answer: Answer) -> Job | None:
        """The rest of a job whose sequence has ended on one engine."""
        emitted = tuple(answer.tokens)
        request = replace(job.request, emitted=emitted)
        if request.masked:
            request = replace(request, first_mask=mask_of(request, len(request.text)))
        rest = replace(job, request=request)
        if answer.finish is Finish.PREEMPTED:
            return rest
        cancel_after = job.request.cancel_after
        cancelled = cancel_after is not None and cancel_after <= len(emitted)
        if answer.finish is not Finish.CANCELLED or cancelled:
            return None
        self.moved += 1
        return replace(rest, move_after=None)

    def _run(self, turn: int, jobs: Sequence[Job], wanted: Sequence[Answer]) -> list[Answer]:
        rows, slots, blocks, host = self.shapes[turn % 2]
        engine = LocalEngine(
            self._folder, slots=slots, blocks=blocks, rows_per_slot=rows,
            lookup_tokens=self.lookup_tokens[turn % 2], proposer=self._proposer if self.scripted else None,
            **self._how, **self.with_,
        )  # fmt: skip
        crowd = DraftCrowd(engine, jobs, self.draw, host_blocks=host, proposer=self._made, wanted=wanted)
        with self._beside(engine):
            answers = crowd.run_all()
        crowd.assert_all_free()
        assert engine.reader.read() == []
        self.swapped_out += crowd.counts(answers).swapped_out
        for number, progress in crowd.progress.items():
            self.accepted[jobs[number].script] += progress.accepted
            self.drafts[jobs[number].script] += progress.drafts
            self.drafts_shared += progress.drafts_shared
            self.accepted_shared += progress.accepted_shared
        return answers

    def _beside(self, engine: LocalEngine) -> AbstractContextManager[None]:
        """The context in which an engine with drafts runs."""
        return nullcontext()

    def _proposer(self, state: SlotState) -> ScriptedProposer | ScriptTable:
        made = self._made = self._make_proposer(state)
        return made

    def _make_proposer(self, state: SlotState) -> ScriptedProposer | ScriptTable:
        return ScriptedProposer(state, self.draw)


def _with_cancel(job: Job) -> Job:
    """The job whose request is cancelled in time: for good, or to be moved."""
    due = [after for after in (job.request.cancel_after, job.move_after) if after is not None]
    left = None if not due else max(min(due) - len(job.request.emitted), 1)
    return replace(job, request=replace(job.request, cancel_after=left))


def prove(
    folder: Path, count: int, scripts: Sequence[str], dtype: str = "float32", seed: int = 1, **how: Any
) -> str:
    return prove_by(Engines(folder, dtype, seed, **how), count, scripts)


def prove_by(engines: Engines, count: int, scripts: Sequence[str]) -> str:
    jobs = random_jobs(engines.draw, count, scripts)
    wanted = engines.without_drafts(jobs)
    answers = engines.with_drafts(jobs, wanted)
    for job, answer, one in zip(jobs, answers, wanted, strict=True):
        check(job.request, answer, one)
    # What was injected took effect.
    assert engines.swapped_out > count // 20
    assert engines.ended[Finish.PREEMPTED] > count // 20
    assert engines.moved > count // 20
    for script in scripts:
        drafts, accepted = engines.drafts[script], engines.accepted[script]
        assert drafts > count // len(scripts)
        match script:
            case "right" | "random lengths":  # all but those that are a sequence's last token, a stop id
                assert 0 <= drafts - accepted <= engines.ended[Finish.STOP]
            case "past the end":
                assert 0 <= drafts - accepted <= MOST_DRAFTS * engines.ended[Finish.STOP]
            case "wrong":
                assert accepted == 0
            case "noise":
                assert accepted < drafts // 10
            case _:
                assert 0 < accepted < drafts, script
    tokens = sum(len(one.tokens) for one in answers)
    return (
        f"{count} requests, {tokens} tokens, {dict(engines.ended)}, {engines.swapped_out} swapped out, "
        f"{engines.moved} moved, {dict(engines.accepted)} of {dict(engines.drafts)} drafts accepted"
    )


def test_requests_with_every_proposer(tmp_path: Path) -> None:
    print(prove(tmp_path, 40, PROPOSERS))


@pytest.mark.slow
def test_two_hundred_requests_with_every_proposer(tmp_path: Path) -> None:
    print(prove(tmp_path, 200, PROPOSERS))


@pytest.mark.slow
def test_requests_in_float64(tmp_path: Path) -> None:
    print(prove(tmp_path, 32, ("oracle 0.1", LOOKUP), "float64", seed=2))


def test_requests_over_windows_and_a_cache_in_fp8(tmp_path: Path) -> None:
    scripts, cache_dtype = ("oracle 0.1", LOOKUP), "float8_e4m3fn"
    print(prove(tmp_path, 20, scripts, seed=4, changes=WINDOWS, cache_dtype=cache_dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("script", PROPOSERS)
def test_two_hundred_requests_with_one_proposer(tmp_path: Path, script: str, dtype: str) -> None:
    print(prove(tmp_path, 200, (script,), dtype, seed=3))


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["float32", "float8_e4m3fn"])
@pytest.mark.parametrize("changes", [WINDOWS, {}], ids=["windows", "full"])
def test_two_hundred_requests_of_other_caches(
    tmp_path: Path, changes: dict[str, Any], cache_dtype: str
) -> None:
    print(prove(tmp_path, 200, PROPOSERS, seed=5, changes=changes, cache_dtype=cache_dtype))
