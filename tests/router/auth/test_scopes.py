"""Each route of the public ports has a rule, and a key may do what its scopes say and nothing else."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from starlette.responses import Response
from starlette.routing import Mount, Route

from baton.base.errors import ErrorKind
from baton.rpc.grpc_errors import from_status
from baton.v1.router_pb2 import DESCRIPTOR, GetStatusRequest, ListModelsRequest
from services.common.config.tls import Auth
from services.router.auth import scopes
from services.router.auth.scopes import GRPC_RULES, HTTP_RULES, Access, check_grpc_rules, http_rule
from tests.router.conftest import MODEL, Site, SiteMaker, ids_request
from tests.router.http_client import complete, http, metric

SCOPES = ("generate", "models", "metrics")
GETS = (
    "/v1/models",
    f"/v1/models/{MODEL}",
    "/metrics",
    "/openapi.json",
    "/docs",
    "/health",
    "/ready",
    "/version",
)
POSTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")


@pytest.fixture
def auth(tmp_path: Path) -> Auth:
    """A key of each scope, named as it, one that may do nothing, and two for models."""
    given = {scope: f"scopes: [{scope}]" for scope in SCOPES}
    given |= {"nothing": "scopes: []", "ours": f"models: [{MODEL}]", "theirs": "models: [other]"}
    keys = ", ".join(
        f"{{id: {name}, sha256: '{hashlib.sha256(name.encode()).hexdigest()}', {fields}}}"
        for name, fields in given.items()
    )
    (tmp_path / "tenants").write_text(f"tenants: [{{name: acme, keys: [{keys}]}}]\n")
    return Auth(tenants_file=tmp_path / "tenants")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_http(site: SiteMaker, auth: Auth) -> None:
    async with site(auth=auth) as here, http(here) as client:
        permitted = 0
        for key in (*SCOPES, "nothing"):
            for path in (*GETS, *POSTS):
                rule = HTTP_RULES[path.replace(MODEL, "{model:path}")]
                method = client.get if path in GETS else client.post
                arguments: dict[str, Any] = {} if path in GETS else {"json": {}}
                answer = await method(path, headers=bearer(key), **arguments)
                may = isinstance(rule, Access) or rule == key
                permitted += may
                assert (answer.status_code != 403) is may, (key, path, answer.text)
                assert answer.status_code in ((200, 400) if may else (403,)), (key, path)
                if not may:
                    error = answer.json()["error"]
                    assert error["type"] == "permission_error"
                    assert error["message"] == f"this API key does not have the scope {rule}"
                    assert "www-authenticate" not in answer.headers
        assert permitted == 4 * 5 + 5 + 2 + 1
        forbidden = await metric(here, "baton_router_forbidden_total", **bearer("metrics"))
        assert forbidden == {'api="http",model="fake"': 4 * len((*GETS, *POSTS)) - permitted}
        assert (await client.get("/nothing", headers=bearer("nothing"))).status_code == 404
        assert (await client.get("/v1/completions", headers=bearer("models"))).status_code == 403


async def refusal(call: Any) -> ErrorKind | None:
    """The error of a call; None: it succeeds."""
    try:
        await call if not hasattr(call, "__aiter__") else [one async for one in call]
    except grpc.aio.AioRpcError as error:
        metadata: Any = error.trailing_metadata()
        return from_status(error.code(), error.details(), metadata).kind
    return None


async def test_grpc(site: SiteMaker, auth: Auth) -> None:
    async with site(auth=auth) as here:
        for key in (*SCOPES, "nothing"):
            metadata = tuple(bearer(key).items())
            calls = {
                "generate": here.stub.Generate(ids_request([1], 3), metadata=metadata),
                "models": here.stub.ListModels(ListModelsRequest(), metadata=metadata),
                "metrics": here.stub.GetStatus(GetStatusRequest(), metadata=metadata),
            }
            for scope, call in calls.items():
                kind = await refusal(call)
                assert kind is (None if scope == key else ErrorKind.FORBIDDEN), (key, scope, kind)


async def test_models_of_a_key(site: SiteMaker, auth: Auth) -> None:
    async with site(auth=auth) as here, http(here) as client:
        client.headers.update(bearer("ours"))
        assert (await complete(client, max_tokens=2)).status_code == 200
        assert len((await client.get("/v1/models")).json()["data"]) == 1
        client.headers.update(bearer("theirs"))
        assert (await complete(client, max_tokens=2)).status_code == 403
        assert (await client.post("/tokenize", json={"prompt": "a"})).status_code == 403
        assert (await client.get(f"/v1/models/{MODEL}")).status_code == 403
        assert (await client.get("/v1/models")).json()["data"] == []
        await check_theirs_over_grpc(here)
        assert here.worker("prefill-0").prefill.prompts[1:] == []


async def check_theirs_over_grpc(here: Site) -> None:
    metadata = tuple(bearer("theirs").items())
    assert await refusal(here.stub.Generate(ids_request([1], 3), metadata=metadata)) is ErrorKind.FORBIDDEN
    assert not (await here.stub.ListModels(ListModelsRequest(), metadata=metadata)).models


async def test_a_route_without_a_rule_does_not_start(
    site: SiteMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(HTTP_RULES, "/tokenize")
    with pytest.raises(LookupError, match="/tokenize"):
        async with site():
            pass
    monkeypatch.undo()
    monkeypatch.delitem(GRPC_RULES, "/baton.v1.RouterService/GetStatus")
    with pytest.raises(LookupError, match="RouterService/GetStatus"):
        check_grpc_rules([DESCRIPTOR.services_by_name["RouterService"]])
    with pytest.raises(LookupError, match="Mount"):
        http_rule(Mount("/docs", Route("/x", Response())))
    assert scopes.grpc_rule("/baton.v1.RouterService/GetStatus") is Access.ANY_KEY
