"""The web page of the admin HTTP port: its files, its status, its prompts, and who may use them."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from google.protobuf import json_format

from baton.v1.admin_pb2 import AdminServiceGetStatusRequest, AdminServiceGetStatusResponse, WorkerStatus
from baton.v1.worker_pb2 import SLOT_STATE_FREE
from services.common.config.router import RouterConfig
from services.common.config.tls import Auth
from services.router.auth.scopes import UI_FILES
from services.router.ui import routes, snapshots
from tests.router.conftest import MODEL, Site, SiteMaker

STATIC = Path(routes.__file__).parent / "static"
PROMPT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}


def admin(here: Site, **headers: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"http://{here.addresses['admin_http']}",
        timeout=10,
        headers=headers,
        trust_env=False,
        verify=False,
    )


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def events(
    client: httpx.AsyncClient, path: str = "/ui/chat", **fields: Any
) -> AsyncGenerator[dict[str, Any]]:
    async with client.stream("POST", path, json={**PROMPT, **fields}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))


def shape(document: Any) -> Any:
    """Names and kinds of what is in a JSON document."""
    if isinstance(document, dict):
        return {name: shape(value) for name, value in document.items()}
    return [shape(document[0])] if isinstance(document, list) and document else type(document).__name__


async def test_the_files_load_nothing_from_elsewhere(site: SiteMaker) -> None:
    assert {path.name for path in STATIC.iterdir()} == {"index.html", *UI_FILES}
    async with site() as here, admin(here) as client:
        for path in ("/", *(f"/ui/{name}" for name in UI_FILES)):
            answer = await client.get(path)
            assert answer.status_code == 200
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            text = answer.text.replace("http://www.w3.org/2000/svg", "")
            assert "://" not in text, path
            # What would make markup of text, or be blocked by the policy.
            for banned in (
                "innerHTML",
                "outerHTML",
                "insertAdjacent",
                "document.write",
                "eval(",
                " style=",
                " onc",
            ):
                assert banned not in text, (path, banned)
        assert (await client.get("/ui/nothing.js")).status_code == 404
        assert (await client.get("/", headers={"host": "evil.example"})).status_code == 403


async def test_the_status_is_that_of_baton_status(site: SiteMaker) -> None:
    async with site() as here, admin(here) as client:
        answer = (await client.get("/ui/status")).json()
        assert (answer["known_workers"], answer["chats"]) == (2, True)
        assert answer["context_tokens"] == here.router.admission.model.max_context_tokens
        status = await here.admin.GetStatus(AdminServiceGetStatusRequest(), timeout=5)
        for worker in status.workers:
            worker.worker.report.ClearField("links")
            worker.worker.report.ClearField("slot_states")
        expected = json_format.MessageToDict(status, always_print_fields_with_no_presence=True)
        assert shape(answer["status"]) == shape(expected)
        assert [w["worker"]["identity"]["name"] for w in answer["status"]["workers"]] == [
            "prefill-0",
            "decode-0",
        ]


async def test_all_who_poll_share_one_status_of_bounded_size(
    site: SiteMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def full(status: object, request: AdminServiceGetStatusRequest) -> AdminServiceGetStatusResponse:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.01)
        worker = WorkerStatus()
        worker.worker.report.slot_states.extend([SLOT_STATE_FREE] * 1000)
        worker.worker.report.links.add()
        return AdminServiceGetStatusResponse(workers=[worker] * (snapshots.MOST_WORKERS + 5))

    monkeypatch.setattr("services.router.observability.status.Status.full", full)
    monkeypatch.setattr(snapshots, "FRESH_S", 60.0)
    async with site() as here, admin(here) as client:
        answers = await asyncio.gather(*(client.get("/ui/status") for _ in range(5)))
        assert asked == 1
        assert len(answers[0].content) < 1024 * 1024
        shown = answers[0].json()
        assert shown["known_workers"] == snapshots.MOST_WORKERS + 5
        assert len(shown["status"]["workers"]) == snapshots.MOST_WORKERS
        assert shown["status"]["workers"][0]["worker"]["audit"]["slotStates"] == []
        monkeypatch.setattr(snapshots, "FRESH_S", 0.0)
        await client.get("/ui/status")
        assert asked == 2


async def test_a_prompt_is_streamed_with_its_trace(site: SiteMaker) -> None:
    async with site() as here, admin(here) as client:
        for path, fields in (("/ui/chat", {}), ("/ui/completion", {"prompt": "hi"})):
            body = {"messages": None, **fields} if fields else {}
            *parts, end = [event async for event in events(client, path, **body)]
            assert all(set(part) == {"text"} for part in parts)
            assert (end["finish"], end["completion_tokens"]) == ("length", 4)
            trace = end["trace"]
            assert (trace["prefill_worker"], trace["decode_worker"]) == ("prefill-0", "decode-0")
            assert [span[0] for span in trace["spans"]] == ["queue", "prefill", "transfer", "decode"]
            assert trace["spans"][0][1] == 0
            for _, begin, stop in trace["spans"]:
                assert 0 <= begin <= stop
        await here.quiet()


async def test_prompts_have_the_limits_of_the_public_api(site: SiteMaker) -> None:
    async with site() as here, admin(here) as client:
        for fields in ({"n": 2}, {"max_tokens": -1}, {"temperature": -1}, {"model": "other"}):
            answer = await client.post("/ui/chat", json={**PROMPT, **fields})
            assert answer.status_code in (400, 404), fields
            assert answer.json()["error"]["message"]
        assert (await client.post("/ui/chat", content=b"x" * 300_000)).status_code == 413
        assert (
            await client.post("/ui/chat", content=b"{}", headers={"content-type": "text/plain"})
        ).status_code == 415
        assert here.router.dispatcher.running == 0


async def test_a_client_that_leaves_ends_its_prompt(site: SiteMaker) -> None:
    async with site() as here, admin(here) as client:
        here.worker("decode-0").behaviour.step_s = 0.05
        stream = events(client, max_tokens=200)
        await anext(stream)
        await stream.aclose()
        await here.quiet()


async def test_an_error_after_the_first_part_is_an_event(site: SiteMaker) -> None:
    async with site(request_timeout_s=0.5) as here, admin(here) as client:
        here.worker("decode-0").behaviour.step_s = 0.05
        *_, last = [event async for event in events(client, max_tokens=200)]
        assert "deadline" in last["error"]["message"]


async def test_keys(site: SiteMaker, tmp_path: Path) -> None:
    given = {"admin": "[admin]", "generate": "[generate]", "metrics": "[metrics]"}
    keys = ", ".join(
        f"{{id: {name}, sha256: '{hashlib.sha256(name.encode()).hexdigest()}', scopes: {scopes}}}"
        for name, scopes in given.items()
    )
    (tmp_path / "tenants").write_text(f"tenants: [{{name: acme, keys: [{keys}]}}]\n")
    async with site(auth=Auth(tenants_file=tmp_path / "tenants")) as here, admin(here) as client:
        for path in ("/", "/ui/page.js", "/metrics", "/health", "/ready"):
            assert (await client.get(path)).status_code == 200, path
        for key, status, prompt in (
            (None, 401, 401),
            ("other", 401, 401),
            ("admin", 200, 403),
            ("generate", 403, 200),
            ("metrics", 403, 403),
        ):
            headers = {} if key is None else bearer(key)
            assert (await client.get("/ui/status", headers=headers)).status_code == status, key
            for path in ("/ui/chat", "/ui/completion"):
                answer = await client.post(path, json={**PROMPT, "prompt": "x"}, headers=headers)
                assert answer.status_code in (prompt, 400 if prompt == 200 else prompt), (key, path)


@pytest.mark.parametrize(
    ("settings", "served"),
    [
        ({}, True),
        ({"ui": False}, False),
        ({"admin_http_host": "0.0.0.0"}, False),
        ({"admin_http_host": "0.0.0.0", "auth": "none"}, False),
        ({"admin_http_host": "0.0.0.0", "auth": {"api_keys_file": "keys"}}, True),
        ({"admin_http_host": "0.0.0.0", "auth": "none", "ui": False}, False),
        ({"admin_http_host": "0.0.0.0", "auth": "none", "require_tls": True}, False),
    ],
)
async def test_where_it_is_served(site: SiteMaker, settings: dict[str, Any], served: bool) -> None:
    config = RouterConfig(model="m", served_model_name="m", **settings)
    assert config.serves_ui is served
    if "require_tls" in settings or isinstance(settings.get("auth"), dict):
        return
    async with site(prefill=0, decode=0, **settings) as here:
        port = here.addresses["admin_http"].rpartition(":")[2]
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, verify=False
        ) as client:
            for path in ("/", "/ui/page.js", "/ui/status"):
                assert (await client.get(path)).status_code == (200 if served else 404), path
            assert (await client.post("/ui/chat", json={})).status_code == (400 if served else 404)
            assert (await client.get("/health")).status_code == 200
