"""Tensors that the formats' own tools packed are unpacked to the values that those tools give them.

All tools run on a CPU. Two of them quantise whole models on GPUs alone: `tools/pack_transformers.py` and
`tools/pack_fbgemm.py` say what of theirs is run here.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from baton.engine.kernels.quantized_weight import QuantizedWeight
from baton.engine.model.families.registry import load_config
from baton.engine.model.quantization.compressed_tensors import read_compressed_tensors
from baton.engine.model.quantization.scheme import stored_parts
from baton.engine.model.quantization.unpack import unpack
from baton.engine.model.safetensors_file import stored_tensors
from baton.engine.model.weight_formats import weight_formats
from baton.engine.model.weights import load_weights
from baton.model_spec.model_files import ConfigFile
from tests.engine.model.quantization.packing import compressed
from tests.engine.model.quantization.tools.base import DEQUANTIZED, digest, write_base
from tests.engine.model.quantization.tools.environments import environment_of
from tests.engine.model.quantization.tools.pack_compressed_tensors import (
    COLUMNS,
    FIXTURES,
    ROWS,
    SCHEMES,
    matrix,
)

REPOSITORY = Path(__file__).parents[4]
TOOLS = "tests.engine.model.quantization.tools"
# Checkpoint → its format as the engine names it.
CHECKPOINTS = {
    "awq": "int4-g16-zeros",
    "fbgemm": "fp8",
    "fp8-block": "fp8-16x32",
    "fp8-tensor": "fp8",
    "gptq": "int4-g16",
    "gptq-v2-zeros": "int4-g16-zeros",
    "gptq-zeros": "int4-g16-zeros",
    "modelopt": "fp8",
}
_PACK_S = 2400


def check(folder: Path, weight_format: str) -> None:
    """Loads a checkpoint. Every quantised matrix is what the tool's dequantiser made of it, in its dtype."""
    config = load_config(folder)
    formats = weight_formats(config)
    weights = load_weights(config, folder, "cpu", torch.bfloat16, formats=formats)
    expected = json.loads((folder / DEQUANTIZED).read_text())
    quantized = {
        name.removesuffix(".weight"): one for name, one in weights.items() if isinstance(one, QuantizedWeight)
    }
    assert {one.format.name for one in quantized.values()} == {weight_format}
    dtype = getattr(torch, expected["dtype"])
    found = {name: digest(one.dequantized(dtype)) for name, one in quantized.items()}
    assert found == expected["sha256"]
    assert len(found) == 7


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_what_a_tool_packed(name: str) -> None:
    check(FIXTURES.parent / name, CHECKPOINTS[name])


def test_fixtures_are_small() -> None:
    files = [path for path in FIXTURES.parent.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == {"fixtures", *CHECKPOINTS}
    assert sum(path.stat().st_size for path in files) <= 200_000


@pytest.mark.parametrize("name", SCHEMES)
def test_what_compressed_tensors_packed(name: str) -> None:
    form, weights = SCHEMES[name]
    scheme = read_compressed_tensors(ConfigFile(Path("config.json"), compressed(form, **weights)))
    stored = scheme.stored("model.layers.0.mlp.up_proj")
    assert stored is not None
    headers = {one.name: one for one in stored_tensors(FIXTURES) if one.name.startswith(f"{name}/")}
    expected = {f"{name}/{part.suffix}": part for part in stored_parts(stored, ROWS, COLUMNS)}
    assert headers.keys() - {f"{name}/matrix"} <= expected.keys()
    for key, part in expected.items():
        assert part.optional or key in headers
        assert key not in headers or (headers[key].kind in part.dtypes and headers[key].shape in part.shapes)
    tensors = load_file(FIXTURES)
    parts = {part.suffix: tensors[key] for key, part in expected.items() if part.read and key in tensors}
    found = unpack(stored, parts, ROWS, COLUMNS).dequantized(torch.float32)
    assert torch.equal(found, tensors[f"{name}/matrix"])
    assert 0 < float((found - matrix()).abs().max()) < 0.6


def run(tool: str, folder: Path, *arguments: str | Path) -> None:
    """Runs the tool's program in a folder, by the tool's own Python, which is installed first where it is
    missing."""
    environment = environment_of(tool)
    ran = subprocess.run(
        [environment.python, "-P", "-m", f"{TOOLS}.pack_{tool}", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=_PACK_S,
        check=False,
    )
    assert ran.returncode == 0, f"{tool}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    print(f"PROOF packed by {tool}: {environment.packages[0]}")


@pytest.mark.slow
@pytest.mark.timeout(4000)  # the first run installs it
@pytest.mark.parametrize("tool", ["awq", "fbgemm", "gptq", "modelopt", "transformers"])
def test_a_tool_packs_again(tool: str, tmp_path: Path) -> None:
    """The newly packed files are loaded too, and have the tensors and the configuration of the kept ones."""
    write_base(tmp_path / "base")
    run(tool, tmp_path, tmp_path / "base", tmp_path / "packed")
    for folder in sorted((tmp_path / "packed").iterdir()):
        check(folder, CHECKPOINTS[folder.name])
        kept = FIXTURES.parent / folder.name
        assert headers_of(folder) == headers_of(kept)
        assert load_config(folder).quantization == load_config(kept).quantization


def headers_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {one.name: (one.kind, one.shape) for one in stored_tensors(folder / "model.safetensors")}


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_compressed_tensors_packs_the_same_again(tmp_path: Path) -> None:
    run("compressed_tensors", tmp_path, "--check")
