"""The files of docs/several-hosts.md are read by what reads them in production, nothing on the page is
overlooked, and the certificates that docs/tls.md makes are accepted."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from services.common.config.settings_tree.reader import read_values
from services.common.config.settings_tree.views import ROUTER, WORKER_WITH_FILE
from services.common.config.tls import InternalTls
from services.common.config.types import Role
from services.common.rpc.mutual_tls import mutual_tls
from tests.hosts.addresses import addresses_of, over_ipv6
from tests.hosts.page import count_of_fences, read_blocks
from tests.hosts.services import read_unit
from tests.manifests.container import REPOSITORY

PAGE = "several-hosts.md"
BLOCKS = read_blocks(PAGE)


def test_every_block_says_where_it_belongs() -> None:
    assert len(BLOCKS) == count_of_fences(PAGE)
    assert {name for block in BLOCKS for name in block.hosts} == set(addresses_of(PAGE))


def test_the_files_are_valid() -> None:
    seen = set()
    for block in BLOCKS:
        match (block.path or "").rpartition("/")[2]:
            case "router.yaml":
                read_values(replace(ROUTER, secrets=()), yaml.safe_load(block.text))
            case "worker.yaml":
                read_values(replace(WORKER_WITH_FILE, secrets=()), yaml.safe_load(block.text))
            case name if name.endswith(".service"):
                assert read_unit(block.text, "decode").restart
            case other:
                assert other in ("", "redis.conf", "worker.env", "nftables.conf"), other
        seen.add(block.path)
    assert len(seen - {None}) == 7


def test_each_worker_has_a_name_and_an_address_of_its_own() -> None:
    addresses = addresses_of(PAGE)
    variables = {block.hosts: block.text for block in BLOCKS if block.path == "/etc/baton/worker.env"}
    assert variables == {
        (name,): f"BATON_HOST={addresses[name]}\nBATON_NAME={name}\n" for name in ("p1", "d1", "d2")
    }


def test_the_page_over_ipv6_has_no_other_address() -> None:
    text = "".join(over_ipv6(block.text) for block in BLOCKS)
    assert not re.findall(r"\d+\.\d+\.\d+\.\d+", text)
    assert "@[fd77::10]:6379" in text


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no command openssl")
def test_the_certificates_of_the_page_about_tls_are_accepted(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / "tls.md").read_text()
    (commands,) = re.findall(r"^```console\n(\$ openssl .*?)^```$", text, re.M | re.S)
    script = "".join(line.removeprefix("$ ") for line in commands.splitlines(keepends=True))
    subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    roles: dict[str, Role] = {"prefill-0": "prefill", "decode-0": "decode"}
    for name, role in roles.items():
        mutual_tls(
            InternalTls(
                cert_file=tmp_path / f"{name}.crt",
                key_file=tmp_path / f"{name}.key",
                ca_file=tmp_path / "ca.crt",
                domain="chat.baton.internal",
            ),
            role,
        )
