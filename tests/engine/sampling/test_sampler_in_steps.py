"""The sampler through prefill and decode: every token and logprob judged by transformers' logits."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.engine.model.families.registry import load_config
from baton.engine.model.weights import random_weights
from baton.engine.sequence import Limits, SamplingParams, Sequence
from baton.engine.shared_memory.logprob_records import Logprobs
from baton.engine.shared_memory.output_ring import Finish
from bench.engine_driver import finish
from tests.engine.local_engine import CONFIG, WEIGHTS_SEED, LocalEngine
from tests.support.reference import load_reference, raw_logits
from tests.support.sampling.naive_sampler import naive_logprobs, naive_token
from tests.support.sampling.random_sampling import FEATURES, random_features, random_limits, random_params

VOCAB = int(CONFIG["vocab_size"])
MAX_TOKENS = 10


@dataclass(frozen=True)
class Ask:
    prompt: tuple[int, ...]
    params: SamplingParams
    limits: Limits

    def start(self, engine: LocalEngine, emitted: list[int] | None = None) -> tuple[int, int]:
        return engine.start(
            self.prompt,
            max_tokens=self.limits.max_tokens,
            sampling=self.params,
            stop=self.limits.stop_token_ids,
            min_tokens=self.limits.min_tokens,
            emitted=emitted or (),
        )


def random_ask(rng: random.Random, features: frozenset[str]) -> Ask:
    prompt = tuple(rng.choices(range(VOCAB), k=rng.randint(1, 20)))
    return Ask(prompt, random_params(rng, features, VOCAB), random_limits(rng, features, VOCAB, MAX_TOKENS))


def asks(seed: int) -> list[Ask]:
    """Each feature alone, some combinations, and rows without any."""
    rng = random.Random(seed)
    alone = [frozenset([feature]) for feature in FEATURES]
    mixed = [random_features(rng) for _ in range(10)]
    made = [random_ask(rng, features) for features in [*alone, *mixed, frozenset(FEATURES), frozenset()]]
    rng.shuffle(made)
    return made


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("reference")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weights = random_weights(load_config(folder), WEIGHTS_SEED, torch.device("cpu"), torch.float64)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return load_reference(folder)


def engine_for(folder: Path, **settings: Any) -> LocalEngine:
    return LocalEngine(folder / "model", dtype="float64", blocks=256, **settings)


def check(reference: Any, ask: Ask, output: list[int], logprobs: list[Logprobs | None]) -> None:
    raw = raw_logits(reference, [*ask.prompt, *output[:-1]])[len(ask.prompt) - 1 :]
    for number, token in enumerate(output):
        expected = naive_token(raw[number], ask.params, ask.limits, ask.prompt, output[:number])
        assert token == expected, (number, ask)
        reported = logprobs[number]
        if ask.params.logprobs is None:
            assert reported is None
            continue
        assert reported is not None
        chosen, top = naive_logprobs(raw[number], token, ask.params.logprobs)
        # The ring's records and the wire carry float32.
        assert reported.logprob == pytest.approx(chosen, rel=1e-7, abs=1e-6)
        assert [one for one, _ in reported.top] == [one for one, _ in top]
        assert [value for _, value in reported.top] == pytest.approx([v for _, v in top], rel=1e-7, abs=1e-6)


def test_mixed_batches_equal_the_reference_and_each_row_alone(tmp_path: Path, reference: Any) -> None:
    requests = asks(1)
    together = engine_for(tmp_path, slots=len(requests), chunk=7)
    keys = []
    for ask in requests:  # each joins while the earlier ones are under way
        keys.append(ask.start(together))
        together.step()
    outputs = together.run(*keys)
    for ask, key, output in zip(requests, keys, outputs, strict=True):
        check(reference, ask, output, together.logprobs[key])
        stopped = output[-1] in ask.limits.stop_token_ids
        assert together.finish[key] is (Finish.STOP if stopped else Finish.LENGTH)
        assert stopped or len(output) == MAX_TOKENS
        if len(output) > 1:
            alone = engine_for(tmp_path, slots=1)
            mine = ask.start(alone)
            assert alone.run(mine) == [output]
            assert alone.logprobs[mine] == together.logprobs[key]  # bitwise


def test_a_later_attempt_goes_on_exactly(tmp_path: Path) -> None:
    rng = random.Random(2)
    requests = asks(3)
    first = engine_for(tmp_path, slots=len(requests))
    keys = [ask.start(first) for ask in requests]
    outputs = first.run(*keys)
    second = engine_for(tmp_path, slots=len(requests), chunk=5)
    resumed = []
    for ask, key, output in zip(requests, keys, outputs, strict=True):
        if len(output) < 3:
            continue
        cut = rng.randint(1, len(output) - 2)
        resumed.append((key, cut, ask.start(second, output[:cut])))
    assert len(resumed) > 10
    second.run(*(again for _, _, again in resumed))
    for key, cut, again in resumed:
        assert second.output[again] == first.output[key][cut:]
        assert second.finish[again] is first.finish[key]
        for reported, before in zip(second.logprobs[again], first.logprobs[key][cut:], strict=True):
            assert (reported is None) == (before is None)
            if reported is not None and before is not None:
                assert reported.logprob == pytest.approx(before.logprob, rel=1e-6)
                assert [token for token, _ in reported.top] == [token for token, _ in before.top]


def test_a_slots_next_tenant_inherits_nothing(tmp_path: Path, reference: Any) -> None:
    engine = engine_for(tmp_path, slots=1)
    for ask in asks(5):
        key = ask.start(engine)
        (output,) = engine.run(key) if len(engine.output[key]) < MAX_TOKENS else ([],)
        check(reference, ask, output, engine.logprobs[key])
        engine.slots.release(*key)


@pytest.mark.parametrize(("emitted", "max_tokens"), [(0, 0), (0, 4), (7, 20)])
def test_prompt_logprobs_equal_the_reference(
    tmp_path: Path, reference: Any, emitted: int, max_tokens: int
) -> None:
    rng = random.Random(emitted)
    token_ids = tuple(rng.choices(range(VOCAB), k=150))
    length = len(token_ids) - emitted
    engine = engine_for(tmp_path, chunk=37)
    neighbour = Sequence(token_ids[:50], 50, SamplingParams(), Limits(4))
    params = SamplingParams(temperature=0.5, logit_bias=((3, 50.0),), logprobs=3)  # neither changes them
    sequence = Sequence(token_ids, length, params, Limits(max_tokens), prompt_logprobs=True)
    engine.scheduler.add(neighbour)
    engine.scheduler.add(sequence)
    results = finish(engine.executor)
    assert not any(r.prompt_logprobs for r in results if r.chunk.sequence is neighbour)
    mine = [result for result in results if result.chunk.sequence is sequence]
    assert [result.token is None for result in mine[-2:]] == [True, max_tokens == 0]
    reported = [one for result in mine for one in result.prompt_logprobs]
    assert len(reported) == length - 1
    raw = raw_logits(reference, list(token_ids))
    for position, one in enumerate(reported, start=1):
        chosen, top = naive_logprobs(raw[position - 1], token_ids[position], 3)
        assert one.logprob == pytest.approx(chosen, abs=1e-6)
        assert [token for token, _ in one.top] == [token for token, _ in top]
        assert [value for _, value in one.top] == pytest.approx([v for _, v in top], abs=1e-6)


@pytest.mark.parametrize("emitted", [0, 2])
def test_a_stop_id_that_is_sure_to_come_comes_right_after_min_tokens(tmp_path: Path, emitted: int) -> None:
    engine = engine_for(tmp_path, slots=6)
    sure = SamplingParams(logit_bias=((9, 100.0),))
    keys = {
        n: engine.start(
            (5, 6, 7), max_tokens=10, sampling=sure, stop=(9,), min_tokens=n, emitted=(11, 12)[:emitted]
        )
        for n in range(emitted + 1, emitted + 5)
    }
    for n, key in keys.items():
        (output,) = engine.run(key)
        assert output.index(9) == len(output) - 1 == n - emitted
        assert engine.finish[key] is Finish.STOP
