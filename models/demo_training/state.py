"""A training run's state in a folder: safetensors files of at most 15 MB, and the numbers beside them.

state-0.safetensors …   weights in float32 ("weight.…") and what the optimizer remembers
state.json              steps done, the plan, the loss curve; written last, so it names what is whole
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.demo_training.network import Llama
from models.demo_training.optimizer import Optimizer
from models.demo_training.vocabulary import BOS, END, PAD

FILE_BYTES = 15_000_000


@dataclass(slots=True)
class Progress:
    """Progress of a run. `settings` must be the same when it goes on; `seconds` include compilation."""

    settings: dict[str, Any]
    steps: int = 0
    seconds: float = 0.0
    devices: list[str] = field(default_factory=list)
    curve: list[dict[str, float]] = field(default_factory=list)


def save(folder: Path, network: Llama, optimizer: Optimizer, progress: Progress) -> None:
    """Writes all of it; what was there before is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.json").unlink(missing_ok=True)
    for old in folder.glob("state-*.safetensors"):
        old.unlink()
    tensors = {f"weight.{name}": tensor for name, tensor in network.state_dict().items()} | optimizer.state
    for number, shard in enumerate(_shards(tensors)):
        save_file(shard, folder / f"state-{number}.safetensors")
    (folder / "state.json").write_text(json.dumps(asdict(progress), indent=1) + "\n", "utf-8")


def restore(folder: Path, network: Llama, optimizer: Optimizer, settings: dict[str, Any]) -> Progress:
    """Reads what `save` wrote into network and optimizer; ValueError where it is of other settings."""
    progress = Progress(**json.loads((folder / "state.json").read_text("utf-8")))
    if progress.settings != json.loads(json.dumps(settings)):
        raise ValueError(f"the state in {folder} is of another recipe")
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("state-*.safetensors")):
        tensors |= load_file(file)
    network.load_state_dict({name: tensors[f"weight.{name}"] for name in network.state_dict()})
    optimizer.load(tensors, progress.steps)
    return progress


def export(folder: Path, network: Llama, special_ids: Mapping[str, int], progress: Progress) -> None:
    """Writes the checkpoint to ship, without its tokenizer: `model.safetensors` in bfloat16, its
    configuration, and the loss curve."""
    shape = network.shape
    ids = {
        "bos_token_id": special_ids[BOS],
        "eos_token_id": special_ids[END],
        "pad_token_id": special_ids[PAD],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        **ids,
    }
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to("cpu", torch.bfloat16) for name, tensor in network.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # it is made for its owner alone
    for name, content in (
        ("config.json", config),
        ("generation_config.json", {**ids, "do_sample": False}),
        ("training.json", asdict(progress)),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def _shards(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    room = FILE_BYTES - 65_536  # for the file's header
    for name, tensor in tensors.items():
        if tensor.nbytes > room:
            shards.append({})
            room = FILE_BYTES - 65_536
        shards[-1][name] = tensor.detach().to("cpu", copy=True)
        room -= tensor.nbytes
    return shards
