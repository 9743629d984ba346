"""Without API keys a router serves on loopback alone, unless its configuration says `auth: none`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import yaml
from structlog.testing import capture_logs

from baton.base.errors import BatonError, ErrorKind
from services.cli.up import settings
from services.cli.up.local_cluster import router_config
from services.common.config.router import RouterConfig, check_public_access
from services.common.config.settings_tree.settings import Settings
from services.common.config.tls import Auth
from services.router.app import Router
from tests.router.conftest import SiteMaker
from tests.router.http_client import http


def config(**given: Any) -> RouterConfig:
    return RouterConfig(model="m", served_model_name="m", **given)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org"])
async def test_beyond_loopback_keys_or_none_are_needed(host: str) -> None:
    with pytest.raises(BatonError, match="auth: none to serve everyone") as refusal:
        Router(config(host=host))
    assert refusal.value.kind is ErrorKind.INVALID
    for auth in ("none", Auth(none=True), Auth(api_keys_file=Path("keys")), Auth(redis_keys=True)):
        one = config(host=host, auth=auth)
        check_public_access(one.host, one.auth)
        # As it reaches a router's process.
        assert RouterConfig.model_validate_json(one.model_dump_json()) == one


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    check_public_access(host, None)


async def test_none_is_a_warning_and_serves(site: SiteMaker) -> None:
    with capture_logs() as logs:
        async with site(host="0.0.0.0", auth="none") as here:
            here.addresses["http"] = here.addresses["http"].replace("0.0.0.0", "127.0.0.1")
            async with http(here) as client:
                assert (await client.get("/v1/models")).status_code == 200
    assert [log["host"] for log in logs if log["event"] == "public_ports_without_api_keys"] == ["0.0.0.0"]


def up(folder: Path, *flags: str, **given: Any) -> Settings:
    (folder / "up.yaml").write_text(yaml.safe_dump(given))
    parser = argparse.ArgumentParser()
    settings.add_flags(parser)
    return settings.load(parser.parse_args(["-c", str(folder / "up.yaml"), *flags]), {})


def test_up_says_so_before_it_starts_anything(tmp_path: Path) -> None:
    everywhere = {"host": "0.0.0.0"}
    with pytest.raises(BatonError, match="auth: none to serve everyone"):
        up(tmp_path, router=everywhere)
    assert router_config(up(tmp_path, "--auth", "none", router=everywhere), tmp_path).auth == Auth(none=True)
    keyed = up(tmp_path, router=everywhere, auth={"api_keys_file": "keys"})
    assert router_config(keyed, tmp_path).auth == Auth(api_keys_file=Path("keys"))
    for wrong in ("some", {"none": True, "redis_keys": True}, {"keys": 1}):
        with pytest.raises(BatonError, match="auth"):
            up(tmp_path, auth=wrong)
