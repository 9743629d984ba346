"""Kernels of an image: copied into the configured cache, with a warning where they are of something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from baton.device.kernel_files.manifest import MANIFEST, SHIPPED_VARIABLE, KernelManifest
from services.common.config.worker import EngineConfig
from services.worker.engine.startup import shipped_kernels
from services.worker.engine.startup.shipped_kernels import use_kernel_cache

SHOWN = ("event", "files", "folder", "compiled_with_and_here", "reason")
HERE = KernelManifest("0.1.0", "2.11.0+cu130", "3.6.0", "9.0")


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an image with a kernel, on a machine with a GPU."""
    folder = tmp_path / "image"
    (folder / "ABC").mkdir(parents=True)
    (folder / "ABC" / "step.cubin").write_bytes(b"code")
    monkeypatch.setenv(SHIPPED_VARIABLE, str(folder))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(shipped_kernels, "device_of", lambda engine: torch.device("cuda", 0))
    monkeypatch.setattr(shipped_kernels, "kernels_here", lambda index: HERE)
    return folder


def _events(engine: EngineConfig) -> list[str]:
    with capture_logs() as logs:
        use_kernel_cache(engine)
    return [" ".join(str(line[key]) for key in sorted(line) if key in SHOWN) for line in logs]


def test_the_images_kernels_are_copied(image: Path, tmp_path: Path) -> None:
    engine = EngineConfig(kernel_cache=str(tmp_path / "cache"))
    HERE.write(image)
    assert _events(engine) == ["kernels_copied 1"]
    assert (tmp_path / "cache" / "ABC" / "step.cubin").read_bytes() == b"code"
    assert _events(EngineConfig()) == []


def test_kernels_of_something_else_are_one_warning(image: Path, tmp_path: Path) -> None:
    engine = EngineConfig(kernel_cache=str(tmp_path / "cache"))
    replace(HERE, torch="2.13.0").write(image)
    _, warning = _events(engine)
    assert warning == f"torch 2.13.0 and 2.11.0+cu130 kernels_differ {image}"


def test_a_folder_that_cannot_be_read_is_a_warning(image: Path, tmp_path: Path) -> None:
    (image / MANIFEST).write_text("{")
    events = _events(EngineConfig(kernel_cache=str(tmp_path / "cache")))
    assert events[-1].startswith("kernels_not_copied")
    assert "damaged" in events[-1]
