"""`baton worker --config` and `baton worker group`: flags, then variables, then the file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from baton.base.errors import BatonError
from services.cli import worker, worker_group
from services.cli.common.process_configs import request_drain_s
from services.cli.main import main
from services.cli.up.model_folder import demo_folder
from services.common.config.cluster import ClusterConfig
from services.common.config.worker import WorkerConfig

SECRET = "the hidden secret of a cluster"
HASHING = "the secret that block hashes are keyed with"
URL = "redis://:password@10.0.0.5:6379/0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cluster-secret").write_text(f"{SECRET}\n")
    (tmp_path / "prefix-secret").write_text(HASHING)
    (tmp_path / "redis-url").write_text(f"{URL}\n")
    return tmp_path


def write(folder: Path, **values: Any) -> Path:
    """A file of settings; values that are None are left out."""
    settings = {
        "model": "demo",
        "cluster_secret_file": str(folder / "cluster-secret"),
        "prefix_secret_file": str(folder / "prefix-secret"),
        "state": {"namespace": "chat", "redis_url_file": str(folder / "redis-url")},
        **values,
    }
    path = folder / "baton.yaml"
    path.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))
    return path


def worker_of(file: Path, *flags: str, role: str = "decode", **environment: str) -> WorkerConfig:
    parser = argparse.ArgumentParser()
    worker.add_flags(parser)
    arguments = parser.parse_args(["--role", role, "--config", str(file), *flags])
    return worker.worker_config(arguments, environment)


def group_of(file: Path, *flags: str, prefill: int = 1, decode: int = 2, **environment: str) -> ClusterConfig:
    parser = argparse.ArgumentParser()
    worker_group.add_flags(parser)
    counts = ["--prefill", str(prefill), "--decode", str(decode)]
    return worker_group.group_config(parser.parse_args([*counts, "--config", str(file), *flags]), environment)


def test_a_worker_from_a_file(folder: Path) -> None:
    file = write(
        folder,
        served_model_name="chat",
        require_tls=True,
        drain_s=300,
        start_timeout_s=1801,
        log_level="debug",
        engine={"slots": 3, "kernel_cache": "/var/cache/baton"},
        transfer={"transfer_port": 50100},
        worker={"port": 50060, "admin_http_port": 8001},
        tls={"internal": {"cert_file": "a", "key_file": "b", "ca_file": "c", "domain": "chat.internal"}},
    )
    config = worker_of(file, BATON_HOST="10.1.2.3", BATON_NAME="chat-decode-x7")
    assert (config.name, config.host, config.model) == ("chat-decode-x7", "10.1.2.3", str(demo_folder()))
    assert (config.port, config.admin_http_port, config.metrics_port) == (50060, 8001, None)
    assert (config.cluster_secret, config.prefix_secret) == (SECRET, HASHING)
    assert config.state is not None
    assert (config.state.redis_url, config.state.redis_url_file) == (URL, folder / "redis-url")
    assert (config.served_name, config.start_timeout_s, config.log_level) == ("chat", 1801, "debug")
    assert config.engine.slots == 3
    assert config.transfer.transfer_port == 50100
    assert config.tls is not None
    assert config.require_tls
    assert config.canary
    assert config.drain_s == 297, "the process must have ended after 300 s"


def test_ports_may_be_bound_to_other_addresses_than_the_one_that_is_registered(folder: Path) -> None:
    file = write(folder, worker={"port": 50060, "admin_http_port": 8001})
    alone = worker_of(file, BATON_HOST="10.1.2.3", BATON_LISTEN_HOST="::")
    assert (alone.host, alone.bound_host) == ("10.1.2.3", "::")
    assert worker_of(file, BATON_HOST="10.1.2.3", BATON_LISTEN_HOST="").bound_host == "10.1.2.3"
    group = group_of(file, BATON_HOST="10.1.2.3", BATON_LISTEN_HOST="::")
    assert group.bound_admin_http_host == "::"
    assert {(one.host, one.bound_host) for one in group.workers} == {("10.1.2.3", "::")}


def test_flags_before_variables_before_the_file(folder: Path) -> None:
    file = write(folder, engine={"slots": 1, "chunk_tokens": 11, "block_tokens": 16}, model="nowhere")
    given = {"BATON_SLOTS": "2", "BATON_CHUNK_TOKENS": "12", "BATON_HOST": "10.0.0.1", "BATON_NAME": "v"}
    flags = ("--slots", "3", "--model", "demo", "--name", "f", "--port", "7", "--redis-url", "redis://h")
    config = worker_of(file, *flags, **given)
    engine = config.engine
    assert (engine.slots, engine.chunk_tokens, engine.block_tokens) == (3, 12, 16)
    assert (config.name, config.host, config.port, config.served_name) == ("f", "10.0.0.1", 7, "baton-demo")
    assert config.state is not None
    assert (config.state.redis_url, config.state.redis_url_file) == ("redis://h", None)


def test_without_a_prefix_secret_it_is_derived_as_everywhere(folder: Path) -> None:
    config = worker_of(write(folder, prefix_secret_file=None))
    given = worker_of(write(folder), BATON_PREFIX_SECRET="a variable goes before the file")
    assert given.prefix_secret == "a variable goes before the file"
    assert config.prefix_secret == worker_of(write(folder, prefix_secret_file=None)).prefix_secret
    assert len(config.prefix_secret) >= 16
    assert config.prefix_secret not in (SECRET, HASHING)


@pytest.mark.parametrize(
    ("values", "flags", "message"),
    [
        ({"router": {}}, (), "unknown key router"),
        ({"worker": {"ports": 1}}, (), "unknown key worker.ports"),
        ({"worker_metrics_port": 1}, (), "unknown key worker_metrics_port"),
        ({"state": None}, (), "state.namespace (--redis-namespace) is missing: baton worker needs it"),
        (
            {"state": {"namespace": "n"}},
            (),
            "state.redis_url (--redis-url) or state.redis_url_file is missing",
        ),
        ({"state": {"namespace": "n", "redis_url": f"http://:{SECRET}@h"}}, (), "the URL of Redis"),
        ({"cluster_secret_file": "/nowhere/secret"}, (), "cannot read cluster_secret_file /nowhere/secret"),
        ({"model": "/nowhere"}, (), "model /nowhere: no such folder"),
        ({}, ("--host", "0.0.0.0"), "--host 0.0.0.0 is not an address that routers can reach"),
        ({}, ("--name", "two words"), "name is 'two words'"),
    ],
)
def test_wrong_files_are_refused_in_one_line(
    values: dict[str, Any], flags: tuple[str, ...], message: str, folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = write(folder, **values)
    assert main(["worker", "--role", "decode", "--config", str(file), *flags]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert message in err
    assert SECRET not in err


def test_a_worker_needs_a_model_or_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "--role", "decode"]) == 2
    assert "model (--model) is missing: baton worker needs it" in capsys.readouterr().err


def test_flags_alone_take_host_and_name_from_variables_too() -> None:
    parser = argparse.ArgumentParser()
    worker.add_flags(parser)
    arguments = parser.parse_args(["--role", "both", "--model", "demo", "--admin-http-port", "0"])
    config = worker.worker_config(arguments, {"BATON_HOST": "::1", "BATON_NAME": "mine"})
    assert (config.host, config.name, config.model) == ("::1", "mine", str(demo_folder()))
    assert (config.served_name, config.admin_http_port, config.canary) == ("baton-demo", 0, True)


def test_a_group_counts_names_and_ports_over_its_workers(folder: Path) -> None:
    file = write(
        folder,
        drain_s=20,
        worker={"port": 50060, "admin_http_port": 8001},
        transfer={"transfer_port": 50100, "frames_port": 50140},
        worker_metrics_port=9400,
    )
    config = group_of(file, BATON_HOST="10.1.2.3", BATON_NAME="chat-0")
    assert (config.name, config.bound_admin_http_host, config.admin_http_port) == ("chat-0", "10.1.2.3", 8001)
    assert (config.drain_s, config.restart_always, config.ray_address) == (20, True, "none")
    found = [
        (one.name, one.role, one.port, one.transfer.transfer_port, one.transfer.frames_port, one.metrics_port)
        for one in config.workers
    ]
    assert found == [
        ("chat-0-prefill-0", "prefill", 50060, 50100, 50140, 9400),
        ("chat-0-decode-0", "decode", 50061, 50101, 50141, 9401),
        ("chat-0-decode-1", "decode", 50062, 50102, 50142, 9402),
    ]
    assert {(one.group, one.host, one.admin_http_port, one.drain_s) for one in config.workers} == {
        ("chat-0", "10.1.2.3", None, 17.0)
    }


def test_a_group_reserves_memory_for_its_links(folder: Path) -> None:
    config = group_of(write(folder, transfer={"transport": "ipc"}), prefill=3, decode=2)
    assert [one.engine.gpu_links for one in config.workers] == [0, 0, 0, 3, 3]


def test_groups_without_a_name_have_different_ones(folder: Path) -> None:
    file = write(folder)
    assert group_of(file).name != group_of(file).name
    assert {one.port for one in group_of(file).workers} == {0}, "any free port, for each of them"


@pytest.mark.parametrize(
    ("prefill", "decode", "values", "message"),
    [
        (0, 0, {}, "a group has 1 to 16 workers"),
        (9, 8, {}, "a group has 1 to 16 workers"),
        (-1, 2, {}, "a group has 1 to 16 workers"),
        (1, 1, {"worker": {"port": 8000, "admin_http_port": 8001}}, "both need port 8001"),
        (1, 1, {"worker_metrics_port": 65535}, "leaves too few ports"),
        (1, 1, {"prefill": 1}, "unknown key prefill"),
    ],
)
def test_impossible_groups_are_refused(
    prefill: int, decode: int, values: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(BatonError, match=message):
        group_of(write(folder, **values), prefill=prefill, decode=decode)


@pytest.mark.parametrize(("drain_s", "requests_s"), [(0, 0), (2, 1.5), (4, 3), (20, 17), (300, 297)])
def test_requests_end_before_the_process_must(drain_s: float, requests_s: float) -> None:
    assert request_drain_s(drain_s) == requests_s
