"""Secrets apart from the rest of a configuration: all of them, and back in their places."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from baton.base.errors import BatonError, ErrorKind
from services.common.config.cluster import ClusterConfig
from services.common.config.settings_tree.reader import SECRETS, read_secrets
from services.common.config.settings_tree.secrets import (
    VARIABLES,
    find_secrets,
    secrets_of,
    with_secrets,
    without_secrets,
)
from services.common.config.state import StateConfig
from services.common.config.worker import WorkerConfig

URL = "redis://:p4ssw0rd@there:6379/0"
ALL = {
    "redis_url": URL,
    "prefix_secret": "prefix-secret-0001",
    "cluster_secret": "cluster-secret-01",
}


def worker(url: str = URL) -> WorkerConfig:
    state = StateConfig(redis_url=url, namespace="n")
    return WorkerConfig(
        name="w",
        role="both",
        model="m",
        state=state,
        prefix_secret=ALL["prefix_secret"],
        cluster_secret=ALL["cluster_secret"],
    )


def secret_fields(model: BaseModel) -> Iterator[tuple[str, object]]:
    """Name and value of every field that is marked as a secret, at any depth."""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from secret_fields(value)
        elif not field.repr:
            yield name, value


def test_secrets_are_removed_and_restored() -> None:
    reported = without_secrets(worker())
    # The journal's key is the router's alone: no worker is ever given it.
    marked = [name for name, _ in secret_fields(worker()) if name != "journal_key"]
    assert sorted(marked) == sorted(SECRETS), "a new secret needs a place in SECRETS"
    assert {value for _, value in secret_fields(reported)} == {""}
    for secret in ALL.values():
        assert secret not in reported.model_dump_json()
    assert with_secrets(reported, secrets_of(worker())) == worker()


def test_an_address_without_a_password_is_no_secret() -> None:
    open_to_all = worker("redis://there:6379/0")
    assert secrets_of(open_to_all) == {
        "prefix_secret": ALL["prefix_secret"],
        "cluster_secret": ALL["cluster_secret"],
    }
    assert without_secrets(open_to_all).state == open_to_all.state
    assert secrets_of(WorkerConfig(name="w", role="both", model="m")) == {}


def config(
    file: Path | None = None, names: tuple[str, ...] = ("redis_url", "prefix_secret", "cluster_secret")
) -> ClusterConfig:
    return ClusterConfig(cluster_id="c", workers=(worker(),), secrets_file=file, secret_names=names)


def test_secrets_are_found_in_file_or_environment(tmp_path: Path) -> None:
    environment = {VARIABLES[name]: value for name, value in ALL.items()}
    assert find_secrets(config(), environment) == ALL
    file = tmp_path / "secrets"
    file.write_text("".join(f"{name}: '{secret}'\n" for name, secret in ALL.items()))
    assert find_secrets(config(file), {}) == ALL
    file.write_text(json.dumps(ALL))
    assert find_secrets(config(file), {}) == ALL
    # What the cluster does not use is not added.
    assert "redis_url" not in find_secrets(config(file, ("prefix_secret",)), {})
    assert find_secrets(config(tmp_path / "none", ()), {}) == {}
    # A file may leave some to the environment, and goes before it.
    file.write_text(f"redis_url: '{URL}'\n")
    assert find_secrets(config(file), environment | {VARIABLES["redis_url"]: "another"}) == ALL


def refusal(file: Path | None) -> str:
    with pytest.raises(BatonError) as raised:
        find_secrets(config(file), {})
    assert raised.value.kind is ErrorKind.INVALID
    assert "\n" not in raised.value.message
    return raised.value.message


def test_a_missing_secret_is_named(tmp_path: Path) -> None:
    where = "is not set where the worker is to run, and"
    assert refusal(None) == f"BATON_REDIS_URL {where} no secrets_file is named"
    assert (
        refusal(tmp_path / "none") == f"cannot read secrets_file {tmp_path}/none: No such file or directory"
    )
    file = tmp_path / "secrets"
    file.write_text(f"redis_url: '{URL}'\n")
    assert refusal(file) == f"BATON_PREFIX_SECRET {where} secrets_file {file} has no prefix_secret"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("redis_urll: s3cret\n", "unknown key redis_urll"),
        ("redis_url: [s3cret]\n", "redis_url must be text"),
        ("- s3cret\n", "must hold settings by name, not a list"),
        ("s3cret: [\n", "is not valid YAML"),
    ],
)
def test_an_invalid_file_is_refused_without_showing_secrets(text: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text(text)
    message = refusal(file)
    assert problem in message
    assert "s3cret" not in message


def test_an_empty_file_has_no_secrets(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert read_secrets(tmp_path / "empty") == {}
