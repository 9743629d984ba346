"""Tokens, version, methods and paths of the HTTP API; that disconnected clients are not logged as errors."""

from __future__ import annotations

import asyncio
import importlib.metadata
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from services.router.api.http_api import HttpApi
from tests.router.conftest import MODEL, SiteMaker, until
from tests.router.fake_model import VOCAB
from tests.router.http_client import complete, http

GETS = ("/health", "/ready", "/version", "/v1/models", f"/v1/models/{MODEL}", "/openapi.json", "/docs")
POSTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")


async def test_tokenize_and_detokenize(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        asked: dict[str, Any] = {"model": MODEL, "prompt": "hé", "return_token_strs": True}
        body = (await client.post("/tokenize", json=asked)).json()
        ids = list("hé".encode())
        assert (body["count"], body["max_model_len"], body["tokens"]) == (3, 256, ids)
        assert body["token_strs"] == ["h", "Ã", "©"]
        assert (await client.post("/tokenize", json={"prompt": "a"})).json()["token_strs"] is None
        assert (await client.post("/tokenize", json={"prompt": ""})).json()["count"] == 0
        text = (await client.post("/detokenize", json={"tokens": [*ids, 256]})).json()
        assert text == {"prompt": "hé<|end|>"}
        refused: list[tuple[str, dict[str, Any], int]] = [
            ("/tokenize", {}, 400),
            ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400),
            ("/tokenize", {"prompt": 5}, 400),
            ("/tokenize", {"prompt": "a", "model": "other"}, 404),
            ("/detokenize", {"tokens": [VOCAB]}, 400),
            ("/detokenize", {"tokens": "a"}, 400),
            ("/detokenize", {}, 400),
        ]
        for path, asked, status in refused:
            response = await client.post(path, json=asked)
            assert response.status_code == status, (asked, response.text)
            assert response.json()["error"]["message"]


async def test_version(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        installed = importlib.metadata.version("baton-serve")
        assert (await client.get("/version")).json() == {"version": installed}


async def test_methods_and_paths(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        for path in GETS:
            head = await client.head(path)
            assert (head.status_code, head.content) == (200, b"")
        wrong = [("POST", path) for path in GETS] + [
            (method, path) for path in POSTS for method in ("GET", "PUT")
        ]
        for method, path in wrong:
            response = await client.request(method, path)
            assert response.status_code == 405, path
            assert response.headers["allow"]
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        for path in ("/", "/v1", "/v1/nothing", "/health/", "/v1/completions/"):
            response = await client.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found"), path
            head = await client.head(path)
            assert (head.status_code, head.content) == (404, b"")


async def test_routes_can_be_added(site: SiteMaker) -> None:
    async def more(request: Request) -> PlainTextResponse:
        return PlainTextResponse("more")

    async with site() as here:
        router = here.router
        api = HttpApi(router.admission, router.dispatcher, router.readiness, [Route("/more", more)])
        assert api.app.url_path_for("more") == "/more"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_disconnected_client_is_not_logged_as_an_error(
    site: SiteMaker, stream: bool, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with site() as here:
        here.worker("decode-0").behaviour.step_s = 0.02
        async with http(here) as client:
            call = asyncio.create_task(complete(client, max_tokens=200, stream=stream, n=2))
            await until(lambda: here.worker("decode-0").decode.used_slots == 2)
            await asyncio.sleep(0.1)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        host, port = here.addresses["http"].split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await writer.wait_closed()
        await here.quiet()
        await asyncio.sleep(0.05)
    printed = "".join(capsys.readouterr()) + caplog.text
    assert "worker_found" in printed
    assert "error" not in printed.lower()
    assert "exception" not in printed.lower()
