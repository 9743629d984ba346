"""`baton check` against a router in this process: what it writes, what it says where something is wrong."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from baton.base.errors import BatonError, ErrorKind
from services.cli.check import command
from services.cli.main import main
from services.common.config.tls import Auth
from tests.router.conftest import MODEL, Site, SiteMaker, model_folder, site

__all__ = ["model_folder", "site"]

KEY = "sk-of-the-check"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the pause between two attempts."""
    monkeypatch.setattr("services.cli.check.command.RETRY_S", 0.05)


def flags(**settings: Any) -> list[str]:
    given = {"model": MODEL, "timeout_s": 20, **settings}
    named = {f"--{name.replace('_', '-')}": str(value) for name, value in given.items()}
    return [word for pair in named.items() for word in pair]


def of(here: Site) -> dict[str, str]:
    return {"http": f"http://{here.addresses['http']}", "grpc": here.addresses["grpc"]}


async def check(words: list[str]) -> int:
    """The exit code; the router of this test runs on the event loop meanwhile."""
    return await asyncio.to_thread(main, ["check", *words])


async def test_everything_in_order(
    site: SiteMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "api-keys"
    keys.write_text(f"# ours\n{KEY}\nsk-second\n")
    async with site(auth=Auth(api_keys_file=keys)) as here:
        assert await check(flags(**of(here), api_keys_file=str(keys))) == 0
    out, err = capsys.readouterr()
    lines = [line for line in out.splitlines() if ": " in line and not line.startswith("20")]
    assert [line.partition(": ")[0] for line in lines] == [
        "GET /health",
        "GET /v1/models",
        "grpc.health.v1",
        "RouterService.Generate",
        "POST /v1/completions",
    ]
    for line in lines[-2:]:
        assert "8 tokens, time to first token 0." in line
    assert err == ""


async def test_it_waits_until_the_router_is_ready(site: SiteMaker, tmp_path: Path) -> None:
    async with site() as here:
        here.router.dispatcher.draining = True
        here.router.readiness.update()
        checking = asyncio.create_task(check(flags(**of(here))))
        await asyncio.sleep(0.2)
        assert not checking.done()
        here.router.dispatcher.draining = False
        here.router.readiness.update()
        assert await checking == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "other"}, f"GET /v1/models: other is not served, but {MODEL}"),
        ({"http": "http://127.0.0.1:1"}, "GET /health: Connection refused"),
        ({"grpc": "127.0.0.1:1"}, "grpc.health.v1: "),
    ],
)
async def test_a_failure_is_one_line_and_exit_code_1(
    site: SiteMaker,
    tmp_path: Path,
    settings: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with site() as here:
        assert await check(flags(**{**of(here), "timeout_s": 4.0, **settings})) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"baton: error: {message}")


async def test_a_wrong_key_is_not_shown(
    site: SiteMaker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, ours = tmp_path / "api-keys", tmp_path / "ours"
    keys.write_text("sk-other\n")
    ours.write_text(f"{KEY}\n")
    async with site(auth=Auth(api_keys_file=keys)) as here:
        words = flags(**{**of(here), "timeout_s": 4.0, "api_keys_file": str(ours)})
        assert await check(words) == 1
    out, err = capsys.readouterr()
    assert err == "baton: error: GET /v1/models: status 401: this API key is not valid\n"
    assert KEY not in out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"http": "chat:80"}, "--http must be a URL"),
        ({"http": "http://user:word@chat"}, "--http must be a URL"),
        ({"grpc": "chat"}, "--grpc must be HOST:PORT"),
        ({"timeout_s": 0}, "--timeout-s must be above 0"),
        ({"cert_file": "a"}, "TLS needs both of --cert-file and --key-file"),
        ({"api_keys_file": "/nowhere"}, "cannot read api_keys_file /nowhere"),
        (
            {"http": "https://chat", "cert_file": "/nowhere", "key_file": "/nowhere"},
            "cannot read /nowhere",
        ),
    ],
)
def test_a_wrong_flag_is_refused(
    settings: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *flags(**{"http": "http://chat", "grpc": "chat:1", **settings})]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert "word" not in lines[0]


@pytest.mark.parametrize("failures", [["it is not served"], []])
def test_an_attempt_that_is_cut_off_does_not_hide_why_those_before_it_failed(
    failures: list[str],
) -> None:
    left = iter(failures)

    def step(deadline: float) -> str:
        if why := next(left, None):
            raise BatonError(ErrorKind.NOT_FOUND, why)
        time.sleep(max(0.0, deadline - time.monotonic()))
        raise BatonError(ErrorKind.UNAVAILABLE, "no answer in time")

    expected = f"a step: {failures[0] if failures else 'no answer in time'}"
    with pytest.raises(BatonError, match=expected):
        command.until_done("a step", step, time.monotonic() + 0.3)
