"""The manifest of a folder's kernels: versions and settings that they were compiled with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.base.errors import BatonError, ErrorKind
from baton.device.kernel_files.environment import kernels_here
from baton.device.kernel_files.manifest import MANIFEST, KernelManifest
from deploy.release import images

MADE = KernelManifest("0.1.0", "2.11.0+cu130", "3.6.0", "9.0")


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert KernelManifest.read(tmp_path) is None
    MADE.write(tmp_path)
    assert KernelManifest.read(tmp_path) == MADE
    assert images.MANIFEST == MANIFEST


@pytest.mark.parametrize("text", ["{", "[]", '{"baton": "0.1.0"}', '{"other": 1}'])
def test_a_damaged_manifest_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(OSError, match="damaged"):
        KernelManifest.read(tmp_path)


def test_differences_are_named_in_one_line() -> None:
    assert MADE.differences(MADE) == ""
    other = replace(MADE, triton="3.7.1", capability="10.0")
    assert MADE.differences(other) == "triton 3.6.0 and 3.7.1, capability 9.0 and 10.0"


def test_this_process_says_what_it_compiles_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, index))
    found = kernels_here(3)
    assert (found.torch, found.capability) == (str(torch.__version__), "9.3")


def test_without_a_gpu_there_are_no_kernels() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(BatonError, match="torch finds none") as refused:
        kernels_here(0)
    assert refused.value.kind is ErrorKind.INVALID
