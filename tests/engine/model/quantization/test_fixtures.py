"""Matrices packed by the `compressed-tensors` package are unpacked to what that package makes of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from baton.engine.model.quantization.compressed_tensors import read_compressed_tensors
from baton.engine.model.quantization.scheme import stored_parts
from baton.engine.model.quantization.unpack import unpack
from baton.engine.model.safetensors_file import stored_tensors
from baton.model_files import ConfigFile
from tests.engine.model.quantization.pack_fixtures import COLUMNS, FIXTURES, ROWS, SCHEMES, matrix
from tests.engine.model.quantization.packing import compressed


@pytest.mark.parametrize("name", SCHEMES)
def test_what_the_package_packed(name: str) -> None:
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_package_still_packs_so(tmp_path: Path) -> None:
    """In an environment of its own, over a package index."""
    packages = ("compressed-tensors==0.20.0", "loguru", "psutil")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*pip, *packages], check=True, timeout=300)
    paths = os.pathsep.join((str(tmp_path), *sys.path))
    again = [sys.executable, "-m", "tests.engine.model.quantization.pack_fixtures", "--check"]
    subprocess.run(again, check=True, timeout=300, env={**os.environ, "PYTHONPATH": paths})
