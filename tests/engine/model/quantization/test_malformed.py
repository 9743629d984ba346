"""Checkpoints of every format's own tool, damaged: refused in one line that names the tensor."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.base.errors import BatonError, ErrorKind
from baton.engine.model.checkpoint import read_headers
from baton.engine.model.families.registry import load_config
from baton.engine.model.weight_formats import weight_formats
from baton.engine.model.weights import load_weights
from tests.engine.model.quantization.test_fixtures import CHECKPOINTS
from tests.engine.model.quantization.tools.pack_compressed_tensors import FIXTURES

MODULES = ("model.layers.0.self_attn.k_proj", "model.layers.0.mlp.down_proj")
# A checkpoint is whole without them.
OPTIONAL = ("input_scale", "g_idx")
SCALES = ("scales", "weight_scale", "weight_scale_inv")
EDITS: dict[str, tuple[Callable[[Tensor], Tensor | None], str]] = {
    "another dtype": (lambda tensor: tensor.to(torch.uint8), "is stored as U8, expected"),
    "too long": (lambda tensor: torch.cat([tensor.view(-1)] * 3), "has shape"),
    "another rank": (lambda tensor: tensor.view(1, 1, 1, -1), "has shape"),
    "missing": (lambda _: None, "no tensor"),
}


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    copy = tmp_path / "checkpoint"
    shutil.copytree(FIXTURES.parent / request.param, copy)
    return copy


each = pytest.mark.parametrize("folder", CHECKPOINTS, indirect=True)


def headers_refused(folder: Path) -> str | None:
    """The reason for which the headers are refused; None where they are not."""
    found = None
    try:
        read_headers(load_config(folder), folder)
    except BatonError as error:
        found = error
    if found is None:
        return None
    assert found.kind is ErrorKind.INVALID
    assert found.message.isprintable()
    return found.message


@each
def test_every_tensor_of_a_matrix(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = load_file(file)
    names = [name for name in whole if name.rpartition(".")[0] in MODULES]
    assert len(names) >= 4
    for name in names:
        for change, (edit, why) in EDITS.items():
            edited = edit(whole[name])
            rest = {other: tensor for other, tensor in whole.items() if other != name}
            save_file(rest if edited is None else {**rest, name: edited.clone()}, file)
            refused = headers_refused(folder)
            if change == "missing" and name.endswith(OPTIONAL):
                assert refused is None
            else:
                # Of a matrix with one name for scales or another, the first is what is missing.
                named = name.replace("weight_scale_inv", "weight_scale") if change == "missing" else name
                assert refused is not None, (name, change)
                assert why in refused
                assert named in refused


@each
def test_scales_that_are_not_finite(folder: Path) -> None:
    file, config = folder / "model.safetensors", load_config(folder)
    whole = load_file(file)
    (name,) = [name for name in whole if name.removeprefix(f"{MODULES[1]}.") in SCALES]
    save_file({**whole, name: whole[name] / 0}, file)
    with pytest.raises(BatonError, match=f"tensor {name} has scales that are not finite"):
        load_weights(config, folder, "cpu", torch.bfloat16, formats=weight_formats(config))


@each
def test_a_file_cut_anywhere(folder: Path) -> None:
    """Behind the header the tensor is named."""
    file = folder / "model.safetensors"
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for end in (0, 7, 8, start - 1, start, start + 100, (start + len(content)) // 2, len(content) - 1):
        file.write_bytes(content[:end])
        refused = headers_refused(folder)
        assert refused is not None
        assert end < start or ("tensor " in refused and "it is cut off" in refused)


@each
def test_a_header_with_any_byte_changed(folder: Path, request: pytest.FixtureRequest) -> None:
    """The header is read, or refused in one line; nothing else is raised."""
    file = folder / "model.safetensors"
    content, draw = file.read_bytes(), random.Random(request.node.name)
    length = int.from_bytes(content[:8], "little")
    refused = 0
    for _ in range(60):
        changed = bytearray(content)
        for _ in range(draw.choice((1, 1, 3))):
            changed[draw.randrange(8 + length)] = draw.choice(b'"{}[]:,019-eE\\nu\n\x00\xff')
        file.write_bytes(changed)
        refused += headers_refused(folder) is not None
    assert refused > 30


@each
def test_labels_of_another_format(folder: Path) -> None:
    """The configuration of each other checkpoint over these tensors."""
    mine = json.loads((folder / "config.json").read_text())["quantization_config"]
    for other in CHECKPOINTS:
        config = json.loads((FIXTURES.parent / other / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config))
        if _stored(config["quantization_config"]) != _stored(mine):
            refused = headers_refused(folder)
            assert refused is not None, other
            assert "tensor model.layers.0." in refused


def _stored(config: dict[str, object]) -> object:
    """The part of a tool's configuration that is about tensors: methods with the same ones are taken for each
    other."""
    method = config["quant_method"]
    if method == "gptq":
        return method
    by_block = config.get("weight_block_size") is not None
    return method if method == "awq" else ("blocks" if by_block else "rows or tensor")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "I8", "shape": [1 << 63], "data_offsets": [0, 1]},
        {"dtype": "I8", "shape": [10**4000, 10**4000], "data_offsets": [0, 1]},
        {"dtype": "I8", "shape": [1] * 9, "data_offsets": [0, 1]},
        {"dtype": "line\nfeed", "shape": [1], "data_offsets": [0, 1]},
        {"dtype": "I8", "shape": [2], "data_offsets": [0, 1]},
    ],
)
def test_what_a_line_cannot_hold(entry: object, tmp_path: Path) -> None:
    shutil.copyfile(FIXTURES.parent / "awq" / "config.json", tmp_path / "config.json")
    header = json.dumps({"a\nb": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"0")
    refused = headers_refused(tmp_path)
    assert refused is not None
    assert 'tensor "a\\nb"' in refused
