"""A model's tensors: loaded from safetensors, or drawn from a seed. Both give what `Decoder` takes.

Names are those of the published checkpoints (`model.layers.0.self_attn.q_proj.weight`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from baton.engine.config_file import ConfigFile
from baton.engine.model_config import ModelConfig
from baton.engine.philox import philox, seed_key
from baton.errors import BatonError, ErrorKind

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Old checkpoints hold rope tables as tensors; they follow from the configuration.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
_PURPOSE_WEIGHTS = 1
_RANDOM_CHUNK = 1 << 22
_DIGEST_SAMPLE = 256  # elements of each tensor, about


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor the model has."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}

    def add_linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    for number in range(config.num_layers):
        layer = f"model.layers.{number}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{norm}.weight"] = (hidden,)
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            add_linear(f"{layer}.self_attn.{name}", rows, hidden, config.qkv_bias)
        add_linear(f"{layer}.self_attn.o_proj", hidden, queries, config.output_bias)
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                shapes[f"{layer}.self_attn.{name}.weight"] = (config.head_dim,)
        for name in ("gate_proj", "up_proj"):
            add_linear(f"{layer}.mlp.{name}", inner, hidden, config.mlp_bias)
        add_linear(f"{layer}.mlp.down_proj", hidden, inner, config.mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def load_weights(
    config: ModelConfig, folder: str | Path, device: torch.device | str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Reads the folder's safetensors, one file or several with an index, and casts them.

    Raises BatonError(INVALID) for a file that is missing or broken and for a tensor that is missing,
    of another shape, or unknown.
    """
    shapes = weight_shapes(config)
    weights: dict[str, Tensor] = {}
    for path in _files(Path(folder)):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    if name.endswith(_IGNORED_SUFFIXES) or (config.tied_head and name == "lm_head.weight"):
                        continue
                    _check(path, name, tuple(file.get_slice(name).get_shape()), shapes)
                    # A copy in any case: a tensor within a mapped file may lie at any address, and where
                    # it lies can choose the path of a product.
                    weights[name] = file.get_tensor(name).to(device=device, dtype=dtype, copy=True)
        except (SafetensorError, OSError) as error:
            raise BatonError(ErrorKind.INVALID, f"{path}: {error}") from None
    missing = sorted(shapes.keys() - weights.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BatonError(ErrorKind.INVALID, f"{folder}: no tensor {missing[0]}{more} in the safetensors")
    return weights


def random_weights(
    config: ModelConfig, seed: int, device: torch.device | str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Weights as a function of configuration, seed and tensor name alone: the same on every device.

    Norms are 1, biases small; matrices are uniform with a gain at which greedy text varies rather than loops.
    """
    weights: dict[str, Tensor] = {}
    for name, shape in weight_shapes(config).items():
        if name.endswith("norm.weight"):
            weights[name] = torch.ones(shape, device=device, dtype=dtype)
            continue
        bound = math.sqrt(3) * _spread(name, shape)
        weights[name] = _uniform(name, shape, seed, bound, device, dtype)
    return weights


def weights_digest(weights: Mapping[str, Tensor]) -> bytes:
    """SHA-256 over names and a sample of every tensor: tells two checkpoints of one shape apart.

    A sample, since reading all of a large model again would cost its start-up seconds.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        flat = weights[name].reshape(-1)
        sample = flat[:: max(1, flat.numel() // _DIGEST_SAMPLE)]
        digest.update(name.encode() + b"\0" + sample.double().cpu().numpy().tobytes())
    return digest.digest()


def _spread(name: str, shape: tuple[int, ...]) -> float:
    """The standard deviation of a random tensor."""
    return 0.1 if name.endswith(".bias") else 2.0 / math.sqrt(shape[1])


def _files(folder: Path) -> list[Path]:
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    if not (folder / INDEX_FILE).is_file():
        raise BatonError(ErrorKind.INVALID, f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}")
    index = ConfigFile.read(folder / INDEX_FILE)
    shards = index.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise index.error("weight_map", "expected an object of tensor names and files")
    names = sorted({str(name) for name in shards.values()})
    for name in names:
        if Path(name).name != name:
            raise index.error("weight_map", f"{json.dumps(name)} is not a file of this folder")
        if not (folder / name).is_file():
            raise BatonError(ErrorKind.INVALID, f"{folder / name}: no such file (named in {INDEX_FILE})")
    return [folder / name for name in names]


def _check(path: Path, name: str, shape: tuple[int, ...], shapes: dict[str, tuple[int, ...]]) -> None:
    if name not in shapes:
        raise BatonError(ErrorKind.INVALID, f"{path}: tensor {name} is not part of the configured model")
    if shape != shapes[name]:
        raise BatonError(
            ErrorKind.INVALID, f"{path}: tensor {name} has shape {list(shape)}, expected {list(shapes[name])}"
        )


def _uniform(
    name: str, shape: tuple[int, ...], seed: int, bound: float, device: torch.device | str, dtype: torch.dtype
) -> Tensor:
    """Uniform in (-bound, bound): no transcendental function, so every device gives the same bits."""
    size = math.prod(shape)
    out = torch.empty(size, device=device, dtype=dtype)
    tag = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    wrapped = seed % (1 << 64)
    key = seed_key(torch.tensor(wrapped - (1 << 64) if wrapped >> 63 else wrapped, device=device))
    zero = torch.zeros((), dtype=torch.int64, device=device)
    for start in range(0, size, _RANDOM_CHUNK):
        end = min(start + _RANDOM_CHUNK, size)
        quads = torch.arange(start // 4, -(-end // 4), device=device)
        words = philox((quads & 0xFFFFFFFF, quads >> 32, zero + _PURPOSE_WEIGHTS, zero + tag), key)
        units = (torch.stack(words, dim=-1).view(-1)[: end - start].double() + 0.5) * 2.0**-31 - 1
        out[start:end] = (units * bound).to(dtype)
    return out.view(shape)
