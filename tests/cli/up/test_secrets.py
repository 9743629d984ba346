"""Redis, secrets and the files that hold them: where they come from, and that no text shows them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pydantic import ValidationError

from baton.base.errors import BatonError
from services.cli.main import main
from services.cli.up.embedded_redis import EmbeddedRedis
from services.cli.up.local_cluster import (
    cluster_config,
    router_config,
    state_config,
    with_generated_secrets,
    worker_configs,
)
from services.common.config.router import RouterConfig
from services.common.config.state import StateConfig
from tests.cli.up.loaded import load, worker

SECRET = "a-secret-of-the-tests"
URL = f"redis://:{SECRET}@10.0.0.1:6379/0"


def test_a_redis_is_named_by_flag_variable_or_file(tmp_path: Path) -> None:
    file = tmp_path / "baton.yaml"
    file.write_text(f"state: {{redis_url: '{URL}', namespace: ours}}\n")
    for config in (
        load("-c", str(file)),
        load("--redis-url", URL, "--redis-namespace", "ours"),
        load(BATON_REDIS_URL=URL, BATON_REDIS_NAMESPACE="ours"),
    ):
        state = state_config(config, "abc", None)
        assert state is not None
        assert (state.redis_url, state.namespace, state.embedded) == (URL, "ours", False)
    state = state_config(load("--redis-url", URL), "abc", None)
    assert state is not None
    assert state.namespace == "baton-abc", "two clusters on one Redis never meet unless configured to"
    assert state_config(load("--redis-url", "none"), "abc", None) is None


def test_what_is_secret_is_in_what_children_read_and_in_no_text(tmp_path: Path) -> None:
    config = load("--redis-url", URL)
    state = state_config(config, "abc", None)
    assert state is not None
    router, cluster = router_config(config, tmp_path, state), cluster_config(config, tmp_path, "abc", state)
    for reported in (config, state, router, cluster, *cluster.workers):
        for text in (repr(reported), str(reported), f"{reported}"):
            assert SECRET not in text
            assert state.journal_key not in text
    assert SECRET in cluster.model_dump_json()
    assert RouterConfig.model_validate_json(router.model_dump_json()).state == state
    assert state.journal_key not in cluster.model_dump_json(), "the journal is the router's"
    with pytest.raises(ValidationError) as wrong:
        StateConfig.model_validate({"redis_url": [URL], "namespace": "n"})
    assert SECRET not in str(wrong.value)


def test_workers_on_other_machines_are_not_sent_to_our_loopback(tmp_path: Path) -> None:
    for address, named in (("local", True), ("none", True), ("10.0.0.1:6379", False)):
        config = load("--ray-address", address, BATON_CLUSTER_SECRET=SECRET)
        own = EmbeddedRedis()
        state = state_config(config, "abc", own)
        asyncio.run(own.stop())
        assert all((worker.state is not None) == named for worker in worker_configs(config, tmp_path, state))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["up", "--redis-url", f"http://:{SECRET}@h"], "the URL of Redis: it begins with redis://"),
        (["up", "--redis-url", f"redis://:{SECRET}@h:port"], "the URL of Redis: "),
        (["up", "--redis-url", f"redis://:{SECRET}@a,b"], "the URL of Redis: several hosts"),
        (["up", "--redis-namespace", f"{SECRET} {SECRET}"], "state.namespace (--redis-namespace): string"),
        (["worker", "--redis-url", URL], "--redis-url needs --redis-namespace"),
        (["worker", "--redis-url", f"redis://:{SECRET}@h/x", "--redis-namespace", "n"], "the URL of Redis"),
        (["worker", "--redis-url", URL, "--redis-namespace", "n", "--host", "0.0.0.0"], "--host 0.0.0.0"),
        (["worker", "--name", "two words"], "name is 'two words'"),
        (["worker", "--name", ".."], "name is '..'"),  # it names a folder of the disk cache
    ],
)
def test_a_wrong_redis_is_one_line_without_the_secret(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if argv[0] == "worker":
        argv = [*argv, "--role", "both", "--model", str(tmp_path)]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith(f"baton: error: {message}")
    assert SECRET not in err


def test_a_secret_of_the_wrong_kind_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "baton.yaml"
    for text in (
        f"state: {{redis_url: ['{URL}']}}",
        f"state: {{redis_url: {{a: '{URL}'}}}}",
        f"state: '{URL}'",
    ):
        file.write_text(text)
        assert main(["up", "-c", str(file)]) == 2
        err = capsys.readouterr().err
        assert err.startswith("baton: error: state")
        assert SECRET not in err


def test_a_worker_that_joins_a_cluster() -> None:
    joins = worker("--redis-url", URL, "--redis-namespace", "ours", "--served-model-name", "llama")
    assert joins.state is not None
    assert (joins.state.redis_url, joins.state.namespace, joins.state.cluster_id) == (URL, "ours", "")
    assert joins.served_model_name == "llama"
    other = worker("--slots", "3", BATON_REDIS_URL=URL, BATON_REDIS_NAMESPACE="ours", BATON_SLOTS="4")
    assert other.state is not None
    assert other.engine.slots == 3
    assert other.name != joins.name, "two by default names would push each other out"
    assert (worker().state, worker().name) == (None, "both")


def test_the_clusters_secret_comes_from_file_or_environment_and_shows_nowhere(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("a secret that a file holds\n")
    assert load("--cluster-secret-file", str(file)).cluster_secret == "a secret that a file holds"
    config = load(BATON_CLUSTER_SECRET="a secret of the environment")
    assert config.cluster_secret == "a secret of the environment"
    router, workers = router_config(config, tmp_path), worker_configs(config, tmp_path)
    assert {config.cluster_secret, router.cluster_secret} == {"a secret of the environment"}
    assert all(one.cluster_secret == "a secret of the environment" for one in workers)
    assert not any("a secret" in repr(one) for one in (config, router, *workers))
    both = load("--cluster-secret-file", str(file), BATON_CLUSTER_SECRET="a secret of the environment")
    assert both.cluster_secret == "a secret that a file holds", "flags go before variables"
    settings_file = tmp_path / "baton.yaml"
    settings_file.write_text(f"cluster_secret_file: {file}\n")
    both = load("-c", str(settings_file), BATON_CLUSTER_SECRET="a secret of the environment")
    assert both.cluster_secret == "a secret of the environment", "variables go before the file"
    settings_file.write_text(f"cluster_secret_file: {file}\ncluster_secret: a secret of the environment\n")
    with pytest.raises(BatonError, match="both set"):
        load("-c", str(settings_file))
    with pytest.raises(BatonError) as short:
        load(BATON_CLUSTER_SECRET="short-one")
    assert "short-one" not in short.value.message


SECRETS = "prefix_secret: sixteen-or-more-0\nredis_url: redis://:pass@there:1/0\n"


def test_secrets_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "secrets.yaml"
    file.write_text(SECRETS)
    same = {"BATON_PREFIX_SECRET": "sixteen-or-more-0"}
    for config in (load("--secrets-file", str(file)), load(BATON_SECRETS_FILE=str(file), **same)):
        assert config.prefix_secret == "sixteen-or-more-0"
        assert config.state.redis_url == "redis://:pass@there:1/0"
    assert cluster_config(config, tmp_path, "c").secrets_file == file


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (SECRETS, ("--prefix-secret", "another-secret-00"), "prefix_secret in secrets_file"),
        (SECRETS, ("--redis-url", "redis://there:1/0"), "redis_url in secrets_file"),
        ("prefix_secret: short\n", (), "prefix_secret (--prefix-secret): string should have at least 16"),
        ("redis_url: 'http://:pass@there'\n", (), "pass"),
        ("colour: red\n", (), "unknown key colour"),
        (None, (), "cannot read secrets_file"),
    ],
)
def test_a_bad_secrets_file_is_one_line(
    text: str | None,
    flags: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "secrets.yaml"
    if text is not None:
        file.write_text(text)
    assert main(["up", "--secrets-file", str(file), *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith("baton: error: ")
    assert err.count("\n") == 1
    assert (message in err) is (message != "pass"), err


def test_a_secrets_file_is_named_for_every_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--secrets-file", "here.yaml"]) == 2
    assert "secrets_file must be an absolute path" in capsys.readouterr().err


def test_no_secret_is_generated_for_another_ray() -> None:
    assert with_generated_secrets(load()).prefix_secret
    given = {"BATON_CLUSTER_SECRET": SECRET}
    assert with_generated_secrets(load("--ray-address", "there:6379", **given)).prefix_secret is None
    given |= {"BATON_PREFIX_SECRET": "sixteen-or-more-0"}
    both = with_generated_secrets(load("--ray-address", "there:6379", **given))
    assert (both.prefix_secret, both.cluster_secret) == ("sixteen-or-more-0", SECRET)


def test_machines_of_a_ray_that_is_joined_need_a_cluster_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BATON_CLUSTER_SECRET", raising=False)
    assert main(["up", "--ray-address", "there:6379"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("baton: error: --ray-address there:6379 needs a cluster secret")
    assert err.count("\n") == 1
