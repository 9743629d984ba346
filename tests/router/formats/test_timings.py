"""The time of each stage accompanies an answer of both APIs, and the request's id."""

from __future__ import annotations

import re
from typing import Any

import grpc.aio
import pytest

from baton.v1.router_pb2 import RequestTrace, Stage, StageTime
from services.router.formats.timings import HEADER, server_timing
from tests.router.conftest import MODEL, SiteMaker, ids_request
from tests.router.http_client import complete, http

STAGES = ["queue", "prefill", "transfer", "decode"]


def trace(**milliseconds: float) -> RequestTrace:
    return RequestTrace(
        stages=[
            StageTime(stage=Stage.Value(f"STAGE_{name.upper()}"), offset_ns=round(at * 1e6))
            for name, at in milliseconds.items()
        ]
    )


def test_stages_are_between_their_marks() -> None:
    whole = trace(
        admitted=1, reserved=2, prefilling=3, first_token=10, handed_off=12.5, decoding=13, ended=40
    )
    assert server_timing([whole]) == "queue;dur=3.0, prefill;dur=7.0, transfer;dur=2.5, decode;dur=27.5"


def test_what_was_not_reached_is_left_out_and_the_longest_of_several_counts() -> None:
    first, second = trace(prefilling=3, first_token=10), trace(prefilling=8, first_token=9)
    assert server_timing([first, second]) == "queue;dur=8.0, prefill;dur=7.0"
    assert server_timing([trace(first_token=2, handed_off=1)]) == "transfer;dur=0.0"
    assert server_timing([]) == ""


def names_of(value: str) -> list[str]:
    assert re.fullmatch(r"[a-z]+;dur=\d+\.\d(, [a-z]+;dur=\d+\.\d)*", value)
    return [part.partition(";")[0] for part in value.split(", ")]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_http_has_them_where_the_answer_is_not_streamed(site: SiteMaker, path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "a", "max_tokens": 3, "n": 2},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
        "/v1/responses": {"input": "a", "max_output_tokens": 3},
    }
    async with site() as here, http(here) as client:
        asked = {"model": MODEL, **bodies[path]}
        whole = await client.post(path, json=asked)
        assert names_of(whole.headers[HEADER]) == STAGES
        assert re.fullmatch("[0-9a-f]{32}", whole.headers["x-request-id"])
        streamed = await client.post(path, json={**asked, "stream": True})
        assert HEADER not in streamed.headers
        assert streamed.headers["x-request-id"] != whole.headers["x-request-id"]
        assert HEADER not in (await complete(client, temperature=-1)).headers


async def test_grpc_has_them_in_its_trailers(site: SiteMaker) -> None:
    async with site() as here:
        call = here.stub.Generate(ids_request([1, 2], 3), timeout=10)
        responses = [response async for response in call]
        trailers = dict(await call.trailing_metadata())
        assert names_of(trailers[HEADER]) == STAGES
        assert trailers["x-request-id"] == responses[0].request_id.hex()
        refused = here.stub.Generate(ids_request([1, 2], 3, temperature=-1.0), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError):
            await refused.read()
        assert HEADER not in dict(await refused.trailing_metadata())
