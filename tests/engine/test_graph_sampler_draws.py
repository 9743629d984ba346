"""How often the full sampler draws each token, by chi-square; and the real sizes. On a GPU."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from scipy import stats
from torch import Tensor

from baton.engine.model_config import ModelConfig
from baton.engine.sequence import Limits, SamplingParams
from baton.engine.slots import Grant
from baton.engine.weights import random_weights
from tests.engine.local_engine import CONFIG, WEIGHTS_SEED, LocalEngine
from tests.engine.sampled_batch import Request, SampledBatch
from tests.engine.test_graph_sampler import check, random_logits, random_request
from tests.engine.test_graph_sampler_steps import counted
from tests.support.naive_sampler import naive_distribution, naive_edited
from tests.support.random_sampling import random_features
from tests.support.reference import load_reference, raw_logits

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
VOCAB = 128_256
DRAWS = 600
WARM = SamplingParams(0.9)
KINDS = {
    "temperature": WARM,
    "top-k": dataclasses.replace(WARM, top_k=12),
    "top-p": dataclasses.replace(WARM, top_p=0.8),
    "min-p": dataclasses.replace(WARM, min_p=0.1),
    "all filters": dataclasses.replace(WARM, top_k=40, top_p=0.9, min_p=0.02),
    "bias": dataclasses.replace(WARM, top_p=0.9, logit_bias=((3, 2.0), (11, -1.5))),
    "penalties": dataclasses.replace(WARM, repetition_penalty=1.3, presence_penalty=0.5),
    "greedy": SamplingParams(),
}


def judge(counts: Tensor, expected: Tensor, draws: int) -> None:
    """Counts of `draws` draws against how likely each token is; what is rare is taken together."""
    assert not counts[expected == 0].any()
    common = expected * draws >= 10
    observed = [*counts[common].tolist(), int(counts[~common].sum())]
    predicted = [*(expected[common] * draws).tolist(), float(expected[~common].sum() * draws)]
    if predicted[-1] < 1:
        predicted = [one / sum(predicted[:-1]) * sum(observed[:-1]) for one in predicted]
        observed, predicted = observed[:-1], predicted[:-1]
    assert len(observed) > 1
    scale = sum(observed) / sum(predicted)
    assert stats.chisquare(observed, [one * scale for one in predicted]).pvalue > 1e-4


@pytest.mark.parametrize(
    ("rows", "dtype"), [(64, torch.bfloat16), (64, torch.float32), (256, torch.bfloat16)]
)
def test_real_sizes_equal_the_reference(rows: int, dtype: torch.dtype) -> None:
    rng = random.Random(rows)
    for head in (0, 70_000):
        requests = [random_request(rng, VOCAB, random_features(rng)) for _ in range(rows)]
        batch = SampledBatch(requests, VOCAB, device=DEVICE, head=head)
        order = rng.sample(range(rows), rows)
        check(batch, random_logits(rng, rows, VOCAB, dtype), order, head=head)


def test_draws_of_a_mixed_batch_follow_what_edits_and_filters_leave() -> None:
    kinds, turns, rows = [*KINDS.values()], 150, 256
    requests = [Request(dataclasses.replace(kinds[i % len(kinds)], seed=i)) for i in range(rows)]
    batch = SampledBatch(requests, VOCAB, device=DEVICE)
    one = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) - 3
    one[:60] += 9
    logits = one.bfloat16().to(DEVICE).expand(rows, -1).contiguous()
    order = list(range(rows))
    _, scaled, left = batch.filtered(logits, order)
    expected = scaled.masked_fill(~left, -torch.inf).softmax(-1).cpu()
    in_output = batch.state.sampler.counts.in_output
    before = in_output.clone()
    drawn = []
    for _ in range(turns):
        drawn.append(batch.drawn(logits, order))
        batch.state.position += 1  # other noise
        in_output.copy_(before)
    tokens = torch.tensor(drawn)
    for number, name in enumerate(KINDS):
        if name == "greedy":
            assert set(tokens[:, number :: len(kinds)].flatten().tolist()) == {int(logits[0].argmax())}
            continue
        mine = tokens[:, number :: len(kinds)].flatten()
        judge(torch.bincount(mine, minlength=VOCAB), expected[number], mine.numel())


class SharedPrompt:
    """Requests whose prompt's KV was computed once: they begin at their second token, whose draw counts."""

    PROMPT, LAST = (7, 8, 9, 10), 20

    def __init__(self, folder: Path, slots: int) -> None:
        self.engine = LocalEngine(folder, slots=slots, blocks=64 + 2 * slots, device=DEVICE, graph=True)
        first = self.engine.start(self.PROMPT, max_tokens=2)
        self.engine.run(first)
        self.engine.slots.release(*first)
        self._prompt = self.engine.tables[first][0][:1]

    def start(self, params: SamplingParams, tokens: int) -> tuple[int, int]:
        """`tokens` of output, the given LAST among them."""
        engine = self.engine
        slot, generation = engine.slots.grant()
        own = engine.pools.allocate(tokens)
        end = len(self.PROMPT) + tokens
        engine.decode.admit(
            Grant(slot, generation, ((*self._prompt, *own[0]),), end - 1),
            token_ids=self.PROMPT,
            prompt_length=len(self.PROMPT),
            last_token=self.LAST,
            end=end,
            sampling=params,
            limits=Limits(tokens),
        )
        engine.output[slot, generation] = []
        engine.logprobs[slot, generation] = []
        engine.tables[slot, generation] = own
        return slot, generation

    def ended(self, key: tuple[int, int]) -> list[int]:
        engine = self.engine
        engine.slots.release(*key)
        engine.pools.release(engine.tables.pop(key))
        del engine.finish[key]
        return engine.output.pop(key)


def distributions(folder: Path) -> dict[str, Tensor]:
    """What `transformers` and plain Python say of the token behind PROMPT and LAST, of each kind."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weights = random_weights(ModelConfig.load(folder), WEIGHTS_SEED, torch.device("cpu"), torch.float64)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    reference: Any = load_reference(folder)
    raw = raw_logits(reference, [*SharedPrompt.PROMPT, SharedPrompt.LAST])[-1]
    expected = {}
    for name, params in KINDS.items():
        logits = naive_edited(raw, params, Limits(9), SharedPrompt.PROMPT, (SharedPrompt.LAST,))
        scaled = [logit / (params.temperature or 1e-9) for logit in logits]
        expected[name] = torch.tensor(naive_distribution(scaled, params), dtype=torch.float64)
    return expected


def test_draws_are_right_while_batches_change_graphs(tmp_path: Path) -> None:
    """Two thirds of the time only such requests join as the quicker graph can draw."""
    rng = random.Random(3)
    expected = distributions(tmp_path / "reference")
    shared = SharedPrompt(tmp_path / "model", slots=24)
    counts = counted(shared.engine)
    tallies = {name: torch.zeros(CONFIG["vocab_size"], dtype=torch.int64) for name in KINDS}
    running: dict[tuple[int, int], str] = {}
    phase = 0
    while min(int(tally.sum()) for tally in tallies.values()) < DRAWS or running:
        short = [name for name, tally in tallies.items() if int(tally.sum()) < DRAWS]
        phase += 1
        names = list(KINDS) if phase // 20 % 3 == 0 else ["temperature", "greedy"]
        for _ in range(rng.randrange(6) if short else 0):
            if shared.engine.slots.free:
                name = rng.choice(names)
                params = dataclasses.replace(KINDS[name], seed=rng.getrandbits(64))
                running[shared.start(params, rng.randrange(2, 6))] = name
        shared.engine.step()
        for key in [key for key in running if key in shared.engine.finish]:
            tallies[running.pop(key)][shared.ended(key)[1]] += 1
    assert min(counts.values()) > 100
    for name, tally in tallies.items():
        judge(tally, expected[name], int(tally.sum()))
    assert shared.engine.slots.free == 24
