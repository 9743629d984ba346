"""Each client does its own program's work against a cluster on the CPU, without a change to client or server.

A program (`programs/CLIENT.py`, run by the client's own Python) gets the server's address, the model's name
and its folder, asserts what its client returned and exits with 0. Versions go to stdout (`pytest -s`).
"""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.demo_training.evaluate import DEMO_MODEL
from tests.clients.environments import PACKAGES, environment_of
from tests.e2e.support.cluster import MODEL, Cluster, assert_all_free, baton_up

PROGRAMS = Path(__file__).parent / "programs"
# What clients write beside their work goes to a folder of the test; nothing is looked up on a hub.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
_RUN_S = 400
# How the demo model is made to write calls, which its own template does not know.
TOOLS = ("--tool-calls", "hermes")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with baton_up(DEMO_MODEL, "--prefill", "1", "--decode", "1", "--device", "cpu", *TOOLS) as running:
        yield running


def test_every_client_has_a_program() -> None:
    assert {program.stem.replace("_", "-") for program in PROGRAMS.glob("*.py")} == set(PACKAGES)


@pytest.mark.timeout(1800)  # the first run installs it
@pytest.mark.parametrize("client", list(PACKAGES))
def test_the_client_runs_unchanged(client: str, cluster: Cluster, tmp_path: Path) -> None:
    program, environment = PROGRAMS / f"{client.replace('-', '_')}.py", environment_of(client)
    ran = subprocess.run(
        [environment.python, "-P", program, cluster.url, MODEL, DEMO_MODEL],
        cwd=tmp_path,
        env={**os.environ, **OFFLINE, "OPENAI_API_KEY": "unused", "PYTHONPATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=_RUN_S,
        check=False,
    )
    assert ran.returncode == 0, f"{client}\n{ran.stdout[-4000:]}\n{ran.stderr[-8000:]}"
    print(f"{client} {environment.version}: {ran.stdout.strip().splitlines()[-1]}")
    asyncio.run(assert_all_free(cluster, within_s=5))
