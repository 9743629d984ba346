"""The checkpoint that every tool packs, and what a tool's program leaves beside what it packed."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

WORDS = 16
# What the tool's own code makes of its codes: the dtype, and a digest of each matrix.
DEQUANTIZED = "dequantized.json"


def write_base(folder: Path) -> None:
    """A Llama of one layer in bfloat16, random, with a tokenizer of a word a token (`w0` to `w15`)."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(23)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w0")
    tokenizer.save_pretrained(folder)


def calibration() -> list[Tensor]:
    """Token ids [16, 32] of prompts that tools may look at."""
    drawn = torch.randint(WORDS, (16, 32), generator=torch.Generator().manual_seed(5))
    return list(drawn)


def load_model(base: Path) -> Any:
    """The base checkpoint as `transformers` loads it, in bfloat16."""
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM
    return loader.from_pretrained(base, dtype=torch.bfloat16)


def linear_names(model: Any) -> list[str]:
    """Names of the linear modules in the layers."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith("model.layers.")
    ]


def keep(made: Path, target: Path, dequantized: Mapping[str, Tensor]) -> None:
    """Copies configuration and weights that a tool wrote to the folder `made`, with digests of what its own
    code makes of each quantised matrix [N, K], by its module's name."""
    target.mkdir(parents=True)
    for name in ("config.json", "hf_quant_config.json", "model.safetensors"):
        if (made / name).exists():
            shutil.copyfile(made / name, target / name)
    dtypes = {one.dtype for one in dequantized.values()}
    assert len(dtypes) == 1, dtypes
    found = {name: digest(one) for name, one in sorted(dequantized.items())}
    content = {"dtype": str(dtypes.pop()).removeprefix("torch."), "sha256": found}
    (target / DEQUANTIZED).write_text(json.dumps(content, indent=1) + "\n")


def digest(matrix: Tensor) -> str:
    """SHA-256 of a matrix's values as float32, without signs of zeros."""
    values = matrix.detach().to(torch.float32).contiguous() + 0.0
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()
