"""Priorities and weights from the API and the file of tenants to the order in which workers get requests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.router.request.request import ClientCall
from services.router.tenants.account import TenantAccount
from services.router.tenants.priority import priority_of
from services.router.tenants.tenants_file import TenantLimits
from tests.router.auth.test_tenants import account, auth, bearer, generate, samples
from tests.router.conftest import MODEL, Site, SiteMaker, ids_request, until
from tests.router.http_client import complete, http
from tests.router.tenants.test_tenants_file import sha256

PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a", "max_output_tokens": 16},
}


def calls(here: Site, monkeypatch: pytest.MonkeyPatch) -> list[ClientCall]:
    """The calls whose requests enter the queue from now on."""
    entered: list[ClientCall] = []
    enter = here.router.queue.enter

    def recorded(call: ClientCall, *more: Any) -> Any:
        entered.append(call)
        return enter(call, *more)

    monkeypatch.setattr(here.router.queue, "enter", recorded)
    return entered


def entry(name: str, key: str, more: str) -> str:
    return f'- {{name: {name}, keys_sha256: ["{sha256(key)}"], {more}}}\n'


async def test_every_api_has_priorities(site: SiteMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site() as here, http(here) as client:
        entered = calls(here, monkeypatch)
        for path, body in PATHS.items():
            for priority in (3, 0, None, -5, 2**31 - 1):
                more = {"model": MODEL, "priority": priority}
                assert (await client.post(path, json=body | more)).status_code == 200
            assert [call.priority for call in entered] == [3, 0, 0, 0, 8]
            entered.clear()
            for wrong in (2**63, -(2**63) - 1, 1.5, "high"):
                answer = await client.post(path, json=body | {"model": MODEL, "priority": wrong})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
        async for _ in here.stub.Generate(ids_request([1], 2, priority=4)):
            pass
        async for _ in here.stub.Generate(ids_request([1], 2)):
            pass
        assert [call.priority for call in entered] == [4, 0]


def test_a_tenants_priority_is_the_most_urgent_that_its_requests_have() -> None:
    one = TenantAccount("a", TenantLimits(), lambda: 0.0)
    one.priority = -2
    assert [priority_of(one, asked) for asked in (-9, 0, 1, 5, 100)] == [-2, -2, -1, 3, 8]
    assert [priority_of(None, asked) for asked in (-9, 0, 1, 100)] == [0, 0, 1, 8]


async def test_weights_and_priorities_of_the_file_order_the_queue(
    site: SiteMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One slot: urgent requests first, then by weight."""
    entries = (
        entry("heavy", "sk-h", "weight: 3"),
        entry("light", "sk-l", "weight: 1"),
        entry("urgent", "sk-u", "priority: -1"),
    )
    async with site(slots=1, auth=auth(tmp_path, *entries)) as here, http(here) as client:
        assert (account(here, "heavy").weight, account(here, "urgent").priority) == (3, -1)
        # No bursts: so few requests would all be within them.
        monkeypatch.setattr("services.router.queue.request_order.BURST_TOKENS", 0.0)
        worker = here.worker("decode-0")
        worker.behaviour.step_s = 0.05
        first = asyncio.create_task(generate(here, "sk-operator", 200))
        await until(lambda: worker.decode.used_slots == 1)
        waiting = []
        for key, count in (("sk-l", 8), ("sk-h", 8), ("sk-u", 2)):
            for _ in range(count):
                waiting.append(asyncio.create_task(generate(here, key, 2)))
                await until(lambda: here.router.queue.waiting == len(waiting))
        client.headers.update(bearer("sk-operator"))
        seen = samples((await client.get("/metrics")).text)
        assert [seen["tenant_waiting_requests", one] for one in ("light", "heavy", "urgent")] == [8, 8, 2]
        worker.behaviour.step_s = 0.0
        await asyncio.gather(first, *waiting)
        placed = [one.tenant for one in worker.decode.reserves][1:]
        assert placed[:2] == ["urgent"] * 2
        assert placed[2:10].count("heavy") == 6
        seen = samples((await client.get("/metrics")).text)
        assert seen["tenant_placed_requests_total", "light"] == 8
        assert seen["tenant_waiting_requests", "light"] == 0
        assert seen["tenant_waited_seconds_total", "light"] > 0


async def test_a_tenant_does_not_fill_the_queue(site: SiteMaker, tmp_path: Path) -> None:
    entries = (entry("a", "sk-a", "weight: 1"), entry("b", "sk-b", "weight: 1"))
    async with (
        site(slots=1, max_waiting=10, queue_timeout_s=30, auth=auth(tmp_path, *entries)) as here,
        http(here) as client,
    ):
        worker = here.worker("decode-0")
        worker.behaviour.step_s = 0.05
        client.headers.update(bearer("sk-a"))
        waiting = [asyncio.create_task(generate(here, "sk-a", 100))]
        await until(lambda: worker.decode.used_slots == 1)
        for _ in range(8):
            waiting.append(asyncio.create_task(generate(here, "sk-a", 2)))
            await until(lambda: here.router.queue.waiting == len(waiting) - 1)
        refused = await complete(client, max_tokens=2)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "1"
        waiting.append(asyncio.create_task(generate(here, "sk-b", 2)))
        await until(lambda: here.router.queue.waiting == 9)
        worker.behaviour.step_s = 0.0
        assert await asyncio.gather(*waiting) == [100, *[2] * 9]
        assert account(here, "a").refused == {"queue_places": 1}
