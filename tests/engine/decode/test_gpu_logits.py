"""bf16 and fp16 by their logits: teacher-forced through the decode kernels, the error against the float32
reference is at most 1.5 times that of transformers' own run in that dtype on the same tokens.

The weights are the same numbers in every run: they are rounded to the dtype first. In full on a GPU; on a
CPU one family in Triton's interpreter, in float16, since bf16 is not rounded there.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from baton.engine.model.families.registry import load_config
from bench.shapes import SHAPES
from tests.engine.dense_weights import load_weights, random_weights
from tests.engine.forced import decoded_logits, relative_rms
from tests.support.checkpoints import FAMILIES, MIXTURES, VOCAB_SIZE, Case
from tests.support.reference import load_reference
from tests.support.rounded_kv import round_keys_and_values

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MOST = 1.5
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
BY_NAME = {case.name: case for case in FAMILIES}
# Its rows take all experts: in others rounding gives a row now and then another one, in one of the two runs.
MIXTURE = MIXTURES[1]


def tokens(batch: int, length: int, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, vocab_size, (batch, length), generator=generator)


@torch.inference_mode()
def reference(model: Any, token_ids: Tensor) -> Tensor:
    """[B, L, vocab] float32 on the CPU, a row of the batch at a time."""
    rows = [model(row[None].to(model.device)).logits[0].float().cpu() for row in token_ids]
    return torch.stack(rows)


def ratios(
    truth: Tensor, theirs: Tensor, mine: dict[str, Tensor], label: str, most: float = MOST
) -> dict[str, float]:
    """Our error over theirs, by numerics mode."""
    their_error = relative_rms(theirs, truth)
    assert their_error > 0
    found = {mode: relative_rms(logits, truth) / their_error for mode, logits in mine.items()}
    reported = ", ".join(f"{mode} {ratio:.3f}" for mode, ratio in found.items())
    print(f"\nPROOF logits {label}: transformers' error {their_error:.3g}, ours / theirs: {reported}")
    assert all(ratio <= most for ratio in found.values()), found
    return found


def prove(
    folder: Path,
    dtype: torch.dtype,
    token_ids: Tensor,
    label: str,
    modes: tuple[bool, ...],
    rounding: pytest.MonkeyPatch | None = None,
) -> None:
    """Compares logits with those of transformers. With `rounding` keys and values are e4m3 codes in our run,
    and rounded to such in theirs."""
    truth = reference(load_reference(folder, torch.float32).to(DEVICE), token_ids)
    if rounding is not None:
        round_keys_and_values(rounding)
    theirs = reference(load_reference(folder, dtype).to(DEVICE), token_ids)
    config = load_config(folder)
    weights = load_weights(config, folder, DEVICE, dtype)
    cache = torch.float8_e4m3fn if rounding is not None else None
    mine = {
        "exact" if exact else "fast": decoded_logits(
            config, weights, token_ids, exact=exact, cache_dtype=cache
        )
        for exact in modes
    }
    assert all(bool(logits.isfinite().all()) for logits in mine.values())
    ratios(truth, theirs, mine, label)


def test_a_few_tokens_of_one_family(tmp_path: Path) -> None:
    folder = BY_NAME["llama-3-kv-heads"].make(tmp_path, seed=5, dtype="float16")
    prove(folder, torch.float16, tokens(2, 4, VOCAB_SIZE), "a few", (True,))


@pytest.mark.slow
def test_a_few_tokens_of_a_mixture(tmp_path: Path) -> None:
    folder = MIXTURE.make(tmp_path, seed=5, dtype="float16")
    prove(folder, torch.float16, tokens(2, 4, VOCAB_SIZE), "a few of a mixture", (True, False))


def test_a_few_tokens_with_a_cache_in_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = BY_NAME["llama-default"].make(tmp_path, seed=5, dtype="float16")
    prove(folder, torch.float16, tokens(2, 6, VOCAB_SIZE), "a few, KV in fp8", (True,), monkeypatch)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_with_a_cache_in_fp8_on_a_gpu(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = BY_NAME["llama-default"].make(tmp_path, seed=5, dtype=dtype)
    label = f"{dtype}, KV in fp8"
    prove(folder, DTYPES[dtype], tokens(3, 560, VOCAB_SIZE), label, (True, False), monkeypatch)


def test_an_error_twice_as_large_is_found() -> None:
    truth = torch.randn(1, 5, 40, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(2, 1, 5, 40, generator=torch.Generator().manual_seed(2)) * 1e-3
    ratios(truth, truth + noise[0], {"exact": truth + noise[1]}, "as large")
    with pytest.raises(AssertionError, match="fast"):
        ratios(truth, truth + noise[0], {"fast": truth + 2 * noise[1]}, "twice as large")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*FAMILIES, MIXTURE], ids=str)
def test_logits_of_every_family_on_a_gpu(tmp_path: Path, case: Case, dtype: str) -> None:
    """560 tokens: several parts of the attention in either mode."""
    folder = case.make(tmp_path, seed=5, dtype=dtype)
    prove(folder, DTYPES[dtype], tokens(3, 560, VOCAB_SIZE), f"{case} {dtype}", (True, False))


@pytest.mark.gpu
@pytest.mark.whole_gpu
@pytest.mark.slow
@pytest.mark.parametrize("layers", [32])
def test_logits_of_the_8b_shape_on_a_gpu(tmp_path: Path, layers: int) -> None:
    """Random weights, bf16. One copy of the model at a time beside the weights: about 55 GB."""
    shape = {**SHAPES["llama-3.1-8b"].config, "num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = load_config(tmp_path)
    token_ids = tokens(4, 96, config.vocab_size)
    weights = random_weights(config, 5, DEVICE, torch.bfloat16)
    truth = _of_a_model_made_of(weights, tmp_path, torch.float32, token_ids)
    theirs = _of_a_model_made_of(weights, tmp_path, torch.bfloat16, token_ids)
    mine = {}
    for exact in (True, False):
        mine["exact" if exact else "fast"] = decoded_logits(config, weights, token_ids, exact=exact)
        _free()
    ratios(truth, theirs, mine, f"8B shape, {layers} layers, bfloat16")


def _of_a_model_made_of(
    weights: dict[str, Tensor], folder: Path, dtype: torch.dtype, token_ids: Tensor
) -> Tensor:
    with torch.device(DEVICE):
        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=dtype, attn_implementation="eager"
        ).eval()
    model.load_state_dict(weights)
    logits = reference(model, token_ids)
    del model
    _free()
    return logits


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
