"""The folder and the name that `--model` means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.base.errors import BatonError
from services.cli.up.model_folder import demo_folder, with_model
from services.common.config.settings_tree.settings import Settings


def test_without_a_model_the_demo_model_is_served() -> None:
    config, folder = with_model(Settings())
    assert (config.model, config.served_model_name, folder) == ("demo", "baton-demo", demo_folder())
    assert with_model(Settings(model="demo")) == (config, folder)
    assert (folder / "model.safetensors").stat().st_size <= 16_000_000


def test_a_random_one_is_made_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config, folder = with_model(Settings(model="random"))
    assert (config.served_model_name, folder.parent) == ("baton-random", tmp_path / "baton")


def test_a_folder_goes_before_a_built_in_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "demo").mkdir(exist_ok=True)
        (tmp_path / "demo" / name).write_text(json.dumps({}))
    assert with_model(Settings(model="demo"))[1] == tmp_path / "demo"
    assert with_model(Settings())[1] == demo_folder()


def test_a_given_name_is_kept() -> None:
    assert with_model(Settings(served_model_name="mine"))[0].served_model_name == "mine"


def test_a_missing_folder_is_the_operators_mistake() -> None:
    with pytest.raises(BatonError):
        with_model(Settings(model="/no/such"))
