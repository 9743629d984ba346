"""Draws of the whole loop follow the distribution that each filter leaves, in batches of every kind of
request, and while batches switch between the sampling graphs.

A request is admitted with a token that is forced, and the one drawn after it is counted: its context, and so
its distribution, is known. Some end there, others go on, so that slots join and leave out of step. Requests
come in runs: greedy and temperature alone, then all kinds mixed. In full on a GPU; on a CPU by the plain
steps.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from scipy import stats

from baton.engine.model.families.registry import load_config
from baton.engine.model.weights import random_weights
from baton.engine.sequence import Limits, SamplingParams
from baton.engine.shared_memory.mailbox import Feature
from tests.engine.crowd import Crowd, Request
from tests.engine.local_engine import CONFIG, WEIGHTS_SEED, LocalEngine
from tests.support.reference import load_reference, raw_logits
from tests.support.sampling.naive_sampler import naive_distribution, naive_edited

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = int(CONFIG["vocab_size"])
PROMPT, FORCED = (11, 5, 60, 5, 33, 8, 8, 90), 42
SURE = 1e-3
# Logits of this model are steep; at this temperature some 20 tokens are likely.
MILD = SamplingParams(temperature=2.0)


@dataclass(frozen=True)
class Kind:
    """Parameters, and the same without what they must be distinguished from."""

    params: SamplingParams
    without: SamplingParams | None = None
    stops: tuple[int, ...] = ()


def kinds(raw: list[float], likely: list[int]) -> dict[str, Kind]:
    """`raw`: the logits; `likely`: tokens, the likeliest first, to be biased or held where it matters."""

    def one(base: SamplingParams = MILD, **changes: Any) -> Kind:
        return Kind(dataclasses.replace(base, **changes), base)

    bias = ((likely[0], -1.5), (likely[2], 1.0), (likely[5], 2.0))
    # What came before is likelier than all else, so that it matters whether it is penalised.
    again = tuple((token, raw[likely[0]] - raw[token] + 2) for token in (PROMPT[0], PROMPT[-1], FORCED))
    repeats = dataclasses.replace(MILD, logit_bias=again)
    everything: dict[str, Any] = {"top_k": 15, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.5}
    return {
        "temperature": Kind(MILD, dataclasses.replace(MILD, temperature=1.5)),
        "top-k": one(top_k=6),
        "top-p": one(top_p=0.75),
        "min-p": one(min_p=0.2),
        "top-n-sigma": one(top_n_sigma=2.0),
        "top-k and top-p": Kind(
            dataclasses.replace(MILD, top_k=8, top_p=0.75), dataclasses.replace(MILD, top_k=8)
        ),
        "bias": one(logit_bias=bias),
        "repetition": one(repeats, repetition_penalty=2.5),
        "presence and frequency": one(repeats, presence_penalty=2.0, frequency_penalty=2.0),
        "min tokens": Kind(MILD, MILD, stops=tuple(likely[:3])),
        "all": one(repeats, presence_penalty=1.0, **everything),
    }


@dataclass(frozen=True)
class Size:
    draws: int
    slots: int
    graph: bool
    within_s: float = 250


REDUCED = Size(400, 48, graph=False)
# Kinds of the reduced size: each edits, filters or scales logits in another way.
SOME = ("temperature", "top-k and top-p", "min-p", "presence and frequency", "min tokens", "all")
FULL = Size(2000, 96, graph=True, within_s=800)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("reference")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weights = random_weights(load_config(folder), WEIGHTS_SEED, torch.device("cpu"), torch.float64)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return load_reference(folder)


def limits_of(kind: Kind, draw: random.Random) -> Limits:
    return Limits(draw.randint(2, 4), kind.stops, 3 if kind.stops else 0)


def requests_of(all_kinds: dict[str, Kind], draws: int, draw: random.Random) -> list[tuple[str, Request]]:
    """`draws` of each kind and some greedy ones: in the runs described above."""
    left = Counter(dict.fromkeys([*all_kinds, "greedy"], draws))
    plain = ["temperature", "greedy"]
    made: list[tuple[str, Request]] = []
    while left:
        only_plain = len(made) // 150 % 2 == 0
        names = [name for name in left if name in plain] if only_plain else list(left)
        for name in draw.choices(names or list(left), k=150 - len(made) % 150):
            if not left[name]:
                continue
            left[name] -= 1
            kind = all_kinds.get(name, Kind(SamplingParams()))
            params = dataclasses.replace(kind.params, seed=draw.getrandbits(64))
            made.append((name, Request(PROMPT, params, limits_of(kind, draw), forced=FORCED)))
        left = +left
    return made


def expected(raw: list[float], kind: Kind) -> list[float]:
    limits = Limits(9, kind.stops, 3 if kind.stops else 0)
    return distribution(raw, kind.params, limits)


def distribution(raw: list[float], params: SamplingParams, limits: Limits) -> list[float]:
    edited = naive_edited(raw, params, limits, PROMPT, (FORCED,))
    return naive_distribution([logit / params.temperature for logit in edited], params)


def p_value(counts: Counter[int], probabilities: list[float]) -> float:
    """Chi-square; tokens expected fewer than 5 times count together; 0 where an impossible one was drawn."""
    total = sum(counts.values())
    if any(counts[token] and probabilities[token] == 0 for token in range(VOCAB)):
        return 0.0
    observed, predicted = [0], [0.0]
    for token, probability in enumerate(probabilities):
        if probability * total >= 5:
            observed.append(counts[token])
            predicted.append(probability * total)
        else:
            observed[0] += counts[token]
            predicted[0] += probability * total
    if predicted[0] == 0:
        observed, predicted = observed[1:], predicted[1:]
    assert len(observed) > 2, "too few tokens for a distribution"
    # To rounding the sums are equal, which is asked of them.
    scale = sum(observed) / sum(predicted)
    return float(stats.chisquare(observed, [value * scale for value in predicted]).pvalue)


@dataclass
class Switches:
    """The kinds of sampling that the steps needed, as the engine itself reported at each iteration."""

    engine: LocalEngine
    last: bool | None = None
    count: int = 0
    turns: Counter[bool] = dataclasses.field(default_factory=Counter)

    def look(self) -> None:
        # Copies: the steps go on, and what they write meanwhile must not be looked at twice.
        state = self.engine.state
        active, every = state.active.tolist(), state.sampler.features.tolist()
        features = [one for one, runs in zip(every, active, strict=True) if runs]
        if not features:
            return
        filtered = any(one & ~int(Feature.GREEDY | Feature.TEMPERATURE) for one in features)
        self.turns[filtered] += 1
        self.count += self.last is not None and self.last != filtered
        self.last = filtered


def prove(folder: Path, model: Any, size: Size, names: Collection[str] = ()) -> Iterator[str]:
    """`names`: of the kinds; empty: all."""
    draw = random.Random(20)
    raw = raw_logits(model, [*PROMPT, FORCED])[-1]
    likely = sorted(range(VOCAB), key=lambda token: -raw[token])
    all_kinds = {name: kind for name, kind in kinds(raw, likely).items() if not names or name in names}
    made = requests_of(all_kinds, size.draws, draw)
    engine = LocalEngine(
        folder / "model",
        slots=size.slots,
        blocks=1 + 4 * size.slots,
        chunk=64 * len(PROMPT),
        device=DEVICE if size.graph else "cpu",
        graph=size.graph,
    )
    crowd, switches = Crowd(engine), Switches(engine)
    answers = crowd.run(
        [request for _, request in made], draw, join=0.95, each_turn=switches.look, within_s=size.within_s
    )
    crowd.assert_all_free()
    counts: dict[str, Counter[int]] = {name: Counter() for name in [*all_kinds, "greedy"]}
    for (name, request), answer in zip(made, answers, strict=True):
        assert answer.tokens[0] == FORCED
        assert len(answer.tokens) == request.limits.max_tokens or request.limits.stop_token_ids
        counts[name][answer.tokens[1]] += 1
    assert counts["greedy"] == {likely[0]: size.draws}
    assert crowd.counts(answers).at_once == size.slots
    assert min(switches.turns[True], switches.turns[False], switches.count) > size.draws // 100, switches
    yield f"{len(made)} requests, {switches.count} switches seen in {dict(switches.turns)} turns"
    for name, kind in all_kinds.items():
        mine = p_value(counts[name], expected(raw, kind))
        assert kind.without is not None
        other = p_value(counts[name], distribution(raw, kind.without, Limits(9)))
        yield f"{name}: p {mine:.3g}, without it {other:.3g}"
        assert mine > SURE > other, (name, mine, other)


@pytest.mark.parametrize("names", [SOME, pytest.param((), marks=pytest.mark.slow)], ids=["some", "all"])
def test_some_draws_of_each_kind(tmp_path: Path, model: Any, names: Collection[str]) -> None:
    print(*prove(tmp_path, model, REDUCED, names), sep="\n")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)  # beside other tests on the same GPU
def test_draws_of_each_kind_on_a_gpu(tmp_path: Path, model: Any) -> None:
    for line in prove(tmp_path, model, FULL):
        print(f"\nPROOF distribution {line}", end="")
