"""A quantised checkpoint that is malformed, cut off or mislabelled is refused in a line that names the
tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton.base.errors import BatonError, ErrorKind
from baton.engine.model.families.registry import load_config
from baton.engine.model.weight_formats import weight_formats
from baton.engine.model.weights import load_weights
from tests.engine.model.quantization.packing import AWQ, CHANNEL_FP8, GPTQ, PACKED_INT4, TENSOR_FP8, Format
from tests.support.checkpoints import make_checkpoint

MODULE = "model.layers.1.mlp.up_proj."
Edit = Callable[[dict[str, Tensor]], object]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Format], Path]:
    made: dict[str, Path] = {}
    source = make_checkpoint(tmp_path_factory.mktemp("source"))

    def find(form: Format) -> Path:
        if form.name not in made:
            made[form.name], _ = form.write(source, tmp_path_factory.mktemp("form"))
        return made[form.name]

    return find


def refusal(folder: Path) -> str:
    config = load_config(folder)
    with pytest.raises(BatonError) as caught:
        load_weights(config, folder, "cpu", torch.bfloat16, formats=weight_formats(config))
    assert caught.value.kind is ErrorKind.INVALID
    assert "\n" not in caught.value.message
    return caught.value.message


def replaced(suffix: str, change: Callable[[Tensor], Tensor]) -> Edit:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[MODULE + suffix] = change(tensors[MODULE + suffix]).contiguous()

    return edit


def mixed_zeros(zeros: Tensor) -> Tensor:
    zeros[0, 0] += 1
    return zeros


REFUSED: list[tuple[Format, str, Edit, str]] = [
    (CHANNEL_FP8, "weight", replaced("weight", lambda w: w.float()), "is stored as F32, expected F8_E4M3"),
    (CHANNEL_FP8, "weight", replaced("weight", lambda w: w[:-1]), "has shape [111, 64], expected [112, 64]"),
    (CHANNEL_FP8, "weight_scale", replaced("weight_scale", lambda s: s[:-1]), "has shape [111, 1]"),
    (CHANNEL_FP8, "weight_scale", replaced("weight_scale", lambda s: s / 0), "are not finite"),
    (CHANNEL_FP8, "weight_scale", lambda t: t.pop(MODULE + "weight_scale"), "no tensor"),
    (TENSOR_FP8, "weight_scale_inv", lambda t: t.update({MODULE + "weight_scale_inv": torch.ones(1)}),
     "is not part of the configured model"),
    (TENSOR_FP8, "weight", lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)}),
     "tensor lm_head.weight is stored as I8, expected"),
    (PACKED_INT4, "weight_packed", lambda t: t.pop(MODULE + "weight_packed"), "no tensor"),
    (PACKED_INT4, "weight_packed", replaced("weight_packed", lambda w: w.to(torch.int64)), "stored as I64"),
    (PACKED_INT4, "weight_g_idx", lambda t: t.update(
        {MODULE + "weight_g_idx": torch.arange(64, dtype=torch.int32).flip(0) // 16}), "out of order"),
    (GPTQ, "g_idx", replaced("g_idx", lambda g: g.flip(0)), "out of order (desc_act)"),
    (GPTQ, "qzeros", replaced("qzeros", mixed_zeros), "has zeros from 7 to 8"),
    (GPTQ, "scales", replaced("scales", lambda s: s[1:]), "has shape [3, 112], expected [4, 112]"),
    (AWQ, "qweight", replaced("qweight", lambda w: w.t()), "has shape [14, 64], expected [64, 14]"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "suffix", "edit", "why"), REFUSED)
def test_the_tensor_is_named(
    form: Format, suffix: str, edit: Edit, why: str, packed: Callable[[Format], Path], tmp_path: Path
) -> None:
    source = packed(form)
    tensors = load_file(source / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    message = refusal(tmp_path)
    assert why in message
    assert "lm_head" in why or f"tensor {MODULE}{suffix}" in message


def test_a_file_that_is_cut_off(packed: Callable[[Format], Path], tmp_path: Path) -> None:
    source = packed(PACKED_INT4)
    content = (source / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content)
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    os.truncate(tmp_path / "model.safetensors", len(content) - 1)
    assert "it is cut off" in refusal(tmp_path)


def test_a_checkpoint_at_full_width_that_is_declared_quantised(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = CHANNEL_FP8.config
    (folder / "config.json").write_text(json.dumps(config))
    assert "tensor model.layers.0." in (message := refusal(folder))
    assert "is stored as F32, expected F8_E4M3" in message


def test_quantising_a_quantised_checkpoint(packed: Callable[[Format], Path]) -> None:
    with pytest.raises(BatonError, match="for checkpoints that are not quantised"):
        weight_formats(load_config(packed(AWQ)), "fp8")
