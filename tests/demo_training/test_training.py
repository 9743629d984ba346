"""Network, optimizer, state and run: they learn, and a run in two halves is the run in one."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.demo_training import state, train
from models.demo_training.network import Llama, Shape
from models.demo_training.optimizer import LearningRates, Optimizer, orthogonal
from models.demo_training.recipe import FULL, SMOKE, Recipe
from models.demo_training.train import run
from models.demo_training.vocabulary import BOS, END, PAD

# A run stops at a report.
STEPS, REPORT_STEPS = 24, 8
TINY = dataclasses.replace(
    SMOKE,
    shape=Shape(hidden=32, intermediate=64, layers=2, heads=2, kv_heads=1, head_dim=16),
    plan=dataclasses.replace(SMOKE.plan, steps=STEPS, short_rows=2, short_tokens=128, long_tokens=128),
)
SPECIAL_IDS = {BOS: 0, END: 1, PAD: 5}


@pytest.fixture
def frequent_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "REPORT_STEPS", REPORT_STEPS)


def arguments(*, out: Path | None, kept: Path | None, seconds: float = float("inf")) -> argparse.Namespace:
    return argparse.Namespace(out=out, state=kept, seconds=seconds, device="cpu", workers=1)


def losses(folder: Path) -> list[float]:
    return [point["answer_loss"] for point in json.loads((folder / "training.json").read_text())["curve"]]


@pytest.mark.usefixtures("frequent_reports")
def test_the_loss_falls_and_two_halves_are_one_run(tmp_path: Path) -> None:
    assert run(TINY, arguments(out=tmp_path / "whole", kept=None))
    assert not run(TINY, arguments(out=tmp_path / "halves", kept=tmp_path / "state", seconds=0))
    assert not (tmp_path / "halves").exists()
    assert run(TINY, arguments(out=tmp_path / "halves", kept=tmp_path / "state"))
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "halves")]
    assert weights[0] == weights[1]
    first, last = losses(tmp_path / "whole")[0], losses(tmp_path / "whole")[-1]
    assert last < first - 0.5


@pytest.mark.usefixtures("frequent_reports")
def test_a_state_goes_on_with_its_own_recipe_only(tmp_path: Path) -> None:
    run(TINY, arguments(out=None, kept=tmp_path, seconds=0))
    with pytest.raises(ValueError, match="another recipe"):
        run(dataclasses.replace(TINY, rest_weight=0.5), arguments(out=None, kept=tmp_path))


@pytest.mark.slow
def test_two_minutes_on_a_cpu_show_the_loss_fall(tmp_path: Path) -> None:
    assert run(SMOKE, arguments(out=tmp_path, kept=None))
    found = losses(tmp_path)
    assert found[-1] < found[0] / 2


@pytest.mark.parametrize("recipe", [FULL, TINY], ids=["full", "tiny"])
def test_a_state_is_small_and_comes_back_whole(recipe: Recipe, tmp_path: Path) -> None:
    network = Llama(recipe.shape)
    optimizer = Optimizer(network, recipe.rates)
    for tensor in optimizer.state.values():
        tensor.normal_()
    state.save(tmp_path, network, optimizer, state.Progress(recipe.settings, steps=5))
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert sum(sizes) <= 48_000_000
    assert max(sizes) <= 15_000_000
    other = Llama(recipe.shape)
    again = Optimizer(other, recipe.rates)
    assert state.restore(tmp_path, other, again, recipe.settings).steps == again.steps == 5
    for name, tensor in [*network.state_dict().items(), *optimizer.state.items()]:
        restored = other.state_dict().get(name, again.state.get(name))
        assert restored is not None
        assert torch.equal(restored, tensor), name


def test_transformers_computes_the_same(tmp_path: Path) -> None:
    network = Llama(TINY.shape)
    for weight in network.parameters():
        weight.data = torch.randn_like(weight).mul(0.1).bfloat16().float()
    state.export(tmp_path, network, SPECIAL_IDS, state.Progress({}))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    ids = torch.randint(0, TINY.shape.vocab, (2, 150))
    with torch.no_grad():
        torch.testing.assert_close(network(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)


def test_the_checkpoint_is_small_enough_to_ship(tmp_path: Path) -> None:
    state.export(tmp_path, Llama(FULL.shape), SPECIAL_IDS, state.Progress({}))
    assert (tmp_path / "model.safetensors").stat().st_size <= 16_000_000
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["head_dim"], config["max_position_embeddings"]) == (64, 4096)
    assert config["num_key_value_heads"] < config["num_attention_heads"]


@pytest.mark.parametrize("shape", [(3, 40, 16), (2, 16, 40), (1, 24, 24)], ids=str)
def test_orthogonal_evens_out_singular_values(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape).bfloat16()).float())
    assert values.min() > 0.3
    assert values.max() < 1.4


def test_a_step_goes_down_the_gradient_and_takes_it() -> None:
    torch.manual_seed(0)
    network = Llama(TINY.shape)
    optimizer = Optimizer(network, LearningRates(matrix=0.002, embedding=0.0005, norm=0.001))
    ids = torch.randint(0, 50, (2, 40))
    found = []
    for _ in range(20):
        loss = network.losses(ids[:, :-1], ids[:, 1:]).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        found.append(loss.item())
        optimizer.step(1.0)
        assert all(weight.grad is None for weight in network.parameters())
    assert found[-1] < found[0] - 0.5


def test_the_rate_rises_stays_and_falls_to_nothing() -> None:
    scales = [FULL.scale(step) for step in range(FULL.plan.steps + 1)]
    assert scales[0] == pytest.approx(1 / FULL.warmup_steps)
    assert max(scales) == scales[FULL.warmup_steps] == 1.0
    assert scales[-1] == 0.0
    assert scales[-2] < 0.001
