"""Schemathesis, which makes requests of the OpenAPI document, valid ones and others, finds nothing.

No answer is a server's error but a documented 503, which has Retry-After as 429 has; bodies, headers,
statuses and content types are those of the document; what the document refuses is refused; methods that it
does not have are answered as such.

It runs in an environment of its own (`tests/support/environments.py`) against a router over fake workers that
stores responses. A smaller share of the same is in `test_fuzz.py`.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest

from baton.state.embedded import EmbeddedServer
from services.router.workers import directory
from tests.router.conftest import MODEL, SiteMaker
from tests.router.http_client import http
from tests.support.environments import Environment

# The document cannot say all that is refused: the meaning of values, and the sizes of vocabulary and context.
CONFIG = """
[checks]
not_a_server_error.expected-statuses = ["2xx", "4xx", "503"]
positive_data_acceptance.enabled = false
"""
# Of each operation and each kind: about 15 times as many in all.
EXAMPLES = 100
_CACHE = Path.home() / ".cache" / "baton"
_CASES = re.compile(r"(\d+) generated, (\d+) passed")


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_it_finds_nothing(site: SiteMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "HEARTBEAT_S", 2.0)  # workers share this process with all else
    cache = Path(os.environ.get("BATON_CLIENTS") or _CACHE / "clients")
    environment = Environment(cache / "schemathesis", ("schemathesis",))
    python = await asyncio.to_thread(lambda: environment.python)
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    server = await EmbeddedServer.start()
    state = {"redis_url": server.url, "namespace": "ours", "journal_key": "5a" * 32, "embedded": True}
    storing = {"state": state, "stored_responses": {"ttl_s": 3600}}
    try:
        async with site(slots=256, max_waiting=4096, **storing) as here:
            here.worker("decode-0").behaviour.step_s = 0.001
            async with http(here) as client:
                asked = {"model": MODEL, "input": "a", "max_output_tokens": 2}
                stored = (await client.post("/v1/responses", json=asked)).json()["id"]
            document = f"http://{here.addresses['http']}/openapi.json"
            code, output = await _run(python, document, tmp_path, stored)
            assert code == 0, output[-20_000:]
            cases = _CASES.search(output)
            assert cases is not None, output
            assert int(cases[1]) > 13 * EXAMPLES
            outcomes = here.router.observations.outcomes
            assert here.router.store.responses is not None
            reads = here.router.store.responses.reads
            print(f"schemathesis {environment.version}: {cases[0]}; {dict(outcomes)}; {dict(reads)}")
            assert reads["found"] >= EXAMPLES / 10
            assert outcomes["length"] + outcomes["stop"] >= 2 * EXAMPLES
            await here.quiet()
    finally:
        await server.stop()


async def _run(python: Path, document: str, folder: Path, stored: str) -> tuple[int | None, str]:
    """The exit status and the output. `stored`: the id of a response."""
    process = await asyncio.create_subprocess_exec(
        *(python, "-m", "schemathesis.cli", "run", document, "--max-examples", str(EXAMPLES)),
        *("--seed", "1", "--generation-database", "none", "--request-timeout", "60", "--no-color"),
        *("--continue-on-failure", "--warnings", "off"),
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent),
            "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
            "STORED_RESPONSE": stored,
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, output.decode(errors="replace")
