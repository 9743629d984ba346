"""The page in a real browser: names and outputs with markup are shown as text, at both widths."""

from __future__ import annotations

import asyncio

import pytest

from baton.v1.admin_pb2 import AdminServiceGetStatusRequest, AdminServiceGetStatusResponse
from services.router.api.event_stream import EventStream
from services.router.observability.status import Status
from tests.router.conftest import SiteMaker
from tests.support.browser import CHROMIUM, Browser

MARKUP = "<img src=x onerror=\"document.title='run'\"><b>bold</b>"
_NAMES = "[...document.querySelectorAll('#workers tbody th')].map(cell => cell.textContent)"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [400, 1280])
async def test_markup_is_text(site: SiteMaker, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    full, send = Status.full, EventStream.send
    answered = False

    async def status_with_markup(
        status: Status, request: AdminServiceGetStatusRequest
    ) -> AdminServiceGetStatusResponse:
        answer = await full(status, request)
        for worker in answer.workers:
            worker.worker.identity.name = MARKUP
        # The prompt names the model as the status before did.
        if answered:
            answer.router.model = MARKUP
        return answer

    async def text_with_markup(stream: EventStream, document: object, event: str | None = None) -> None:
        nonlocal answered
        answered = True
        is_text = isinstance(document, dict) and "text" in document
        await send(stream, {"text": MARKUP} if is_text else document, event)

    monkeypatch.setattr(Status, "full", status_with_markup)
    monkeypatch.setattr(EventStream, "send", text_with_markup)
    async with site() as here:
        await asyncio.to_thread(_check, f"http://{here.addresses['admin_http']}/", width)


def _check(url: str, width: int) -> None:
    with Browser() as browser:
        browser.open(url, width)
        browser.until("document.querySelectorAll('#workers tbody tr').length == 2")
        browser.ask("hi", tokens=1)
        assert MARKUP in browser.evaluate("document.getElementById('answer').textContent")
        browser.until("document.getElementById('model').textContent.startsWith('<img')")
        assert browser.evaluate("document.getElementById('model').textContent") == MARKUP
        assert browser.evaluate(_NAMES) == [MARKUP, MARKUP]
        assert browser.evaluate("document.querySelectorAll('main img, main b').length") == 0
        assert browser.evaluate("document.title") != "run"
        # Nothing is wider than the window, and nothing was blocked or failed.
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        assert browser.errors == []
