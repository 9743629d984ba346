"""Settings of `baton ray supervise` as read from its file, and files that are refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from services.cli.main import main
from services.cli.parse import parse
from services.cli.ray.supervise import cluster_id, supervise_config
from services.common.config.cluster import ClusterConfig


def written(folder: Path, **changes: Any) -> Path:
    (folder / "secret").write_text("a-secret-of-sixteen-characters")
    settings: dict[str, Any] = {
        "model": "/models/on-ray-nodes-alone",
        "cluster_secret_file": str(folder / "secret"),
        "state": {"namespace": "Prod_1", "redis_url": "redis://redis:6379"},
        "supervision": {"ray_address": "head:6379"},
        "prefill": 1,
        "decode": 2,
        "drain_s": 600,
    }
    (folder / "supervisor.yaml").write_text(yaml.safe_dump(settings | changes))
    return folder / "supervisor.yaml"


def loaded(file: Path, **variables: str) -> ClusterConfig:
    arguments = parse(["ray", "supervise", "--config", str(file)])
    return supervise_config(arguments, {"BATON_HOST": "10.0.0.9", "BATON_NAME": "pod", **variables})


def test_roles_have_engines_of_their_own_and_no_secret(tmp_path: Path) -> None:
    roles = {"prefill": {"chunk_tokens": 512}, "decode": {"slots": 64, "block_tokens": 32}}
    config = loaded(written(tmp_path, engine={"block_tokens": 16}, engine_of_role=roles))
    workers = {worker.name: worker for worker in config.workers}
    assert list(workers) == ["prefill-0", "decode-0", "decode-1"]
    assert (workers["prefill-0"].engine.chunk_tokens, workers["prefill-0"].engine.block_tokens) == (512, 16)
    assert (workers["decode-1"].engine.slots, workers["decode-1"].engine.block_tokens) == (64, 32)
    assert "a-secret-of-sixteen" not in config.model_dump_json()
    assert all(worker.drain_s < config.drain_s < 600 for worker in workers.values())
    assert (config.host, config.bound_admin_http_host, config.name) == ("10.0.0.9", "10.0.0.9", "pod")


def test_the_admin_port_listens_where_the_environment_says(tmp_path: Path) -> None:
    config = loaded(written(tmp_path), BATON_LISTEN_HOST="::")
    assert (config.host, config.bound_admin_http_host) == ("10.0.0.9", "::")


def test_the_ray_namespace_is_the_same_at_each_start_and_differs_by_cluster() -> None:
    assert cluster_id("Prod_1") == cluster_id("Prod_1")
    assert len({cluster_id(name) for name in ("Prod_1", "prod-1", "prod_1")}) == 3


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"supervision": {"ray_address": "local"}}, "supervision.ray_address"),
        ({"prefill": 0, "decode": 0}, "prefill and decode"),
        ({"state": {"namespace": "n", "redis_url": "redis://:password@redis"}}, "redis_url_file"),
        ({"state": {"namespace": "n", "redis_url": "none"}}, "state.redis_url"),
        ({"state": {"namespace": "n", "redis_url_file": "/away"}}, "/away"),
        ({"cluster_secret_file": "/away"}, "/away"),
        ({"engine_of_role": {"decode": {"slotz": 1}}}, "slotz"),
        ({"router": {}}, "router"),
        ({"worker": {"port": 50060}, "transfer": {"transfer_port": 50070}}, "transfer.transfer_port"),
    ],
)
def test_what_is_wrong_is_one_line(
    changes: dict[str, Any], names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ray", "supervise", "--config", str(written(tmp_path, **changes))]) == 2
    err = capsys.readouterr().err
    assert names in err
    assert "password" not in err
    assert len(err.splitlines()) == 1
