"""Every error names its call: `x-request-id`, and where traces are on `traceresponse`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from structlog.testing import capture_logs

from baton.base.errors import BatonError, ErrorKind
from baton.rpc.grpc_errors import from_status
from baton.v1.router_pb2 import GenerateRequest, GenerateResponse
from services.common.config.tls import Auth
from tests.router.conftest import Site, SiteMaker, ids_request
from tests.support.kept_spans import KeptSpans

KEY = (("authorization", "Bearer sk-1"),)
TRACE = "a" * 32
GIVEN = (("traceparent", f"00-{TRACE}-{'b' * 16}-01"),)


def check_named(given: Mapping[str, Any], *, recorded: bool) -> None:
    """Has an id and the span of the client's trace, whose flag says whether it is recorded."""
    assert re.fullmatch("[0-9a-f]{32}", given["x-request-id"])
    assert re.fullmatch(f"00-{TRACE}-[0-9a-f]{{16}}-0{int(recorded)}", given["traceresponse"])


async def failed(
    here: Site, request: GenerateRequest, metadata: Any = (*KEY, *GIVEN)
) -> tuple[BatonError, dict[str, Any], list[GenerateResponse]]:
    """The error of a call that must fail, as `baton.client` sees it; its trailing metadata, and what came
    before it."""
    responses: list[GenerateResponse] = []

    async def read() -> None:
        async for response in here.stub.Generate(request, metadata=metadata, timeout=60):
            responses.append(response)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read()
    given: Any = caught.value.trailing_metadata()
    return from_status(caught.value.code(), caught.value.details(), given), dict(given), responses


async def test_a_grpc_call_that_fails_in_the_middle_of_its_stream(site: SiteMaker, kept: KeptSpans) -> None:
    async with site() as here:
        behaviour = here.worker("decode-0").behaviour
        behaviour.skip_number, behaviour.step_s = 5, 0.01
        error, given, responses = await failed(here, ids_request([9, 8, 7], 24))
    check_named(given, recorded=True)
    assert (error.kind, error.tokens_sent) == (ErrorKind.INTERNAL, True)
    assert error.request_id == given["x-request-id"] == responses[0].request_id.hex()
    assert error.traceresponse == kept.named()["baton.request"].context.header


async def test_a_grpc_call_past_the_routers_deadline(site: SiteMaker, kept: KeptSpans) -> None:
    async with site(request_timeout_s=0.3) as here:
        here.worker("decode-0").behaviour.step_s = 0.5
        with capture_logs() as logs:
            error, given, _ = await failed(here, ids_request([1, 2], 100))
    check_named(given, recorded=True)
    assert error.kind is ErrorKind.DEADLINE
    (ended,) = [line for line in logs if line["event"] == "request_ended"]
    assert ended["request"] == given["x-request-id"]


async def test_grpc_calls_that_are_refused(site: SiteMaker, kept: KeptSpans, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-1\n")
    auth = Auth(api_keys_file=tmp_path / "keys")
    async with site(auth=auth) as here:
        error, given, _ = await failed(here, ids_request([1], temperature=-1.0))
        check_named(given, recorded=True)
        assert error.kind is ErrorKind.INVALID
        error, other, _ = await failed(here, ids_request([1]), GIVEN)
        check_named(other, recorded=False)
        assert error.kind is ErrorKind.UNAUTHENTICATED
        assert other["x-request-id"] != given["x-request-id"]
    assert [span.error for span in kept.all()] == ["invalid"]


async def test_a_grpc_call_that_meets_a_defect(
    site: SiteMaker, kept: KeptSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with site() as here:

        async def break_down(*_: object) -> None:
            raise RuntimeError("what only the log may say")

        monkeypatch.setattr(here.router.admission, "generate", break_down)
        with capture_logs() as logs:
            error, given, _ = await failed(here, ids_request([1]))
    check_named(given, recorded=False)
    assert (error.kind, error.message) == (ErrorKind.INTERNAL, "the router failed")
    (line,) = [line for line in logs if line["event"] == "grpc_internal_error"]
    assert line["request"] == given["x-request-id"]


async def test_without_traces_an_error_has_its_id_alone(site: SiteMaker) -> None:
    async with site() as here:
        _, given, _ = await failed(here, ids_request([1], temperature=-1.0))
    assert "x-request-id" in given
    assert "traceresponse" not in given
