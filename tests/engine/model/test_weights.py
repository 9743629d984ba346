from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.base.errors import BatonError, ErrorKind
from baton.engine.model.checkpoint import checkpoint_digest
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.families.registry import load_config
from baton.engine.model.modules import Model, Precision
from baton.engine.model.safetensors_file import stored_tensors
from baton.engine.model.tensors import tensor_specs
from baton.engine.model.weight_reader import read_tensors
from baton.engine.model.weights import joined, random_digest, weight_bytes
from tests.engine.dense_weights import load_weights, packed, random_weights, targets, weight_places
from tests.engine.passes import Passes
from tests.support.checkpoints import FAMILIES, MIXTURES, Case, make_checkpoint


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.shape for spec in tensor_specs(config)}


@pytest.mark.parametrize("case", [*FAMILIES, *MIXTURES], ids=str)
def test_the_names_and_shapes_are_the_files(case: Case, tmp_path: Path) -> None:
    case.make(tmp_path)
    stored = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert shapes_of(load_config(tmp_path)) == stored


def test_shards_and_a_single_file_hold_the_same(tmp_path: Path) -> None:
    single = make_checkpoint(tmp_path / "single", seed=3)
    shards = make_checkpoint(tmp_path / "shards", seed=3, sharded=True)
    assert len(list(shards.glob("*.safetensors"))) > 1
    config = load_config(single)
    one, many = (load_weights(config, folder, "cpu", torch.float64) for folder in (single, shards))
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert all(tensor.dtype is torch.float64 for tensor in one.values())


def refused(folder: Path) -> str:
    with pytest.raises(BatonError) as caught:
        load_weights(load_config(folder), folder, "cpu", torch.float32)
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
    assert load_weights(load_config(tmp_path), tmp_path, "cpu", torch.float32).keys() == tensors.keys()


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
    assert "lm_head.weight" not in load_weights(load_config(tmp_path), tmp_path, "cpu", torch.float32)


def test_random_weights_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    config = load_config(make_checkpoint(tmp_path, "qwen2"))
    first, again = (random_weights(config, 5, "cpu", torch.float32) for _ in range(2))
    other = random_weights(config, 6, "cpu", torch.float32)
    assert {name: tuple(t.shape) for name, t in first.items()} == shapes_of(config)
    drawn = [name for name in first if not name.endswith("norm.weight")]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    name = "model.layers.0.mlp.down_proj.weight"
    assert abs(float(first[name].mean())) < 0.01
    assert float(first[name].std()) == pytest.approx(2 / 112**0.5, rel=0.02)
    # The full range of 64-bit seeds is allowed.
    assert random_weights(config, (1 << 64) - 1, "cpu", torch.bfloat16)[name].isfinite().all()


@pytest.mark.parametrize("case", [*(FAMILIES[i] for i in (0, 4, 8, 10)), MIXTURES[2], MIXTURES[4]], ids=str)
def test_random_weights_write_text_that_varies(case: Case, tmp_path: Path) -> None:
    folder = case.make(tmp_path)
    config = load_config(folder)
    save_file(random_weights(config, 0, "cpu", torch.float32), folder / "model.safetensors")
    output = Passes(folder, torch.float32).greedy(0, list(range(20)), 48)
    assert len(set(output)) > 12


def test_the_digest_differs_by_checkpoint_and_not_by_sharding(tmp_path: Path) -> None:
    folders = [make_checkpoint(tmp_path / str(seed), seed=seed) for seed in (3, 4)]
    shards = make_checkpoint(tmp_path / "shards", seed=3, sharded=True)
    config = load_config(shards)
    digests = [checkpoint_digest(config, folder) for folder in (*folders, shards)]
    assert digests[0] != digests[1]
    assert digests[0] == digests[2]
    assert len({*digests, random_digest(config, 3), random_digest(config, 4)}) == 4


def test_the_digest_is_of_what_is_stored_small_tensors_whole(tmp_path: Path) -> None:
    stored = make_checkpoint(tmp_path / "stored", seed=3)
    other = make_checkpoint(tmp_path / "other", seed=3)
    config = load_config(stored)
    tensors = load_file(other / "model.safetensors")
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        changed[name].view(-1)[-1] += 1
        save_file(changed, other / "model.safetensors")
        assert checkpoint_digest(config, stored) != checkpoint_digest(config, other)
    save_file({key: tensor.half() for key, tensor in tensors.items()}, other / "model.safetensors")
    assert checkpoint_digest(config, stored) != checkpoint_digest(config, other)


def test_parts_of_one_product_lie_behind_one_another(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "qwen2")  # it has biases
    config = load_config(folder)
    loaded = load_weights(config, folder, "cpu", torch.float32)
    model = Model(config, loaded, config.layout(16, "float32"), "cpu", Precision.of(torch.float32))
    assert not dict(load_file(folder / "model.safetensors").items()).keys() - loaded.keys()
    of_qkv = [f"self_attn.{name}_proj" for name in "qkv"]
    of_gate_up = ["mlp.gate_proj", "mlp.up_proj"]
    for number, layer in enumerate(model.layers):
        prefix = f"model.layers.{number}."
        qkv, _, gate_up, down = (product.linear for product in layer.products())
        for linear, names in ((qkv, of_qkv), (gate_up, of_gate_up)):
            parts = [loaded[f"{prefix}{name}.weight"] for name in names]
            assert isinstance(linear.weight, Tensor)
            assert linear.weight.data_ptr() == parts[0].data_ptr()  # no copy
            assert torch.equal(linear.weight, torch.cat(parts))
        assert qkv.bias is not None
        assert isinstance(down.weight, Tensor)
        assert qkv.bias.data_ptr() == loaded[f"{prefix}{of_qkv[0]}.bias"].data_ptr()
        assert down.weight.data_ptr() == loaded[f"{prefix}mlp.down_proj.weight"].data_ptr()


def test_what_does_not_lie_so_is_copied() -> None:
    whole = torch.arange(24.0).view(6, 4)
    apart = [whole[:2], whole[3:]]
    assert torch.equal(joined(apart), torch.cat(apart))
    swapped = [whole[3:], whole[:3]]
    assert torch.equal(joined(swapped), torch.cat(swapped))
    assert joined([whole[:2], whole[2:5]]).data_ptr() == whole.data_ptr()
    assert torch.equal(joined([whole[:2], whole[2:5]]), whole[:5])


def test_rows_are_put_in_the_order_of_rotation_whether_stored_fused_or_apart(tmp_path: Path) -> None:
    """Dimensions 0 to 6 of a head of 16 are rotated with 6 to 12: in the model they stand 8 apart."""
    partial = next(case for case in FAMILIES if case.name == "phi3-partial")
    folder = partial.make(tmp_path)
    fused = load_config(folder)
    apart = dataclasses.replace(fused, fused_projections=False, qkv_bias=True, qk_norm=True)
    tensors = load_file(folder / "model.safetensors")
    expected = packed(fused, load_weights(fused, folder, "cpu", torch.float32))
    for number in range(fused.num_layers):
        prefix = f"model.layers.{number}."
        qkv = tensors.pop(f"{prefix}self_attn.qkv_proj.weight").split([64, 32, 32])
        for name, part in zip("qkv", qkv, strict=True):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = part.contiguous()
            tensors[f"{prefix}self_attn.{name}_proj.bias"] = part[:, 0].contiguous()
        gate_up = tensors.pop(f"{prefix}mlp.gate_up_proj.weight").chunk(2)
        for name, part in zip(("gate", "up"), gate_up, strict=True):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = part.contiguous()
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}self_attn.{name}.weight"] = torch.arange(16.0)
    save_file(tensors, folder / "model.safetensors")
    found = packed(apart, load_weights(apart, folder, "cpu", torch.float32))
    order = [*range(6), 12, 13, *range(6, 12), 14, 15]
    for number in range(fused.num_layers):
        attention = f"model.layers.{number}.self_attn."
        for name in ("q_norm", "k_norm"):
            assert found[f"{attention}{name}.weight"].tolist() == order
        assert torch.equal(found[f"{attention}qkv_proj.bias"], expected[f"{attention}qkv_proj.weight"][:, 0])
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("piece_bytes", [56, 1000, 1 << 20])
def test_any_size_of_pieces_reads_the_same(piece_bytes: int, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, sharded=True)
    config = load_config(folder)
    tensors = [t for path in sorted(folder.glob("*.safetensors")) for t in stored_tensors(path)]
    places = weight_places(config, "cpu", torch.float64)
    reported: list[tuple[int, int]] = []
    read_tensors(
        tensors, targets(places), torch.device("cpu"), lambda *counts: reported.append(counts), piece_bytes
    )
    whole = load_weights(config, folder, "cpu", torch.float64)
    assert all(torch.equal(places[name], whole[name]) for name in whole)
    total = sum(tensor.nbytes for tensor in tensors)
    assert reported == sorted(reported)
    assert reported[-1] == (total, total)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path) / "model.safetensors"
    tensors = stored_tensors(path)
    places = weight_places(load_config(tmp_path), "cpu", torch.float32)
    os.truncate(path, tensors[-1].offset + 1)
    with pytest.raises(BatonError, match=f"{path.name}: tensor {tensors[-1].name} is cut off"):
        read_tensors(tensors, targets(places), torch.device("cpu"), lambda done, total: None)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weights")]


def edit_header(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])


def test_broken_headers_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path) / "model.safetensors"
    content, name = path.read_bytes(), "model.layers.0.mlp.up_proj.weight"
    path.write_bytes(content[:100])
    assert f"{path.name}: no safetensors file" in refused(tmp_path)
    path.write_bytes(b"")
    assert f"{path.name}: no safetensors file" in refused(tmp_path)
    path.write_bytes((4).to_bytes(8, "little") + b"{nay")
    assert f"{path.name}: its header is not JSON" in refused(tmp_path)
    path.write_bytes(content)
    edit_header(path, lambda header: header[name].update(dtype="U16"))
    assert f"{path.name}: tensor {name} is stored as U16" in refused(tmp_path)
    path.write_bytes(content)
    edit_header(path, lambda header: header[name].update(dtype="I32"))
    assert f"{path.name}: tensor {name} is stored as I32, expected F64 or F32" in refused(tmp_path)
    path.write_bytes(content)
    edit_header(path, lambda header: header[name]["data_offsets"].reverse())
    assert f"{path.name}: tensor {name} has " in refused(tmp_path)
    path.write_bytes(content)
    edit_header(path, lambda header: header[name].pop("shape"))
    assert f"{path.name}: tensor {name} has no" in refused(tmp_path)
    path.write_bytes(content[:-1])
    assert f"tensor {stored_tensors_end(content)} ends at byte" in refused(tmp_path)


def stored_tensors_end(content: bytes) -> str:
    """The tensor whose bytes are the file's last."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    header.pop("__metadata__", None)
    return str(max(header, key=lambda name: header[name]["data_offsets"][1]))


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, sharded=True)
    one, other = sorted(folder.glob("*.safetensors"))[:2]
    tensors = load_file(one)
    name = next(iter(tensors))
    save_file({**load_file(other), name: tensors[name]}, other)
    assert f"{other.name}: tensor {name} is in {one.name} as well" in refused(folder)


def test_the_host_holds_but_the_buffers(tmp_path: Path) -> None:
    rows, width, piece = 16 * 1024, 4096, 1 << 20
    header = json.dumps(
        {"x": {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, rows * width * 4]}}
    )
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    os.truncate(path, path.stat().st_size + rows * width * 4)  # zeros that take no place on the disk
    places = {"x": torch.empty(rows, width, dtype=torch.bfloat16, device="meta")}
    Path("/proc/self/clear_refs").write_text("5")  # the peak from now on
    before = peak_bytes()
    read_tensors(stored_tensors(path), targets(places), torch.device("meta"), lambda done, total: None, piece)
    assert peak_bytes() - before < 64 * piece < rows * width * 4 // 3


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def test_random_weights_report_progress(tmp_path: Path) -> None:
    reported: list[tuple[int, int]] = []
    config = load_config(make_checkpoint(tmp_path))
    weights = random_weights(config, 5, "cpu", torch.bfloat16, lambda *counts: reported.append(counts))
    total = sum(weight.nbytes for weight in weights.values())
    assert total == weight_bytes(config, torch.bfloat16)
    assert reported[-1] == (total, total)
    assert reported == sorted(set(reported))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_same_arrives(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, sharded=True)
    config = load_config(folder)
    there, here = (load_weights(config, folder, device, dtype) for device in ("cuda", "cpu"))
    assert all(torch.equal(there[name].cpu(), here[name]) for name in here)
