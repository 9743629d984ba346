"""Events that a router records: every request, refusal, change of keys and admin action, and never
content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton.v1.admin_pb2 import DrainRequest
from services.common.config.tls import Auth
from services.common.observability.audit_chain import verify
from tests.router.conftest import MODEL, SiteMaker, ids_request
from tests.router.http_client import http
from tests.router.tenants.test_tenants_file import file_of, sha256, tenant

SECRETS = ("sk-1", "sk-wrong", "sk-3", "canary-prompt", "canary-path", "canary-model")


def events(path: Path) -> list[dict[str, Any]]:
    """Without what differs from run to run."""
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    for one in found:
        for name in ("time", "previous", "line", "request_id"):
            one.pop(name, None)
    return found


async def test_everything_is_recorded_without_content(
    site: SiteMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, path = tmp_path / "tenants", tmp_path / "audit"
    limited = f"- {{name: b, keys: [{{id: two, sha256: '{sha256('sk-2')}', scopes: [models]}}]}}\n"
    keys.write_text(file_of(tenant("a", "sk-1", requests_per_minute=3), limited))
    monkeypatch.setattr("services.router.auth.tenant_keys.LOOK_S", 0.0)
    async with site(auth=Auth(tenants_file=keys), audit_log=path) as here, http(here) as client:
        bodies: list[dict[str, Any]] = [
            {"model": MODEL, "prompt": "canary-prompt", "max_tokens": 3},
            {"model": "canary-model", "prompt": "canary-prompt"},
        ]
        for key in ("sk-1", "sk-wrong", "sk-2"):
            client.headers["authorization"] = f"Bearer {key}"
            await client.post("/v1/completions", json=bodies[0])
        await client.get("/canary-path?canary-prompt", headers={"authorization": ""})
        client.headers["authorization"] = "Bearer sk-1"
        await client.post("/v1/completions", json=bodies[1])
        metadata = (("authorization", "Bearer sk-1"),)
        async for _ in here.stub.Generate(ids_request([1, 2], 4), metadata=metadata):
            pass
        with pytest.raises(grpc.aio.AioRpcError):
            await here.admin.Drain(DrainRequest(worker="canary-path"))
        for resume in (False, True, True):
            await here.admin.Drain(DrainRequest(worker="decode-0", resume=resume))
        keys.write_text(file_of(tenant("a", "sk-3"), limited))
        await client.get("/v1/models", headers={"authorization": "Bearer sk-3"})
    recorded = events(path)
    one, three = sha256("sk-1")[:12], sha256("sk-3")[:12]
    request = {"event": "request", "key_id": one, "tenant": "a", "model": MODEL}
    assert [event for event in recorded if event["event"] != "key"] == [
        {"event": "opened", "outcome": "ok"},
        request
        | {"outcome": "length", "route": "/v1/completions", "prompt_tokens": 13, "completion_tokens": 3},
        {"event": "authentication", "outcome": "unauthenticated", "route": "/v1/completions"},
        {
            "event": "authentication",
            "outcome": "forbidden",
            "key_id": "two",
            "tenant": "b",
            "route": "/v1/completions",
        },
        {"event": "authentication", "outcome": "unauthenticated", "route": "unknown"},
        {
            "event": "refused",
            "outcome": "not_found",
            "key_id": one,
            "tenant": "a",
            "route": "/v1/completions",
        },
        request
        | {
            "outcome": "length",
            "route": "/baton.v1.RouterService/Generate",
            "prompt_tokens": 2,
            "completion_tokens": 4,
        },
        {"event": "admin", "outcome": "drain", "target": "decode-0"},
        {"event": "admin", "outcome": "resume", "target": "decode-0"},
    ]
    changes = {
        (event["outcome"], event["key_id"], event["tenant"]) for event in recorded if event["event"] == "key"
    }
    assert changes == {("removed", one, "a"), ("added", three, "a")}
    text = path.read_text()
    assert not [secret for secret in SECRETS if secret in text]
    assert verify([path]).last_line == len(recorded)


async def test_requests_of_one_call_have_lines_of_their_own(site: SiteMaker, tmp_path: Path) -> None:
    """Without keys there is a log too; its lines say so by naming none."""
    path = tmp_path / "audit"
    async with site(audit_log=path) as here, http(here) as client:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "n": 2, "max_tokens": 1}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        assert (await client.get("/metrics")).text.count("baton_router_audit_lines_total{") == 1
    recorded = events(path)[1:]
    assert [(one["event"], one["route"], "key_id" in one) for one in recorded] == [
        ("request", "/v1/chat/completions", False)
    ] * 2
