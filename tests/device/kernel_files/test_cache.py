from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from baton.device.kernel_files.cache import (
    cached_code,
    copy_shipped_kernels,
    counted_kernels,
    keep_kernels_in,
    kernel_cache,
)
from baton.device.kernel_files.manifest import MANIFEST


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
        listen = triton.knobs.compilation.listener
        for hit in (False, True, True):
            listen(src=None, metadata={}, metadata_group={}, times=None, cache_hit=hit)
    assert (kernels.needed, kernels.compiled) == (3, 1)
    assert triton.knobs.compilation.listener is listener


def test_shipped_kernels_are_copied_where_they_are_missing(tmp_path: Path) -> None:
    """Triton's lists of files have absolute paths, which become those of the copies."""
    shipped, cache = tmp_path / "image", tmp_path / "cache"
    for name in ("ABC", "DEF"):
        (shipped / name).mkdir(parents=True)
        (shipped / name / "step.cubin").write_bytes(b"shipped")
        paths = {"step.cubin": f"/where/it/was/built/{name}/step.cubin"}
        (shipped / name / "__grp__step.json").write_text(json.dumps({"child_paths": paths}))
    (shipped / MANIFEST).write_text("{}")  # of the image's folder, not of this cache
    (cache / "DEF").mkdir(parents=True)
    (cache / "DEF" / "step.cubin").write_bytes(b"compiled here")
    assert copy_shipped_kernels(shipped, cache) == 3
    assert (cache / "ABC" / "step.cubin").read_bytes() == b"shipped"
    assert (cache / "DEF" / "step.cubin").read_bytes() == b"compiled here"
    listed = json.loads((cache / "ABC" / "__grp__step.json").read_text())
    assert listed == {"child_paths": {"step.cubin": str(cache / "ABC" / "step.cubin")}}
    assert copy_shipped_kernels(shipped, cache) == 0
    assert not list(cache.rglob("tmp*"))
    assert not (cache / MANIFEST).exists()


def test_a_damaged_list_of_shipped_kernels_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "__grp__x.json").write_text("[]")
    with pytest.raises(OSError, match="damaged list"):
        copy_shipped_kernels(tmp_path / "image", tmp_path / "cache")


def test_code_of_another_compiler_is_kept_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = []

    def compile_code() -> bytes:
        compiled.append(True)
        return b"machine code"

    with counted_kernels() as kernels:
        for key in (b"one", b"one", b"another"):
            assert cached_code("baton-cuda", key, compile_code) == b"machine code"
    assert len(compiled) == 2
    assert (kernels.needed, kernels.compiled) == (3, 2)
    assert len(list((tmp_path / "baton-cuda").iterdir())) == 2


def test_a_failed_compilation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compile_code() -> bytes:
        raise ValueError("no code")

    with pytest.raises(ValueError, match="no code"):
        cached_code("baton-cuda", b"key", compile_code)
    assert list(tmp_path.rglob("*")) == []
