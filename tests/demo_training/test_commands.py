"""The commands that make and mark the demo model say how they are used, and the curve is drawn."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from models.demo_training import evaluate


def call(name: str, *flags: str, monkeypatch: pytest.MonkeyPatch) -> object:
    module = importlib.import_module(f"models.demo_training.{name}")
    monkeypatch.setattr(sys, "argv", [name, *flags])
    return module.main()


@pytest.mark.parametrize("name", ["vocabulary", "train", "evaluate", "plot"])
def test_help_is_printed_and_nothing_done(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        call(name, "--help", monkeypatch=monkeypatch)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name}")
    assert list(tmp_path.iterdir()) == []


def test_the_curve_of_the_shipped_run_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Path(evaluate.__file__).with_name("shipped_run.json")
    assert call("plot", str(run), str(tmp_path / "loss.png"), monkeypatch=monkeypatch) == 0
    assert (tmp_path / "loss.png").stat().st_size > 10_000
