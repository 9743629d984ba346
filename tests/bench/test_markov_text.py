"""Text of a known chance: what is drawn, and that checkpoints draw the same by the reference model."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.markov_text import chain, chance_of, cycle_of, draw_weights, encode, write_checkpoint

IDS = cycle_of(64)


def chances_of(model: Any, prompt: list[int]) -> tuple[Tensor, Tensor]:
    """The chances of all ids behind each token of a prompt, and the token's successor."""
    with torch.no_grad():
        chances = model(torch.tensor([prompt])).logits[0].softmax(-1)
    return chances, (torch.tensor(prompt) + 1) % IDS


def test_a_text_is_named_by_its_chance() -> None:
    assert chance_of("markov:0.8") == 0.8
    for wrong in ("markov:1", "markov:0", "markov:", "markov", "markov:-1", "other:0.5"):
        with pytest.raises(ValueError, match="between 0 and 1"):
            chance_of(wrong)


def test_a_chain_goes_on_with_the_given_chance() -> None:
    tokens = chain(0.7, 20_000, seed=3)
    follows = sum((a + 1) % 128 == b for a, b in itertools.pairwise(tokens)) / 19_999
    assert follows == pytest.approx(0.7 + 0.3 / 128, abs=0.02)
    assert set(tokens) == set(range(128))
    assert tokens == chain(0.7, 20_000, seed=3)
    assert tokens != chain(0.7, 20_000, seed=4)


def test_a_checkpoint_draws_what_a_chain_has(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "tiny", "fp32", 0.8, device="cpu", shard_bytes=50_000)  # several files
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = chain(0.8, 64, seed=1, ids=IDS)
    chances, successors = chances_of(model, prompt)
    others = chances[:, :IDS].clone()
    others[torch.arange(64), successors] = torch.nan
    assert chances[torch.arange(64), successors].sub(0.8 + 0.2 / IDS).abs().max() < 0.01
    assert others.nan_to_num(0.2 / IDS).sub(0.2 / IDS).abs().max() < 0.002
    assert chances[:, IDS:].sum(1).max() < 1e-5


def test_models_that_cannot_write_it_are_refused() -> None:
    with pytest.raises(ValueError, match="a head of its own"):
        encode({"model.embed_tokens.weight": torch.zeros(256, 64)}, 0.8)


def test_weights_that_are_drawn_in_place_are_those_of_a_chain(tmp_path: Path) -> None:
    """Weights are drawn as vLLM's workers draw them; their order makes no difference to the text."""
    write_checkpoint(tmp_path, "tiny", "fp32", 0.8, device="cpu")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    draw_weights(0.6, model)
    prompt = chain(0.6, 64, seed=1, ids=IDS)
    chances, successors = chances_of(model, prompt)
    assert chances[torch.arange(64), successors].sub(0.6 + 0.4 / IDS).abs().max() < 0.01
