from __future__ import annotations

import os
from pathlib import Path

import pytest

from baton.device.kernel_cache import counted_kernels, keep_kernels_in, kernel_cache


def test_the_configured_folder_is_created_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "usual"))
    assert kernel_cache() == tmp_path / "usual"
    keep_kernels_in(tmp_path / "named" / "so")
    assert kernel_cache() == tmp_path / "named" / "so"
    assert kernel_cache().is_dir()


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.raises(OSError, match="file"):
        kernel_cache()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(OSError, match="not writable"):
        kernel_cache()


def test_needed_and_compiled_kernels_are_counted() -> None:
    import triton

    listener = triton.knobs.compilation.listener
    with counted_kernels() as kernels:
        hear = triton.knobs.compilation.listener
        for hit in (False, True, True):
            hear(src=None, metadata={}, metadata_group={}, times=None, cache_hit=hit)
    assert (kernels.needed, kernels.compiled) == (3, 1)
    assert triton.knobs.compilation.listener is listener
