"""However a path or a method is spelled, who answers has checked the key: every route and method, by every
scope, over HTTP and gRPC, on the public and on the admin ports."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote

import grpc
import grpc.aio
import httptools
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from baton.base.cluster_auth import RpcToken
from baton.v1.admin_pb2 import DESCRIPTOR as ADMIN
from services.common.config.tls import Auth
from services.router import app, public_ports
from services.router.auth.http_auth import require_keys
from services.router.auth.keys import Keys
from services.router.auth.scopes import ADMIN_HTTP_RULES, GRPC_RULES, HTTP_RULES, Access, Rule
from tests.router.conftest import SiteMaker
from tests.router.raw_http import Raw, connect

SCOPES = ("generate", "models", "metrics", "admin")
# `nothing` is a key that no scope permits anything; None: no key.
CALLERS = (*SCOPES, "nothing", None)
SECRET = "s" * 32


@pytest.fixture
def auth(tmp_path: Path) -> Auth:
    """A key of each scope, named as it, and one of none."""
    given = {scope: f"[{scope}]" for scope in SCOPES} | {"nothing": "[]"}
    keys = ", ".join(
        f"{{id: {name}, sha256: '{hashlib.sha256(name.encode()).hexdigest()}', scopes: {scopes}}}"
        for name, scopes in given.items()
    )
    (tmp_path / "tenants").write_text(f"tenants: [{{name: acme, keys: [{keys}]}}]\n")
    return Auth(tenants_file=tmp_path / "tenants")


def spellings(path: str) -> Iterator[str]:
    """A path as it is, and as others might read it as the same."""
    yield path
    for code in ("00", "09", "0A", "0B", "0D", "0D%0A", "1F", "7F", "C2%85", "20", "E2%80%A8", "250A", "FF"):
        yield f"{path}%{code}"
    yield from (f"/%0A{path}", path.replace("/", "/%0A", 1), f"{path[:-1]}%0A{path[-1:]}")
    yield from (
        f"{path}/",
        f"/{path}",
        f"{path}//",
        f"{path};x",
        f"{path}?x=%0A",
        f"{path}%3Fx",
        f"{path}%23",
    )
    yield from (f"/health/..{path}", f"/health/%2e%2e{path}", f"/.{path}", f"/health%0A{path}", f"/v1{path}")
    yield from (path.upper(), f"/%2F{path[1:]}", f"/{path[1:]}%5C", path.replace("v1/", "%761%2F"))
    yield from (f"http://localhost{path}", f"http://localhost{path}%0A", f"//localhost{path}")


def is_target(spelled: str) -> bool:
    """True if HTTP can carry the target; another one is 400 and ends the connection."""
    with contextlib.suppress(httptools.HttpParserInvalidURLError):
        return spelled.startswith(("/", "http:")) and httptools.parse_url(spelled.encode()).path is not None
    return False


class Marker:
    """Answers in a route's place with the route's path."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Response(self._path)(scope, receive, send)


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Puts markers in the place of what the routes do, before they ask for keys; a method of each route of
    the routers that start."""
    found: dict[str, str] = {}

    def require_keys_of_markers(served: Starlette, keys: Keys, table: Mapping[str, Rule]) -> None:
        for route in served.routes:
            assert isinstance(route, Route)
            assert route.methods
            route.app = Marker(route.path)
            found[route.path] = min(route.methods)
        require_keys(served, keys, table)

    for module in (app, public_ports):
        monkeypatch.setattr(module, "require_keys", require_keys_of_markers)
    return found


def permitted(rule: Rule, caller: str | None) -> bool:
    return rule is Access.OPEN or (caller is not None and (rule is Access.ANY_KEY or rule == caller))


def request(method: str, path: str, caller: str | None) -> bytes:
    key = "" if caller is None else f"authorization: Bearer {caller}\r\n"
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{key}content-length: 0\r\n\r\n".encode()


async def answers(raw: Raw, method: str, paths: list[str], caller: str | None) -> list[tuple[int, str]]:
    """Status and body of each, sent at once."""
    await raw.send(b"".join(request(method, path, caller) for path in paths))
    found = [await raw.answer() for _ in paths]
    return [(status, body.decode()) for status, body in found]


async def walk(address: str, rules: Mapping[str, Rule], methods: Mapping[str, str]) -> dict[int, int]:
    """Calls every spelling of every route as every caller; how many answers had which status."""
    counted: dict[int, int] = {}
    async with connect(address) as raw:
        for route, rule in rules.items():
            path = route.replace("{model:path}", "some/model").replace("{response_id}", "resp_" + "0" * 32)
            paths = [one for one in dict.fromkeys(spellings(path)) if is_target(one)]
            for caller in CALLERS:
                (status, _), *_ = await answers(raw, "PATCH", paths[:1], caller)
                assert status == (405 if permitted(rule, caller) else 401 if caller is None else 403)
                found = await answers(raw, methods[route], paths, caller)
                if permitted(rule, caller):
                    assert found[0] == (200, route), (path, caller)
                else:
                    assert found[0][0] == (401 if caller is None else 403), (path, caller)
                for spelled, (status, served) in zip(paths, found, strict=True):
                    counted[status] = counted.get(status, 0) + 1
                    where = spelled, caller, status, served
                    assert status in (200, 400, 401, 403, 404, 405), where
                    if status == 200:  # whoever answered, the caller may call that
                        assert permitted(rules[served], caller), where
                    if status == 404:
                        assert caller is not None, where
                    if any(ord(c) < 32 or 127 <= ord(c) < 160 for c in unquote(spelled.partition("?")[0])):
                        assert status == 400, where
    return counted


async def test_http(site: SiteMaker, auth: Auth, methods: Mapping[str, str]) -> None:
    async with site(prefill=0, decode=0, auth=auth) as here:
        counted = await walk(here.addresses["http"], HTTP_RULES, methods)
        assert all(counted[status] > 100 for status in (200, 400, 401, 403, 404))
        # What is not there: 401 without a key, 404 with any.
        async with connect(here.addresses["http"]) as raw:
            for path in ("/nothing", "/v1/completionsx", "/v1/completions/", "//v1/models", "/V1/models"):
                for caller in CALLERS:
                    ((status, _),) = await answers(raw, "GET", [path], caller)
                    assert status == (401 if caller is None else 404), (path, caller)


async def test_admin_http(site: SiteMaker, auth: Auth, methods: Mapping[str, str]) -> None:
    async with site(prefill=0, decode=0, auth=auth) as here:
        counted = await walk(here.addresses["admin_http"], ADMIN_HTTP_RULES, methods)
        assert all(counted[status] > 100 for status in (200, 400, 401, 404))


async def code_of(channel: grpc.aio.Channel, method: str, metadata: tuple[tuple[str, str], ...]) -> str:
    """The status of a call, whose message may not be one that the method reads."""
    try:
        await channel.unary_unary(method, bytes, bytes)(b"\xff", metadata=metadata, timeout=5)
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


def names(name: str) -> list[str]:
    """A gRPC method's name, and as others might read it as the same."""
    odd = ["\n", "%0A", "\t", " ", "/", "?x", "%00", ";x", "\x7f"]
    spelled = [f"{name}{end}" for end in odd] + [f"/{name}", name.upper(), name.replace("/", "%2F", 1)]
    return [name, *spelled, name.replace("/", "//"), f"/grpc.health.v1.Health/Check/..{name}"]


async def test_grpc(site: SiteMaker, auth: Auth) -> None:
    async with (
        site(prefill=0, decode=0, auth=auth) as here,
        grpc.aio.insecure_channel(here.addresses["grpc"]) as channel,
    ):
        for method, rule in GRPC_RULES.items():
            if "Reflection" in method or method.endswith(("/Watch", "/List")):
                continue  # not served here, or a stream without an end
            for caller in CALLERS:
                metadata = () if caller is None else (("authorization", f"Bearer {caller}"),)
                known, *odd = await asyncio.gather(
                    *(code_of(channel, one, metadata) for one in names(method))
                )
                if permitted(rule, caller):
                    assert known not in ("UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"), method
                else:
                    assert known == ("UNAUTHENTICATED" if caller is None else "PERMISSION_DENIED"), method
                # What is not a method's name is none: a key is needed to hear that, and any will do.
                allowed = {"INTERNAL", "UNAUTHENTICATED" if caller is None else "UNIMPLEMENTED"}
                assert set(odd) <= allowed, (method, caller, odd)


async def test_admin_grpc(site: SiteMaker) -> None:
    async with (
        site(prefill=0, decode=0, admin_host="0.0.0.0", cluster_secret=SECRET) as here,
        grpc.aio.insecure_channel(here.addresses["admin"].replace("0.0.0.0", "127.0.0.1")) as channel,
    ):
        for method in ADMIN.services_by_name["AdminService"].methods:
            spelled = names(f"/baton.v1.AdminService/{method.name}")
            for metadata in ((), RpcToken("t" * 32, "admin").metadata, RpcToken(SECRET).metadata):
                found = await asyncio.gather(*(code_of(channel, one, metadata) for one in spelled))
                assert set(found) <= {"UNAUTHENTICATED", "INTERNAL"}, found
                assert found[0] == "UNAUTHENTICATED"
            (known, *odd) = await asyncio.gather(
                *(code_of(channel, one, RpcToken(SECRET, "admin").metadata) for one in spelled)
            )
            assert known not in ("UNAUTHENTICATED", "UNIMPLEMENTED")
            assert set(odd) <= {"UNIMPLEMENTED", "INTERNAL"}
