"""`baton router`: file, environment, flags and files of secrets become one configuration."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.base.cluster_auth import prefix_secret
from baton.base.errors import BatonError
from services.cli import router
from services.cli.main import main
from services.cli.up.model_folder import demo_folder
from services.common.config.router import RouterConfig

SECRET = "the secret of a cluster"
KEY = "0f" * 32


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A complete file, whose secrets end with a newline."""
    secrets = {"cluster-secret": SECRET, "journal-key": KEY, "redis-url": "redis://:word@127.0.0.1:1/0"}
    for name, secret in secrets.items():
        (tmp_path / name).write_text(f"{secret}\n")
    return written(tmp_path)


def written(folder: Path, **settings: Any) -> Path:
    document = {
        "model": "demo",
        "cluster_secret_file": str(folder / "cluster-secret"),
        "state": {
            "namespace": "ours",
            "redis_url_file": str(folder / "redis-url"),
            "journal_key_file": str(folder / "journal-key"),
        },
        "auth": "none",
        "router": {"host": "0.0.0.0", "http_port": 1, "grpc_port": 2, "admin_grpc_port": 3},
        **settings,
    }
    path = folder / "router.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def config(*flags: str, **environment: str) -> RouterConfig:
    parser = argparse.ArgumentParser()
    router.add_flags(parser)
    return router.router_config(parser.parse_args(["--config", *flags]), environment)


def test_files_of_secrets(file: Path) -> None:
    made = config(str(file))
    assert (made.model, made.served_model_name) == (str(demo_folder()), "baton-demo")
    assert (made.cluster_secret, made.prefix_secret) == (SECRET, prefix_secret(SECRET))
    assert made.state is not None
    assert (made.state.redis_url, made.state.namespace) == ("redis://:word@127.0.0.1:1/0", "ours")
    assert (made.state.journal_key, made.state.redis_url_file) == (KEY, file.with_name("redis-url"))
    assert (made.host, made.admin_host, made.bound_admin_http_host) == ("0.0.0.0", "127.0.0.1", "127.0.0.1")
    for secret in (SECRET, KEY, "word@"):
        assert secret not in repr(made)


def test_a_prefix_secret_and_the_other_sections(file: Path) -> None:
    file.with_name("prefix-secret").write_text("how blocks are hashed")
    pem = {"cert_file": "c", "key_file": "k"}
    made = config(
        str(
            written(
                file.parent,
                prefix_secret_file=str(file.with_name("prefix-secret")),
                tls={"internal": {**pem, "ca_file": "a", "domain": "d"}, "public": pem},
                auth={"api_keys_file": "keys"},
                require_tls=True,
                drain_s=300,
                log_level="debug",
                served_model_name="chat",
            )
        )
    )
    assert made.prefix_secret == "how blocks are hashed"
    assert made.tls is not None
    assert made.public_tls is not None
    assert made.auth is not None
    assert (made.tls.domain, made.public_tls.cert_file, made.auth.api_keys_file) == (
        "d",
        Path("c"),
        Path("keys"),
    )
    assert (made.require_tls, made.drain_s, made.log_level) == (True, 300, "debug")
    assert made.served_model_name == "chat"


def test_flags_over_environment_over_file(file: Path) -> None:
    made = config(
        str(file),
        "--grpc-port",
        "7",
        BATON_GRPC_PORT="8",
        BATON_HTTP_PORT="9",
        BATON_ADMIN_HTTP_HOST="10.0.0.7",
    )
    assert (made.http_port, made.grpc_port, made.admin_grpc_port) == (9, 7, 3)
    assert (made.admin_host, made.bound_admin_http_host) == ("127.0.0.1", "10.0.0.7")
    overridden = config(str(file), BATON_REDIS_URL="redis://other:1/0").state
    assert overridden is not None
    assert (overridden.redis_url, overridden.redis_url_file) == ("redis://other:1/0", None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": {}}, "unknown key engine"),
        ({"model": "nowhere"}, "model nowhere: no such folder"),
        ({"model": None}, "model (--model) is missing: baton router needs it"),
        (
            {"state": {"namespace": "ours"}},
            "state.redis_url (--redis-url) or state.redis_url_file is missing",
        ),
        ({"state": {"namespace": "ours", "redis_url": "none"}}, "a router finds its workers in Redis"),
        ({"cluster_secret_file": "/nowhere/secret"}, "cannot read cluster_secret_file /nowhere/secret"),
        ({"router": {"http_port": "a"}}, "router.http_port (--http-port) is 'a': input should be a valid"),
    ],
)
def test_a_mistake_is_one_line(
    file: Path, settings: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["router", "--config", str(written(file.parent, **settings))]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cluster-secret", "short", "holds fewer than 16 characters"),
        ("journal-key", "xyz", "does not hold 64 hex digits"),
        ("redis-url", "\n", "is empty"),
    ],
)
def test_a_wrong_secret_is_named_by_its_file(file: Path, name: str, content: str, message: str) -> None:
    file.with_name(name).write_text(content)
    with pytest.raises(BatonError, match=message) as refusal:
        config(str(file))
    assert name in refusal.value.message
    assert content.strip() == "" or content not in refusal.value.message


def test_help_names_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["router", "--help"])
    text = capsys.readouterr().out
    for key in ("auth", "api_keys_file", "journal_key_file", "require_tls", "--http-port"):
        assert key in text
    assert "--slots" not in text
