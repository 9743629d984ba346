"""Every HTTP error that answers a request names its call, wherever the error is made."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from services.common.config.tls import Auth
from tests.router.api.calls.test_error_metadata import GIVEN, KEY, check_named
from tests.router.conftest import MODEL, Site, SiteMaker
from tests.support.kept_spans import KeptSpans

PATH = "/v1/completions"


def client_of(here: Site) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"http://{here.addresses['http']}",
        timeout=30,
        headers={**dict(GIVEN), **dict(KEY)},
        verify=False,
    )


async def test_errors_made_before_the_handler_name_their_call(
    site: SiteMaker, kept: KeptSpans, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("sk-1\n")
    auth = Auth(api_keys_file=tmp_path / "keys")
    async with site(auth=auth, max_body_bytes=65_536) as here, client_of(here) as client:
        answers = {
            401: await client.post(PATH, json={}, headers={"authorization": "Bearer other"}),
            403: await client.post(PATH, content="{}", headers={"origin": "https://elsewhere"}),
            404: await client.get("/v1/nothing"),
            405: await client.get(PATH),
            413: await client.post(PATH, json={"prompt": "a" * 65_536}),
            415: await client.post(PATH, content="a=b", headers={"content-type": "text/plain"}),
        }
        for status, answer in answers.items():
            assert answer.status_code == status, answer.text
            check_named(answer.headers, recorded=False)
        assert answers[401].headers["www-authenticate"] == "Bearer"
        assert answers[405].headers["allow"] == "POST"
        assert answers[413].headers["connection"] == "close"
        refused = await client.post(PATH, json={"model": MODEL, "prompt": "a", "temperature": -1})
        check_named(refused.headers, recorded=True)
        ids = {answer.headers["x-request-id"] for answer in (*answers.values(), refused)}
        assert len(ids) == 7
    assert [span.error for span in kept.all()] == ["invalid"]


async def test_a_defect_names_its_call_in_the_answer_and_in_the_log(
    site: SiteMaker, kept: KeptSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site() as here, client_of(here) as client:

        async def break_down(*_: object) -> None:
            raise RuntimeError("what no answer may say")

        monkeypatch.setattr(here.router.admission, "completion", break_down)
        with capture_logs() as logs:
            answer = await client.post(PATH, json={"model": MODEL, "prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "the router failed")
    check_named(answer.headers, recorded=False)
    (line,) = [line for line in logs if line["event"] == "http_internal_error"]
    assert line["request"] == answer.headers["x-request-id"]
    assert kept.all() == []


async def test_without_traces_an_error_has_its_id_alone(site: SiteMaker) -> None:
    async with site() as here, client_of(here) as client:
        answer = await client.get("/v1/nothing")
    assert "x-request-id" in answer.headers
    assert "traceresponse" not in answer.headers
