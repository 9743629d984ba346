"""`baton keys`: a key is printed once, and neither Redis nor an argument ever has it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.base.api_keys import ApiKey, key_hash
from baton.state import State
from baton.state.embedded import EmbeddedServer
from services.cli.main import main

SECRET = "the secret of a cluster"


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with asyncio.Runner() as runner:
        started = runner.run(EmbeddedServer.start())
        yield started
        runner.run(started.stop())


@pytest.fixture
def config(server: EmbeddedServer, tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text(SECRET + "\n")
    (tmp_path / "url").write_text(server.url + "\n")
    state = {"namespace": "ours", "redis_url_file": str(tmp_path / "url"), "journal_key_file": "unread"}
    file = {"model": "demo", "cluster_secret_file": str(tmp_path / "secret"), "state": state}
    (tmp_path / "router.yaml").write_text(json.dumps(file))
    return tmp_path / "router.yaml"


def stored(url: str) -> dict[str, ApiKey]:
    async def read() -> dict[str, ApiKey]:
        state = State.at(url, namespace="ours")
        listing = await state.api_keys(SECRET).listing()
        await state.close()
        return {key.key_id: key for key in listing.entries or ()}

    return asyncio.run(read())


def test_add_list_revoke(
    server: EmbeddedServer, config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ("--config", str(config))
    limited = ("--scope", "models", "--scope", "metrics", "--use-model", "llama", "--days", "7")
    assert main(["keys", "add", "--tenant", "acme", "--id", "ci", *limited, *file]) == 0
    printed = capsys.readouterr()
    key = printed.out.strip()
    assert len(key) > 40
    assert key not in printed.err
    entry = stored(server.url)["ci"]
    assert bytes.fromhex(entry.sha256) == key_hash(key)
    assert (entry.tenant, entry.scopes, entry.models) == ("acme", ("models", "metrics"), ("llama",))
    assert entry.expires is not None

    own = "k" * 32
    monkeypatch.setattr("sys.stdin", io.StringIO(own + "\n"))
    assert main(["keys", "add", "--tenant", "acme", "--key-file", "-", *file]) == 0
    assert capsys.readouterr().out == ""
    own_id = key_hash(own).hex()[:12]
    assert set(stored(server.url)) == {"ci", own_id}

    assert main(["keys", "list", *file]) == 0
    listed = capsys.readouterr().out
    assert all(word in listed for word in ("ci", own_id, "models metrics", "llama", "never", "UTC", "all"))
    assert main(["keys", "revoke", "ci", *file]) == 0
    assert main(["keys", "revoke", "ci", *file]) == 2
    assert "there is no key ci" in capsys.readouterr().err
    assert set(stored(server.url)) == {own_id}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tenant", "No Name"), "tenant: string should match"),
        (("--tenant", "a", "--days", "0"), "--days is more than 0"),
        (("--tenant", "a", "--key-file", "short"), "a key has 32 to 512 visible ASCII characters"),
    ],
)
def test_refused(
    config: Path,
    flags: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(config.parent)
    (config.parent / "short").write_text("sk-short\n")
    assert main(["keys", "add", *flags, "--config", str(config)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "sk-short" not in error
