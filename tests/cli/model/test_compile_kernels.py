"""`baton model compile` does the start of real workers, here on a CPU, where nothing is compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from baton.device.kernel_files.manifest import SHIPPED_VARIABLE, KernelManifest
from services.cli.main import main
from services.cli.model import compile_kernels
from tests.support.checkpoints import FAMILIES

HERE = KernelManifest("0.1.0", "2.11.0", "3.6.0", "9.0")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The path of a model's config.json without weights."""
    model = FAMILIES[0].make(tmp_path / "model")
    for file in model.iterdir():
        if file.name != "config.json":
            file.unlink()
    engine = {"device": "cpu", "dtype": "float64", "slots": 2, "kv_blocks": 17}
    workers = [{"model": str(model), "role": "decode", "engine": engine}]
    path = tmp_path / "kernels.yaml"
    path.write_text(json.dumps({"workers": workers}))
    return path


def test_workers_are_started_and_the_manifest_is_written(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compile_kernels, "kernels_here", lambda gpu: HERE)
    monkeypatch.setenv(SHIPPED_VARIABLE, str(tmp_path / "an image's"))
    out = tmp_path / "out"
    assert main(["model", "compile", "--config", str(config), "--out", str(out)]) == 0
    assert KernelManifest.read(out) == HERE
    (line,) = capsys.readouterr().out.splitlines()
    assert "decode: 0 files" in line


def test_without_a_gpu_or_with_a_wrong_file_nothing_is_started(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["model", "compile", "--config", str(config), "--out", str(tmp_path / "out")]
    if not torch.cuda.is_available():
        assert main(command) == 2
        assert "torch finds none" in capsys.readouterr().err
    config.write_text('{"workers": []}')
    assert main(command) == 2
    assert "workers" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
