"""Files by which a Ray node's workers are found and its stop is announced."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.common.processes.run_folder import RunFolder, start_time


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def test_a_worker_is_listed_while_it_runs(folder: RunFolder) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        folder.record("pod-prefill-0", process.pid)
        assert folder.workers() == {"pod-prefill-0": process.pid}
    assert folder.workers() == {}
    folder.remove("pod-prefill-0")
    folder.remove("pod-prefill-0")
    assert not list((folder.path / "workers").iterdir())


def test_a_process_that_was_given_the_id_later_is_no_worker(folder: RunFolder) -> None:
    folder.record("w", os.getpid())
    file = folder.path / "workers" / "w.pid"
    pid, started = file.read_text().split()
    file.write_text(f"{pid} {int(started) - 1}\n")
    assert folder.workers() == {}
    file.write_text("damaged")
    assert folder.workers() == {}


def test_a_mark_counts_for_the_node_that_it_was_made_on(folder: RunFolder) -> None:
    assert not folder.stopping(os.getpid())
    folder.mark_stopping()
    assert folder.stopping(os.getpid()), "made while this process runs"
    time.sleep(2 / os.sysconf("SC_CLK_TCK"))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as later:
        assert not folder.stopping(later.pid), "a container that started later in the same pod"


def test_the_folder_is_configured_by_a_variable() -> None:
    assert RunFolder.of_node({}).path == Path("/tmp/baton")
    assert RunFolder.of_node({"BATON_RUN_DIR": "/run/b"}).path == Path("/run/b")


def test_a_process_that_has_ended_has_no_start_time() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert start_time(process.pid) is None
