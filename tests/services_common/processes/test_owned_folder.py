"""Temporary folders of processes that were killed are removed by the next start, those of others never."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.common.processes.owned_folder import owned_folder

HOLDS = """
import sys
from services.common.processes.owned_folder import owned_folder
with owned_folder("test-router-") as folder:
    open(folder + "/0.claims", "w").close()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_folders_of_killed_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    other = tmp_path / "test-other"
    other.mkdir()
    (tmp_path / "test-router-file").write_text("")
    children = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"TMPDIR": str(tmp_path)},
        )
        for _ in range(3)
    ]
    folders = []
    for child in children:
        assert child.stdout is not None
        folders.append(Path(child.stdout.readline().strip()))
    killed, stays, ended = zip(children, folders, strict=True)
    killed[0].kill()
    killed[0].communicate()
    ended[0].communicate("")
    assert killed[1].exists()
    assert not ended[1].exists()
    with owned_folder("test-router-") as own:
        assert not killed[1].exists()
        assert (stays[1] / "0.claims").exists()
        assert other.exists()
        with owned_folder("test-router-") as second:
            assert own != second
            assert Path(own).exists()
        assert not Path(second).exists()
    assert not Path(own).exists()
    stays[0].communicate("")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["test-other", "test-router-file"]
