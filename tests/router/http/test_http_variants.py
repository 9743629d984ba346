"""HTTP as clients other than libraries of today speak it: offers to upgrade, HTTP/1.0, connections closed by
halves, Host headers, and whether an error says that it ends the connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from services.router.api.http_api import HttpApi
from services.router.http.half_closed import PATIENCE_S
from tests.router.conftest import SiteMaker, until
from tests.router.raw_http import connect, get, post

OFFERS = (
    ["connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAEAAEAAAAIAAAABAAMAAABk"],
    [
        "upgrade: websocket",
        "connection: keep-alive, Upgrade",
        "sec-websocket-key: x",
        "sec-websocket-version: 13",
    ],
    ["upgrade: h2c", "connection: upgrade"],
    ["Connection:Upgrade", "Upgrade: TLS/1.0, foo/2"],
    ["upgrade: h2c", "connection: upgrade", "connection: close"],
)
FIELDS: dict[str, Any] = {"max_tokens": 3}
CLOSE = b"connection: close"


def chunked(*headers: str) -> bytes:
    """The request of `post`, its body in chunks of three sizes, with a trailer."""
    body = post(**FIELDS).partition(b"\r\n\r\n")[2]
    parts = [body[:1], body[1:40], body[40:]]
    lines = [
        "POST /v1/completions HTTP/1.1",
        "host: localhost",
        "transfer-encoding: chunked",
        *headers,
        "",
        "",
    ]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return "\r\n".join(lines).encode() + chunks + b"0\r\nx-end: 1\r\n\r\n"


def requests(*headers: str) -> list[bytes]:
    """Requests with these headers; the body of the last one is longer than what is parsed at once."""
    return [
        get("/health", *headers),
        post("/v1/completions", *headers, **FIELDS),
        chunked(*headers),
        post("/v1/completions", *headers, **FIELDS, user="u" * 20_000),
    ]


def text(body: bytes) -> Any:
    """An answer's text, or all of it where it has none."""
    document = json.loads(body)
    return document["choices"][0]["text"] if "choices" in document else document


@pytest.mark.parametrize("cuts", [pytest.param(2, id="2"), pytest.param(60, id="60", marks=pytest.mark.slow)])
async def test_an_offer_to_upgrade_is_ignored(site: SiteMaker, cuts: int) -> None:
    """The same answer as without it, however the request is cut, and to the request behind it as well."""
    dice = random.Random(5)
    async with site() as here:
        for plain, *offering in zip(requests(), *(requests(*offer) for offer in OFFERS), strict=True):
            async with connect(here.addresses["http"]) as raw:
                await raw.send(plain)
                status, body = await raw.answer()
                assert status == 200
            for sent in offering:
                ends = b"connection: close" in sent
                for cut in (len(sent), *dice.choices(range(1, len(sent)), k=cuts)):
                    async with connect(here.addresses["http"]) as raw:
                        await raw.send(sent[:cut])
                        await asyncio.sleep(0.001 * (cut < len(sent)))
                        await raw.send(sent[cut:] + (b"" if ends else sent + get("/version")))
                        for _ in range(1 if ends else 2):
                            found, answer = await raw.answer()
                            assert (found, text(answer)) == (200, text(body)), sent
                        if not ends:
                            assert b"version" in (await raw.answer())[1]
        await until(lambda: here.router.dispatcher.running == 0)


async def test_many_offers_in_one_packet(site: SiteMaker) -> None:
    async with site(prefill=0, decode=0) as here, connect(here.addresses["http"]) as raw:
        await raw.send(get("/health", *OFFERS[2]) * 200)
        assert [await raw.answer() for _ in range(200)] == [(200, b'{"status":"ok"}')] * 200


async def whole(address: str, sent: bytes, *, eof: bool = False) -> bytes:
    """All that comes for a request until the server closes."""
    async with connect(address) as raw:
        await raw.send(sent)
        if eof:
            raw.writer.write_eof()
        return await raw.closed(10)


def events(body: bytes) -> list[Any]:
    """The texts of a stream, which ends as it should."""
    assert body.endswith(b"data: [DONE]\n\n"), body
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line)["choices"][0]["text"] for line in lines]


async def test_http_1_0(site: SiteMaker) -> None:
    """No chunks: a length, or the end of the connection ends a body."""
    async with site() as here:
        address = here.addresses["http"]
        async with connect(address) as raw:
            await raw.send(post(max_tokens=6))
            expected = text((await raw.answer())[1])
        for sent, status in (
            (get(), 200),
            (get("/docs"), 200),
            (get("/metrics"), 200),
            (get("/nothing"), 404),
            (post(max_tokens=3), 200),
            (post(max_tokens=-1), 400),
            (post("/v1/completions", "expect: 100-continue", max_tokens=3), 200),
            (post(max_tokens=6, stream=True), 200),
            (post(max_tokens=6, n=2, logprobs=3), 200),
        ):
            for old in (
                sent,
                sent.replace(b"host: localhost\r\n", b""),
                *(
                    [
                        sent.replace(
                            b"host: localhost", b"host: localhost\r\nupgrade: h2c\r\nconnection: upgrade"
                        )
                    ]
                ),
            ):
                answer = await whole(address, old.replace(b"HTTP/1.1", b"HTTP/1.0", 1))
                head, _, body = answer.partition(b"\r\n\r\n")
                assert int(head.split()[1]) == status, answer
                assert b"transfer-encoding" not in head
                assert CLOSE in head
                if b"content-length" in head:
                    assert int(head.partition(b"content-length: ")[2].split()[0]) == len(body)
                if b'"stream": true' in sent:
                    assert "".join(events(body)) == expected
        assert (await whole(address, b"GET /health HTTP/2.0\r\nhost: localhost\r\n\r\n")).startswith(
            b"HTTP/1.1 505"
        )
        head = await whole(address, b"HEAD /health HTTP/1.0\r\n\r\n")
        assert head.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("step_s", [0.001, 0.1])
async def test_a_client_that_closes_its_sending_side(site: SiteMaker, step_s: float) -> None:
    """The client gets the answers to all requests that it has sent; `100 Continue` comes before a late one
    alone."""
    async with site() as here:
        here.worker("decode-0").behaviour.step_s = step_s
        address = here.addresses["http"]
        for version in (b"HTTP/1.1", b"HTTP/1.0"):
            one = post(max_tokens=15).replace(b"HTTP/1.1", version, 1)
            began = time.monotonic()
            answer = await whole(address, one, eof=True)
            is_late = time.monotonic() - began >= PATIENCE_S  # any may be, on a busy machine
            interim = b"HTTP/1.1 100 Continue\r\n\r\n"
            if answer.startswith(interim):
                assert is_late
                assert version == b"HTTP/1.1"
            else:
                assert step_s < 0.01 or version == b"HTTP/1.0", answer
            head, _, body = answer.removeprefix(interim).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert json.loads(body)["usage"]["completion_tokens"] == 15
            stream = post(max_tokens=15, stream=True).replace(b"HTTP/1.1", version, 1)
            head, _, body = (await whole(address, stream, eof=True)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert b"[DONE]" in body
        # Two requests, and the beginning of a third: the first two are answered.
        for third in (b"", b"GET /he", post(max_tokens=2)[:-4]):
            answer = await whole(address, post(max_tokens=4) + post(max_tokens=5) + third, eof=True)
            assert answer.count(b"HTTP/1.1 200") == 2, answer
        # Nothing that could be answered.
        for part in (b"", b"GET /he", post(max_tokens=2)[:-4]):
            assert await whole(address, part, eof=True) == b""
        await here.quiet()
        assert here.router.connections.count == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves(site: SiteMaker, stream: bool) -> None:
    """Looks the same at first; what runs for it is cancelled all the same."""
    async with site() as here:
        here.worker("decode-0").behaviour.step_s = 0.05
        async with connect(here.addresses["http"]) as raw:
            await raw.send(post(max_tokens=200, stream=stream))
            await until(lambda: here.worker("decode-0").decode.used_slots == 1)
            raw.writer.close()
            await raw.writer.wait_closed()
        await here.quiet()  # within 2 s, of 10 that it would run
        await until(lambda: here.router.connections.count == 0, 2)


async def test_one_host(site: SiteMaker) -> None:
    async with site(prefill=0, decode=0) as here:
        for port in ("http", "admin_http"):
            for hosts, status in (
                (["host: localhost"], 200),
                ([], 400),
                (["host: localhost", "host: localhost"], 400),
                (["host: localhost", "host: evil.com"], 400),
                (["host: evil.com", "host: localhost"], 400),
                (["host:", "host: localhost"], 400),
                (["host: evil.com"], 403),
            ):
                lines = ["GET /health HTTP/1.1", *hosts, "", ""]
                async with connect(here.addresses[port]) as raw:
                    await raw.send("\r\n".join(lines).encode())
                    assert (await raw.answer())[0] == status, (port, hosts)


async def test_hosts_of_other_listeners(site: SiteMaker) -> None:
    async with site(prefill=0, decode=0, host="0.0.0.0", auth="none") as here:
        address = here.addresses["http"].replace("0.0.0.0", "127.0.0.1")
        for host, status in (
            ("evil.com", 200), ("EXAMPLE.org:80", 200), ("[::1]:8000", 200), ("10.0.0.1:", 200), ("a_b", 200),
            ("a b", 400), ("a/b", 400), ("user@host", 400), ("host:80x", 400), ("[::1", 400), ("a,b", 200),
            ("é", 400),
        ):  # fmt: skip
            async with connect(address) as raw:
                await raw.send(get(host=host))
                assert (await raw.answer())[0] == status, host


def faults() -> Sequence[tuple[bytes, int]]:
    """Requests that are refused, or fail, and the statuses."""
    return (
        (b"nonsense\r\n\r\n", 400),
        (get().replace(b"host: localhost\r\n", b""), 400),
        (b"GET /health HTTP/2.0\r\nhost: localhost\r\n\r\n", 505),
        (get("/health%0A"), 400),
        (get("/nothing"), 404),
        (get("/v1/completions"), 405),
        (get(host="evil.com"), 403),
        (get("/health", f"x: {'a' * 20_000}"), 431),
        (post("/v1/completions", "content-encoding: gzip"), 415),
        (post(max_tokens=-1), 400),
        (post(max_tokens=1, user="u" * 2_000_000), 413),
        (get("/v1/models"), 500),
        (post("/tokenize"), 500),
        (b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\n{", 408),
        (b"GET /health HTTP/1.1\r\nhost: lo", 408),
    )


async def test_an_error_says_whether_it_ends_the_connection(
    site: SiteMaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail(*_: object) -> None:
        raise RuntimeError("a part of a prompt")

    for name in ("models", "tokenize"):
        monkeypatch.setattr(HttpApi, name, fail)
    timeouts = {"head_timeout_s": 0.3, "body_timeout_s": 0.3}
    async with site(connections=timeouts) as here:
        for sent, status in faults():
            async with connect(here.addresses["http"]) as raw:
                with contextlib.suppress(ConnectionError):
                    await raw.send(sent)
                head = await asyncio.wait_for(raw.reader.readuntil(b"\r\n\r\n"), 5)
                assert int(head.split()[1]) == status, (sent[:60], head)
                length = int(head.lower().partition(b"content-length: ")[2].split()[0])
                await raw.reader.readexactly(length)
                if CLOSE in head.lower():
                    assert await raw.closed(5) == b"", sent[:60]
                else:
                    await raw.send(get("/version"))
                    assert (await raw.answer())[0] == 200, (sent[:60], head)
    printed = "".join(capsys.readouterr())
    assert printed.count("http_internal_error") == 2
    assert "a part of a prompt" not in printed
    assert "Traceback" not in printed


async def test_an_answer_that_breaks_off_ends_the_connection(
    site: SiteMaker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail(api: HttpApi, request: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        raise RuntimeError("a part of a prompt")

    monkeypatch.setattr(HttpApi, "tokenize", fail)
    async with site() as here:
        answer = await whole(here.addresses["http"], post("/tokenize"))
        assert answer.endswith(b"\r\n\r\n1\r\na\r\n")  # without the last chunk: the client knows
    printed = "".join(capsys.readouterr())
    assert "http_internal_error" in printed
    assert "a part of a prompt" not in printed
