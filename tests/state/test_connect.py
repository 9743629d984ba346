"""Connections with URLs, passwords and TLS."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.state.client.connect import Endpoint, parse_url
from baton.state.embedded import free_port
from tests.certificates import self_signed
from tests.state.opened import open_state
from tests.state.proxy import proxy


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("redis://h", Endpoint("single", (("h", 6379),))),
        ("redis://:p%40%2F@h:1/3", Endpoint("single", (("h", 1),), db=3, password="p@/")),
        ("rediss://u:p@[::1]:2", Endpoint("single", (("::1", 2),), tls=True, username="u", password="p")),
        (
            "redis+sentinel://u:p@a:1,b/main/2?sentinel_password=s",
            Endpoint(
                "sentinel",
                (("a", 1), ("b", 26379)),
                db=2,
                service="main",
                username="u",
                password="p",
                options={"sentinel_password": "s"},
            ),
        ),
        (
            "rediss+cluster://:p@a,b:7/?ssl_ca_certs=/f",
            Endpoint(
                "cluster", (("a", 6379), ("b", 7)), tls=True, password="p", options={"ssl_ca_certs": "/f"}
            ),
        ),
    ],
)
def test_urls(url: str, endpoint: Endpoint) -> None:
    assert parse_url(url) == endpoint


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://h",
        "redis+other://h",
        "redis://",
        "redis://:secret@h:port",
        "redis://:secret@h:99999",
        "redis://:secret@a,b",
        "redis://:secret@h/x",
        "redis://:secret@h/0/1",
        "redis://:secret@h?socket_timeout=9",
        "redis+sentinel://:secret@h",
        "redis+cluster://:secret@h/1",
    ],
)
def test_wrong_urls_are_refused_in_one_line_without_the_password(url: str) -> None:
    with pytest.raises(BatonError) as refused:
        parse_url(url)
    assert refused.value.kind is ErrorKind.INVALID
    assert "secret" not in refused.value.message
    assert "\n" not in refused.value.message


def test_an_endpoint_shows_no_password() -> None:
    endpoint = parse_url("redis+sentinel://user:secret@h/s?sentinel_password=secret")
    assert "secret" not in f"{endpoint} {endpoint!r}"


@pytest.mark.parametrize("kind", ["redis", "cluster", "sentinel"])
def test_a_wrong_password_is_one_clear_error(kind: str, request: pytest.FixtureRequest) -> None:
    url: str = request.getfixturevalue(f"{kind}_url")
    password = urlsplit(url).password
    assert password is not None
    for wrong in (url.replace(password, "wrong-one"), url.replace(f":{password}@", "")):
        with pytest.raises(BatonError) as refused:
            asyncio.run(open_state(wrong))
        assert refused.value.kind is ErrorKind.UNAUTHENTICATED
        assert "refused the user name or password" in refused.value.message
        assert "wrong-one" not in refused.value.message


async def test_a_server_that_is_not_there_yet_hinders_no_start() -> None:
    state = await open_state(f"redis://127.0.0.1:{free_port()}")
    assert state.unavailable
    with pytest.raises(BatonError) as refused:
        await state.check()
    assert refused.value.kind is ErrorKind.UNAVAILABLE
    await state.close()


@pytest.mark.parametrize(("namespace", "key"), [("a b", bytes(32)), ("", bytes(32)), ("ok", b"short")])
async def test_wrong_settings_are_refused(redis_url: str, namespace: str, key: bytes) -> None:
    with pytest.raises(BatonError) as refused:
        await open_state(redis_url, namespace=namespace, journal_key=key)
    assert refused.value.kind is ErrorKind.INVALID


async def test_tls_with_a_certificate_that_is_checked(redis_url: str, tmp_path: Path) -> None:
    parts = urlsplit(redis_url)
    assert parts.port is not None
    context, authority = self_signed(tmp_path)
    async with proxy(parts.port, context) as between:
        url = f"rediss://:{parts.password}@127.0.0.1:{between.port}/0"
        state = await open_state(f"{url}?ssl_ca_certs={authority}")
        assert not state.unavailable
        await state.check()
        await state.close()
        distrusting = await open_state(url)
        assert distrusting.unavailable
        await distrusting.close()
