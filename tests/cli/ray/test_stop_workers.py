"""`baton ray stop-workers`: what runs on a Ray node drains before Ray ends it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from services.cli.main import main
from services.cli.ray.stop_workers import stop_workers
from services.common.processes.run_folder import RunFolder

# Counts its SIGTERMs in a file; ends half a second after the first, or never.
WORKER = """
import signal, sys, time
count = 0
def on_term(*_):
    global count
    count += 1
    open(sys.argv[1], "w").write(str(count))
signal.signal(signal.SIGTERM, on_term)
print("up", flush=True)
while not (count and sys.argv[2] == "ends"):
    time.sleep(0.05)
time.sleep(0.3)
"""


@contextmanager
def worker(folder: RunFolder, name: str, count: Path, ends: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", WORKER, str(count), ends]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            folder.record(name, process.pid)
            yield process
        finally:
            process.kill()


def test_it_waits_for_all_and_signals_each_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with ExitStack() as stack:
        ended = [stack.enter_context(worker(folder, name, tmp_path / name, "ends")) for name in "ab"]
        assert stop_workers(folder, within_s=10) == []
        assert [process.wait(1) for process in ended] == [0, 0]
    assert [(tmp_path / name).read_text() for name in "ab"] == ["1", "1"]
    assert folder.stopping(os.getpid())


def test_it_names_those_that_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_RUN_DIR", str(tmp_path))
    began = time.monotonic()
    with worker(RunFolder(tmp_path), "pod-decode-0", tmp_path / "count", "stays"):
        assert main(["ray", "stop-workers", "--within", "0.3"]) == 1
    assert time.monotonic() - began < 5
    assert "pod-decode-0" in capsys.readouterr().err


def test_without_workers_it_marks_the_node_and_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_RUN_DIR", str(tmp_path / "new"))
    assert main(["ray", "stop-workers", "--within", "600"]) == 0
    assert RunFolder(tmp_path / "new").stopping(os.getpid())


@pytest.mark.parametrize("within", ["", "soon", "-1", "nan"])
def test_a_wrong_time_is_refused(within: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["ray", "stop-workers", f"--within={within}"])
    assert ended.value.code == 2
    assert "--within" in capsys.readouterr().err


def test_a_folder_that_cannot_be_used_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATON_RUN_DIR", str(tmp_path / "file"))
    assert main(["ray", "stop-workers", "--within", "1"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
