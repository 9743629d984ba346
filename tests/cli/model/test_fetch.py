"""`baton model fetch` from a hub on loopback: all files or none, once for all, each as the hub lists it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from baton.base.errors import BatonError, ErrorKind
from services.cli.main import main
from services.cli.model.fetch import fetch
from services.common.config.settings_tree.settings import ModelSource
from tests.support.fake_hub import COMMIT, FakeHub, serving

SOURCE = ModelSource(hub_id="owner/model")
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"model": {}}',
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "additional_chat_templates/old.bin": b"a pickle",
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "model-1.safetensors": bytes(range(256)) * 4096,
    "model-2.safetensors": b"weights",
    "modeling.py": b"import os",
    "pytorch_model.bin": b"a pickle",
    "original/params.json": b"{}",
}
WANTED = {name for name in FILES if name.endswith((".json", ".safetensors", ".jinja"))} - {
    "original/params.json"
}
TEMPLATES = {"chat_template.jinja", "additional_chat_templates/tool_use.jinja"}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serving(FakeHub(dict(FILES))) as hub:
        yield hub


def names(folder: Path) -> set[str]:
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in files} - {".baton-model.json"}


def test_all_that_a_worker_reads_and_nothing_else(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "ours"
    fetch(folder, SOURCE, 5, hub.url)
    assert names(folder) == WANTED
    for name in WANTED:
        assert (folder / name).read_bytes() == FILES[name]
    assert {path.name for path in folder.parent.iterdir()} == {"ours", "ours.lock"}
    assert json.loads((folder / ".baton-model.json").read_text())["commit"] == COMMIT
    before = hub.gets.total()
    fetch(folder, SOURCE, 5, hub.url)
    assert hub.gets.total() == before


def test_a_router_gets_no_weights(hub: FakeHub, tmp_path: Path) -> None:
    fetch(tmp_path / "ours", SOURCE.model_copy(update={"files": "tokenizer"}), 5, hub.url)
    assert names(tmp_path / "ours") == {"config.json", "tokenizer.json", *TEMPLATES}


def test_a_folder_that_it_has_not_made(hub: FakeHub, tmp_path: Path) -> None:
    """A complete one is taken as it is; what is incomplete is not touched."""
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"{}")
    fetch(tmp_path, SOURCE.model_copy(update={"files": "tokenizer"}), 5, hub.url)
    with pytest.raises(BatonError, match="was not made by baton model fetch") as refusal:
        fetch(tmp_path, SOURCE, 5, hub.url)
    assert refusal.value.kind is ErrorKind.INVALID
    assert hub.gets.total() == 0
    (tmp_path / "model.safetensors").write_bytes(b"")
    fetch(tmp_path, SOURCE, 5, hub.url)
    assert hub.gets.total() == 0


def test_a_damaged_file_is_downloaded_again(hub: FakeHub, tmp_path: Path) -> None:
    folder, name = tmp_path / "ours", "model-2.safetensors"
    hub.damaged[name] = b"WEIGHTS"
    with pytest.raises(BatonError, match=rf"{name} is not what the hub lists") as failure:
        fetch(folder, SOURCE, 5, hub.url)
    assert failure.value.kind is ErrorKind.UNAVAILABLE
    assert not folder.exists()
    hub.damaged.clear()
    fetch(folder, SOURCE, 5, hub.url)
    assert (folder / name).read_bytes() == FILES[name]
    assert (hub.gets[name], hub.gets["model-1.safetensors"]) == (2, 1)


def test_a_file_that_is_lost_later(hub: FakeHub, tmp_path: Path) -> None:
    """The folder is made again from what is left of it."""
    folder = tmp_path / "ours"
    fetch(folder, SOURCE, 5, hub.url)
    (folder / "model-2.safetensors").unlink()
    fetch(folder, SOURCE, 5, hub.url)
    assert names(folder) == WANTED
    assert (hub.gets["model-2.safetensors"], hub.gets["model-1.safetensors"]) == (2, 1)


def test_another_revision_takes_the_place(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "ours"
    fetch(folder, SOURCE, 5, hub.url)
    del hub.files["model-2.safetensors"]
    fetch(folder, SOURCE.model_copy(update={"revision": "next"}), 5, hub.url)
    assert names(folder) == WANTED - {"model-2.safetensors"}


def test_a_lock_that_another_process_holds(hub: FakeHub, tmp_path: Path) -> None:
    with open(tmp_path / "ours.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BatonError, match="another process has held .*ours.lock"):  # noqa: RUF043
            fetch(tmp_path / "ours", SOURCE, 0.1, hub.url)
    assert hub.gets.total() == 0


def test_a_private_model(hub: FakeHub, tmp_path: Path) -> None:
    hub.token = "hf_the_token"
    with pytest.raises(BatonError, match="no such model or revision for this token") as refusal:
        fetch(tmp_path / "ours", SOURCE, 5, hub.url)
    assert refusal.value.kind is ErrorKind.INVALID
    (tmp_path / "token").write_text(hub.token + "\n")
    fetch(tmp_path / "ours", SOURCE.model_copy(update={"token_file": tmp_path / "token"}), 5, hub.url)
    assert names(tmp_path / "ours") == WANTED


def test_the_command(hub: FakeHub, tmp_path: Path) -> None:
    """The command runs with a router's file and a read-only home directory; two commands at once download
    once."""
    (tmp_path / "home").mkdir(mode=0o500)
    folder, file = tmp_path / "ours", tmp_path / "router.yaml"
    source = {"hub_id": "owner/model", "files": "tokenizer"}
    file.write_text(yaml.safe_dump({"model": str(folder), "router": {}, "model_source": source}))
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "services.cli.main", "model", "fetch", "--config", str(file)]
    both = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) for _ in range(2)]
    errors = [process.communicate(timeout=60)[1].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert names(folder) == {"config.json", "tokenizer.json", *TEMPLATES}
    assert hub.gets["tokenizer.json"] == 1
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("model: demo", "model_source is missing"),
        ("model_source: {hub_id: owner/model}", "model is missing"),
        (
            "{model: /nowhere/ours, model_source: {hub_id: owner/model, odd: 1}}",
            "unknown key model_source.odd",
        ),
        (
            "{model: /dev/null/ours, model_source: {hub_id: owner/model}}",
            "cannot write to /dev/null: ",
        ),
    ],
)
def test_refusals(tmp_path: Path, document: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.yaml").write_text(document)
    assert main(["model", "fetch", "--config", str(tmp_path / "file.yaml")]) == 2
    assert message in capsys.readouterr().err


def test_a_hub_that_is_away(tmp_path: Path) -> None:
    with pytest.raises(BatonError, match="the hub does not give it") as failure:
        fetch(tmp_path / "ours", SOURCE, 5, "http://127.0.0.1:1")
    assert failure.value.kind is ErrorKind.UNAVAILABLE


def test_a_download_that_breaks_off_is_continued(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the file is asked for, within the call or by the next one."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 65_536)
    name, cut = "model-1.safetensors", 300_000
    hub.cut[name] = cut
    with contextlib.suppress(BatonError):
        fetch(tmp_path / "ours", SOURCE, 5, hub.url)
    fetch(tmp_path / "ours", SOURCE, 5, hub.url)
    assert (tmp_path / "ours" / name).read_bytes() == FILES[name]
    first, second = (first for one, first in hub.ranges if one == name)
    assert first == 0 < second <= cut
