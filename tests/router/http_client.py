"""An HTTP client of a site: whole answers and streams."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx

from tests.router.conftest import MODEL, Site


def http(here: Site) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{here.addresses['http']}", timeout=10, verify=False)


async def metric(here: Site, name: str, **headers: str) -> dict[str, float]:
    """The values of a metric, by its labels as the admin port prints them."""
    async with httpx.AsyncClient(base_url=f"http://{here.addresses['admin_http']}", verify=False) as client:
        answer = await client.get("/metrics", headers=headers)
    assert answer.status_code == 200
    samples = re.findall(rf"^{name}{{(.*)}} (\S+)$", answer.text, re.MULTILINE)
    return {labels: float(value) for labels, value in samples}


async def complete(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "prompt": [1, 2, 3], "temperature": 0, "ignore_eos": True, **fields}
    return await client.post("/v1/completions", json=body)


async def events(client: httpx.AsyncClient, **fields: Any) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream, which must end with [DONE] (or else with an error)."""
    body = {
        "model": MODEL,
        "prompt": [1, 2, 3],
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **fields,
    }
    done = failed = False
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if not line:
                continue
            assert not done
            assert line.startswith("data: ")
            if line == "data: [DONE]":
                done = True
                continue
            chunk = json.loads(line.removeprefix("data: "))
            failed = "error" in chunk
            yield chunk
    assert done != failed
