"""Clocks of the GPUs during a run, as the GPUs report them."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from bench.goodput.servers import clocks_between, gpu_samples
from tests.support.waiting import until

SAMPLES = """\
2026/11/26 21:00:00.100, 0, 1980, 100.5, 40
2026/11/26 21:00:01.100, 0, 1980, 600.0, 50
2026/11/26 21:00:01.200, 1, 1755, 690.0, 70
2026/11/26 21:00:02.100, 0, 1900, 700.0, 54
2026/11/26 21:00:02.200, 1, [N/A], 690.0, 70
2026/11/26 21:00:03.100, 0, 19"""


def test_means_of_the_gpus_between_two_times(tmp_path: Path) -> None:
    (tmp_path / "gpus.csv").write_text(SAMPLES)
    begun, ended = (datetime(2026, 11, 26, 21, 0, second) for second in (1, 4))
    found = clocks_between(tmp_path / "gpus.csv", ["0", "1", "2"], begun, ended)
    assert found == "GPU 0 1940 MHz, 650 W, 52 °C; GPU 1 1755 MHz, 690 W, 70 °C"
    assert not clocks_between(tmp_path / "gpus.csv", ["2"], begun, ended)


async def test_samples_are_taken_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\necho "$@" | head -c 20\nexec sleep 60\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    async with gpu_samples(tmp_path / "gpus.csv"):
        await until(lambda: bool((tmp_path / "gpus.csv").read_text()))
    assert (tmp_path / "gpus.csv").read_text() == "--query-gpu=timestam"


async def test_without_a_driver_there_is_no_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    async with gpu_samples(tmp_path / "gpus.csv"):
        pass
    assert (tmp_path / "gpus.csv").read_text() == ""
