from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.engine.model_config import ModelConfig
from baton.engine.weights import load_weights, random_weights, weight_shapes, weights_digest
from baton.errors import BatonError, ErrorKind
from tests.engine.passes import Passes
from tests.support.checkpoints import FAMILIES, Case, make_checkpoint


@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_the_names_and_shapes_are_the_files(case: Case, tmp_path: Path) -> None:
    case.make(tmp_path)
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert weight_shapes(ModelConfig.load(tmp_path)) == stored


def test_shards_and_a_single_file_hold_the_same(tmp_path: Path) -> None:
    single = make_checkpoint(tmp_path / "single", seed=3)
    shards = make_checkpoint(tmp_path / "shards", seed=3, sharded=True)
    assert len(list(shards.glob("*.safetensors"))) > 1
    config = ModelConfig.load(single)
    one, many = (load_weights(config, folder, "cpu", torch.float64) for folder in (single, shards))
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert all(tensor.dtype is torch.float64 for tensor in one.values())


def refused(folder: Path) -> str:
    with pytest.raises(BatonError) as caught:
        load_weights(ModelConfig.load(folder), folder, "cpu", torch.float32)
    assert caught.value.kind is ErrorKind.INVALID
    assert "\n" not in caught.value.message
    return caught.value.message


def test_wrong_tensors_are_refused_by_name(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path) / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != name}, path)
    assert name in refused(tmp_path)
    save_file({**tensors, name: torch.zeros(3, 4)}, path)
    assert name in refused(tmp_path)
    assert "[3, 4]" in refused(tmp_path)
    save_file({**tensors, "model.layers.9.surprise": torch.zeros(1)}, path)
    assert "model.layers.9.surprise" in refused(tmp_path)
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}, path)
    assert load_weights(ModelConfig.load(tmp_path), tmp_path, "cpu", torch.float32).keys() == tensors.keys()


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "shards", sharded=True)
    shard = sorted(folder.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    assert shard.name in refused(folder)
    shard.unlink()
    assert shard.name in refused(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../elsewhere.safetensors"}}))
    assert "weight_map" in refused(folder)
    index.unlink()
    assert "model.safetensors" in refused(folder)


def test_a_tied_head_in_the_file_is_passed_over(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, tie_word_embeddings=True) / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    assert "lm_head.weight" not in load_weights(ModelConfig.load(tmp_path), tmp_path, "cpu", torch.float32)


def test_random_weights_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    config = ModelConfig.load(make_checkpoint(tmp_path, "qwen2"))
    first, again = (random_weights(config, 5, "cpu", torch.float32) for _ in range(2))
    other = random_weights(config, 6, "cpu", torch.float32)
    assert {name: tuple(t.shape) for name, t in first.items()} == weight_shapes(config)
    drawn = [name for name in first if not name.endswith("norm.weight")]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    name = "model.layers.0.mlp.down_proj.weight"
    assert abs(float(first[name].mean())) < 0.01
    assert float(first[name].std()) == pytest.approx(2 / 112**0.5, rel=0.02)
    # The full range of 64-bit seeds is allowed.
    assert random_weights(config, (1 << 64) - 1, "cpu", torch.bfloat16)[name].isfinite().all()


@pytest.mark.parametrize("case", [FAMILIES[0], FAMILIES[4], FAMILIES[8], FAMILIES[10]], ids=str)
def test_random_weights_write_text_that_varies(case: Case, tmp_path: Path) -> None:
    folder = case.make(tmp_path)
    config = ModelConfig.load(folder)
    save_file(random_weights(config, 0, "cpu", torch.float32), folder / "model.safetensors")
    output = Passes(folder, torch.float32).greedy(0, list(range(20)), 48)
    assert len(set(output)) > 12


def test_the_digest_tells_checkpoints_apart_and_shards_alike(tmp_path: Path) -> None:
    folders = [make_checkpoint(tmp_path / str(seed), seed=seed) for seed in (3, 4)]
    shards = make_checkpoint(tmp_path / "shards", seed=3, sharded=True)
    config = ModelConfig.load(shards)
    digests = [
        weights_digest(load_weights(config, folder, "cpu", torch.float32)) for folder in (*folders, shards)
    ]
    assert digests[0] != digests[1]
    assert digests[0] == digests[2]
