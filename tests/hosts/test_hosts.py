"""Several hosts: the switch between them, and the cluster of docs/several-hosts.md cut apart."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.manifests.namespace import run_tests, why_not

SCENARIOS = Path(__file__).with_name("scenarios")
_TAP = "ip tuntap add dev tap0 mode tap"
_WHY = why_not(_TAP) or next(
    (f"no command {one}" for one in ("openssl", "curl", "bash") if not shutil.which(one)), None
)
pytestmark = pytest.mark.skipif(_WHY is not None, reason=f"needs namespaces: {_WHY}")


def test_the_switch() -> None:
    run_tests(SCENARIOS / "scenario_switch.py", within_s=60)


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_the_cluster_cut_apart() -> None:
    run_tests(SCENARIOS / "scenario_cluster.py", within_s=1200)


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_bad_links_and_hosts_that_move() -> None:
    run_tests(SCENARIOS / "scenario_moves.py", within_s=1200)


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_without_ipv4() -> None:
    run_tests(SCENARIOS / "scenario_ipv6.py", within_s=600)


@pytest.mark.slow
def test_clients_that_are_cut_off() -> None:
    run_tests(SCENARIOS / "scenario_silent_clients.py", within_s=120)
