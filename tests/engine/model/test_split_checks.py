"""Models that cannot be divided among devices are refused at the start, in one line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from structlog.testing import capture_logs

from baton.base.errors import BatonError, ErrorKind
from baton.device.kernel_loading import LoadedKernels
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.families.registry import load_config
from baton.engine.model.split_checks import check_split
from baton.engine.model.weight_formats import weight_formats
from services.common.config.worker import EngineConfig
from services.worker.engine.startup import kernel_tuning, model_loader
from tests.engine.model.quantization.packing import FORMATS, GPTQ
from tests.support.checkpoints import FAMILIES, MIXTURES, make_checkpoint

# As a Llama 8B in small.
SHAPE: dict[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 256,
    "intermediate_size": 224,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return load_config(make_checkpoint(tmp_path_factory.mktemp("model"), **SHAPE))


def refused(config: ModelConfig, count: int) -> str:
    with pytest.raises(BatonError) as caught:
        check_split(config, weight_formats(config), count)
    assert caught.value.kind is ErrorKind.INVALID
    assert "\n" not in caught.value.message
    return caught.value.message


def test_any_divisor_of_heads_and_width_works(config: ModelConfig) -> None:
    for count in (1, 2, 4, 8):
        check_split(config, weight_formats(config), count)
        check_split(config, weight_formats(config, "fp8", quantize_head=True), count)


def test_sizes_that_do_not_divide_are_named_with_those_that_do(config: ModelConfig) -> None:
    text = "8 KV heads do not divide among {0} devices; 1, 2, 4 or 8 would work"
    for count in (3, 16):
        assert refused(config, count) == f"tensor_parallel {count}: {text.format(count)}"
    one = dataclasses.replace(config, num_kv_heads=1)
    assert refused(one, 2) == "tensor_parallel 2: 1 KV head does not divide among 2 devices; 1 would work"
    odd = dataclasses.replace(config, intermediate_size=222)
    assert "222 columns of the MLP (intermediate_size) do not divide among 4 devices; 1 or 2" in refused(
        odd, 4
    )


def test_matrices_in_fewer_bits_are_named(tmp_path: Path) -> None:
    sizes = {"hidden_size": 192, "intermediate_size": 192, "num_key_value_heads": 4}
    source = FAMILIES[0].make(tmp_path / "source", **sizes)
    blocks = next(one for one in FORMATS if one.name == "fp8 by block")
    folder, _ = blocks.write(source, tmp_path / "blocks")
    assert refused(load_config(folder), 4) == (
        "tensor_parallel 4: model.layers.0.self_attn.q_proj.weight would be cut within blocks of 32 rows "
        "(fp8-32x48); 1 or 2 would work"
    )
    columns = dataclasses.replace(load_config(folder), intermediate_size=128)
    text = "model.layers.0.mlp.down_proj.weight would be cut within blocks of 48 columns"
    assert text in refused(columns, 2)
    folder, _ = GPTQ.write(source, tmp_path / "int4")
    text = "model.layers.0.self_attn.q_proj.weight is in int4-g16, which cannot be divided among devices yet"
    assert text in refused(load_config(folder), 2)


def test_experts_are_refused(tmp_path: Path) -> None:
    config = load_config(MIXTURES[3].make(tmp_path))
    assert "8 experts cannot be divided among devices yet; 1 would work" in refused(config, 2)


def gpus_found(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Has torch find `count` GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ({"dtype": "float16"}, "GPUs exchange bfloat16 and float32, not float16; dtype bfloat16 would work"),
        ({"device_indexes": (1,)}, "device_indexes are [1], which are not 2 GPUs"),
        ({"device_indexes": (1, 1)}, "device_indexes are [1, 1], which are not 2 GPUs"),
        ({"tensor_parallel": 4}, "GPUs that torch finds: 2, enough for tensor_parallel 2"),
    ],
    ids=str,
)
def test_what_several_gpus_cannot_compute_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], text: str
) -> None:
    gpus_found(monkeypatch, 2)
    folder = FAMILIES[0].make(tmp_path)
    given = {"tensor_parallel": 2, **engine}
    with pytest.raises(BatonError) as caught:
        model_loader.load(str(folder), EngineConfig(**given))
    assert str(caught.value) == f"tensor_parallel {given['tensor_parallel']}: {text}"
    assert caught.value.kind is ErrorKind.INVALID


def test_kernels_are_loaded_onto_each_gpu_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TuningError(Exception):
        """The next that happens on a GPU."""

    def tune(*arguments: object) -> None:
        raise TuningError

    gpus_found(monkeypatch, 4)
    monkeypatch.setattr(kernel_tuning, "tune_products", tune)
    found = {3: LoadedKernels(2.345, 4 * 10**9), 1: LoadedKernels(1.0, 0)}
    monkeypatch.setattr(model_loader, "load_kernels", found.__getitem__)
    engine = EngineConfig(tensor_parallel=2, device_indexes=(3, 1))
    with capture_logs() as logs, pytest.raises(TuningError):
        model_loader.load(str(FAMILIES[0].make(tmp_path)), engine)
    lines = [line for line in logs if line["event"] == "kernels_loaded"]
    assert [(line["gpu"], line["seconds"], line["gb"]) for line in lines] == [(3, 2.35, 4.0), (1, 1.0, 4.0)]
    shared = engine.model_copy(update={"gpu_workers": 2})
    with capture_logs() as logs, pytest.raises(TuningError):
        model_loader.load(str(FAMILIES[0].make(tmp_path / "shared")), shared)
    assert [line.get("gb") for line in logs if line["event"] == "kernels_loaded"] == [None, None]
    with capture_logs() as logs, pytest.raises(TuningError):
        model_loader.load(str(FAMILIES[0].make(tmp_path / "one")), EngineConfig())
    assert logs == []


def test_devices_are_those_that_are_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus_found(monkeypatch, 4)
    for indexes, found in (((3, 1), [3, 1]), ((), [0, 1])):
        devices = model_loader.devices_of(EngineConfig(tensor_parallel=2, device_indexes=indexes))
        assert devices == [torch.device("cuda", index) for index in found]
    assert model_loader.devices_of(EngineConfig(tensor_parallel=2, device="cpu")) == [torch.device("cpu")] * 2


@pytest.mark.parametrize("other", [{"quantization": "int8"}, {"quantization": "int4"}], ids=str)
def test_settings_that_do_not_go_together_are_named(other: dict[str, str]) -> None:
    (name,) = other
    with pytest.raises(ValidationError, match=f"tensor_parallel 2 needs {name}"):
        EngineConfig.model_validate({"tensor_parallel": 2, **other})
    EngineConfig.model_validate({"tensor_parallel": 2, "quantization": "fp8"})
