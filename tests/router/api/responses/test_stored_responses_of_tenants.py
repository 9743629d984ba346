"""Stored responses of tenants: read, continued and deleted by their tenant alone, within its limits."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from baton.state.embedded import EmbeddedServer
from tests.router.api.responses.storing_routers import client_of, create, responses_of, storing
from tests.router.auth.test_tenants import auth
from tests.router.conftest import SiteMaker, until
from tests.router.http_client import http
from tests.router.observability.test_audit import events as audit_events
from tests.router.tenants.test_tenants_file import tenant


async def test_a_tenants_responses_are_its_own(
    site: SiteMaker, server: EmbeddedServer, tmp_path: Path
) -> None:
    keys = auth(tmp_path, tenant("acme", "sk-1"), tenant("other", "sk-2"))
    audit = tmp_path / "audit"
    async with site(**storing(server), auth=keys, audit_log=audit) as here:
        async with client_of(here, "sk-1") as acme, client_of(here, "sk-2") as other:
            first = await create(acme, "a secret")
            for written in (False, True):  # while it waits here, and once it is in Redis
                assert (responses_of(here).pending == 0) is written
                for refused in (
                    other.responses.retrieve(first.id),
                    other.responses.delete(first.id),
                    create(other, "b", previous_response_id=first.id),
                ):
                    with pytest.raises(openai.NotFoundError):
                        await refused
                await until(lambda: responses_of(here).pending == 0)
            again = await acme.responses.retrieve(first.id)
            assert again.output_text == first.output_text
        async with http(here) as client:
            assert (await client.get(f"/v1/responses/{first.id}")).status_code == 401
            # Another tenant's is refused in the words for one that never was.
            key = {"authorization": "Bearer sk-2"}
            paths = (f"/v1/responses/{first.id}", f"/v1/responses/resp_{'0' * 32}")
            foreign, unknown = [await client.get(path, headers=key) for path in paths]
            assert (foreign.status_code, foreign.content) == (404, unknown.content)
            mine = {"authorization": "Bearer sk-1"}
            assert (await client.get(f"{paths[0]}/input_items", headers=mine)).status_code == 200
            assert (await client.delete(paths[0], headers=mine)).status_code == 200
    recorded = [one for one in audit_events(audit) if one["event"] == "response"]
    path, failed = "/v1/responses/{response_id}", {"event": "response", "outcome": "not_found"}
    refused_ones = [one for one in recorded if one["outcome"] == "not_found"]
    assert [(one["tenant"], one["route"], set(one)) for one in refused_ones] == [
        ("other", path, {*failed, "key_id", "tenant", "route"})
    ] * 6
    assert [
        (one["outcome"], one["tenant"], one["route"], one["target"])
        for one in recorded
        if one["outcome"] != "not_found"
    ] == [
        ("read", "acme", path, first.id),
        ("read", "acme", f"{path}/input_items", first.id),
        ("deleted", "acme", path, first.id),
    ]
    assert "a secret" not in audit.read_text()


async def test_reading_counts_for_the_tenant(site: SiteMaker, server: EmbeddedServer, tmp_path: Path) -> None:
    keys = auth(tmp_path, tenant("acme", "sk-1", requests_per_minute=4), tenant("other", "sk-2"))
    async with site(**storing(server), auth=keys) as here, http(here) as client:
        client.headers["authorization"] = "Bearer sk-1"
        missing = f"/v1/responses/resp_{'0' * 32}"
        calls = (("GET", missing), ("GET", f"{missing}/input_items"), ("DELETE", missing), ("GET", missing))
        assert [(await client.request(*call)).status_code for call in calls] == [404] * 4
        answer = await client.get(missing)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        client.headers["authorization"] = "Bearer sk-2"
        assert (await client.get(missing)).status_code == 404
