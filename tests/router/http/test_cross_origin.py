"""Requests that a web page in a browser on this machine may send to a router on loopback."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.router.conftest import MODEL, SiteMaker
from tests.router.raw_http import connect, get

BODY = json.dumps({"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 2}).encode()


def request(*headers: str, host: str = "localhost", path: str = "/v1/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"host: {host}", *headers, f"content-length: {len(BODY)}", "", ""]
    return "\r\n".join(lines).encode() + BODY


async def answer(address: str, sent: bytes) -> tuple[int, dict[str, Any]]:
    async with connect(address) as raw:
        await raw.send(sent)
        status, body = await raw.answer()
        return status, json.loads(body)


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("content-type: text/plain", 415),
        ("content-type: text/plain;charset=UTF-8", 415),
        ("content-type: application/x-www-form-urlencoded", 415),
        ("content-type: multipart/form-data; boundary=a", 415),
        ("content-type: ", 415),
        ("content-type: application/json", 200),
        ("content-type: Application/JSON; charset=utf-8", 200),
        ("accept: */*", 200),  # no content type: not what a browser's form sends
        ("origin: http://evil.example", 403),  # nor a blob without one, by a page's script
    ],
)
async def test_content_types(site: SiteMaker, header: str, status: int) -> None:
    async with site() as here:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            found, body = await answer(here.addresses["http"], request(header, path=path))
            if path == "/v1/completions" or status != 200:
                assert found == status, (path, body)
            if status != 200:
                assert body["error"]["type"] in ("invalid_request_error", "permission_error")
        assert len(here.worker("prefill-0").prefill.prompts) == (status == 200)


async def test_host_names_of_a_loopback_listener(site: SiteMaker) -> None:
    """A page of evil.example whose name now resolves to 127.0.0.1 has that name in Host."""
    async with site() as here:
        address = here.addresses["http"]
        port = address.rsplit(":", 1)[1]
        for host in (
            "localhost",
            f"localhost:{port}",
            address,
            "127.0.0.2",
            "[::1]:80",
            "api.localhost",
            "LOCALHOST.",
        ):
            assert (await answer(address, get(host=host)))[0] == 200, host
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "",
            "[::2]",
            "a b",
        ):
            for sent in (
                get(host=host),
                get("/v1/models", host=host),
                request("content-type: application/json", host=host),
            ):
                status, body = await answer(address, sent)
                assert (status, body["error"]["type"]) == (403, "permission_error"), host
        assert not here.worker("prefill-0").prefill.prompts


async def test_hosts_can_be_allowed(site: SiteMaker) -> None:
    async with site(allowed_hosts=("api.example", ".corp.example")) as here:
        address = here.addresses["http"]
        for host in (
            "api.example",
            "API.example:8000",
            "a.corp.example",
            "corp.example",
            "localhost",
            "127.0.0.1",
        ):
            assert (await answer(address, get(host=host)))[0] == 200, host
        for host in ("evil.example", "xapi.example", "evilcorp.example", "b.api.example"):
            assert (await answer(address, get(host=host)))[0] == 403, host
    async with site(allowed_hosts=("*",)) as here:
        assert (await answer(here.addresses["http"], get(host="evil.example")))[0] == 200


async def test_other_listeners_serve_any_host_name(site: SiteMaker) -> None:
    async with site(host="0.0.0.0", auth="none") as here:
        address = here.addresses["http"].replace("0.0.0.0", "127.0.0.1")
        assert (await answer(address, get(host="any.example")))[0] == 200
    async with site(host="0.0.0.0", auth="none", allowed_hosts=("api.example",)) as here:
        address = here.addresses["http"].replace("0.0.0.0", "127.0.0.1")
        assert (await answer(address, get(host="any.example")))[0] == 403
        assert (await answer(address, get(host="api.example")))[0] == 200


async def test_no_other_origin_may_read(site: SiteMaker) -> None:
    async with site() as here, connect(here.addresses["http"]) as raw:
        origin = "origin: http://evil.example"
        await raw.send(get("/v1/models", origin))
        head = await raw.reader.readuntil(b"\r\n\r\n")
        assert b"access-control" not in head.lower()
    async with site() as here, connect(here.addresses["http"]) as raw:
        asked = "access-control-request-method: POST"
        await raw.send(
            b"OPTIONS /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            + f"{origin}\r\n{asked}\r\n\r\n".encode()
        )
        head = await raw.reader.readuntil(b"\r\n\r\n")
        assert b"access-control" not in head.lower()
        assert b" 405 " in head.split(b"\r\n")[0]
