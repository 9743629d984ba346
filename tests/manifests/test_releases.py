"""The rendered CPU chart as processes, in the reduced size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.manifests.namespace import run_tests, why_not

SCENARIOS = Path(__file__).with_name("scenarios")
pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"needs namespaces: {why_not()}")


@pytest.mark.slow
def test_a_release_with_tls_serves_and_replaces_its_pods() -> None:
    """The same is shown in make test by the rendered manifests and one group of workers
    (e2e/faults/test_worker_group.py)."""
    run_tests(SCENARIOS / "scenario_small.py", within_s=200)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_two_copies_of_the_chart_in_one_release() -> None:
    run_tests(SCENARIOS / "scenario_umbrella.py", within_s=400)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("topology", ["node", "split"])
def test_a_release_on_ipv6_alone(topology: str) -> None:
    run_tests(SCENARIOS / "scenario_ipv6.py", "-k", topology, within_s=400)


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_release_under_ray_with_tls() -> None:
    run_tests(SCENARIOS / "scenario_ray.py", within_s=600)


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("release", ["node-plain", "node-tls", "split-plain", "split-tls"])
def test_full_size(release: str) -> None:
    run_tests(SCENARIOS / "scenario_full.py", "-k", release, within_s=1200)
