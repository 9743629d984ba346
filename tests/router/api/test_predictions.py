"""Predicted outputs and limits on drafts reach the decode worker, and what it counts reaches the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.client import AsyncClient, Message
from baton.client.request import to_request
from baton.v1.router_pb2 import ChatMessage, ChatMessages, GenerateRequest
from baton.v1.types_pb2 import DraftCounts
from services.router.formats.timings import HEADER
from services.router.request import sizes
from tests.router.conftest import MODEL, Site, SiteMaker
from tests.router.fake_model import expected
from tests.router.http_client import http
from tests.support.kept_spans import KeptSpans

COUNTED = DraftCounts(steps=10, drafts=8, accepted=5, drafts_predicted=6, accepted_predicted=4)
HELLO = [{"role": "user", "content": "a"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "a", "max_tokens": 3, "temperature": 0},
    "/v1/chat/completions": {"model": MODEL, "messages": HELLO, "max_tokens": 3, "temperature": 0},
}
TEXTS: list[Any] = ["b<|end|>é", [{"type": "text", "text": "b<|end|>"}, {"type": "text", "text": "é"}]]
# Special tokens that a prediction spells are tokens: the output may have them.
IDS = [98, 256, 0xC3, 0xA9]
BAD: list[Any] = [
    [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}],
    [{"type": "text", "text": "b"}, {"type": "image_url", "image_url": {"url": "https://x/y.png"}}],
    [{"type": "text"}],
    7,
    None,
]


def predicted(content: object) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


def reserved(here: Site) -> list[tuple[list[int], int | None]]:
    """The prediction and the most drafts of each reservation."""
    return [
        (list(one.prediction_token_ids), one.max_draft_tokens if one.HasField("max_draft_tokens") else None)
        for worker in here.cluster.workers.values()
        for one in worker.decode.reserves
    ]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("content", TEXTS, ids=["text", "parts"])
async def test_http_sends_it_with_each_choice(site: SiteMaker, path: str, content: object) -> None:
    async with site() as here, http(here) as client:
        here.worker("decode-0").behaviour.drafts = COUNTED
        body = {**BODIES[path], **predicted(content), "max_draft_tokens": 3, "n": 2}
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert reserved(here) == [(IDS, 3)] * 2
        details = answer.json()["usage"]["completion_tokens_details"]
        assert details == {"accepted_prediction_tokens": 8, "rejected_prediction_tokens": 4}
        assert answer.headers[HEADER].endswith('desc="1.50 tokens per step"')


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_reports_the_same_usage(site: SiteMaker, path: str) -> None:
    async with site() as here, http(here) as client:
        here.worker("decode-0").behaviour.drafts = COUNTED
        body = {**BODIES[path], **predicted("b"), "stream": True, "stream_options": {"include_usage": True}}
        answer = await client.post(path, json=body)
        assert '"accepted_prediction_tokens":4,"rejected_prediction_tokens":2' in answer.text


async def test_grpc_and_its_client(site: SiteMaker) -> None:
    async with site() as here:
        here.worker("decode-0").behaviour.drafts = COUNTED
        async with AsyncClient(here.addresses["grpc"], model=MODEL) as client:
            for prompt in ("a", [Message("user", "a")]):
                answer = await client.complete(
                    prompt, max_tokens=3, prediction="b<|end|>é", max_draft_tokens=0, n=2, deadline=10
                )
                usage, trace = answer.usage, answer.choices[1].trace
                assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (8, 4)
                assert trace is not None
                assert (trace.decode_steps, trace.draft_tokens, trace.accepted_draft_tokens) == (10, 8, 5)
                assert trace.tokens_per_step == 1.5
        assert reserved(here) == [(IDS, 0)] * 4


async def test_responses_bound_drafts_and_predict_nothing(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        body = {"model": MODEL, "input": "a", "max_output_tokens": 3, "max_draft_tokens": 1}
        answer = await client.post("/v1/responses", json={**body, "prediction": {"of": "another API"}})
        assert answer.status_code == 200, answer.text
        assert reserved(here) == [([], 1)]
        refused = await client.post("/v1/responses", json={**body, "max_draft_tokens": 8})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_draft_tokens")


async def test_without_the_fields_nothing_is_sent_or_reported(site: SiteMaker) -> None:
    async with site() as here, http(here) as client:
        answer = await client.post("/v1/completions", json=BODIES["/v1/completions"])
        assert reserved(here) == [([], None)]
        assert "completion_tokens_details" not in answer.json()["usage"]
        assert "desc" not in answer.headers[HEADER]
        async with AsyncClient(here.addresses["grpc"], model=MODEL) as other:
            (choice,) = (await other.complete("a", max_tokens=3, deadline=10)).choices
            assert choice.trace is not None
            assert choice.trace.tokens_per_step is None


@pytest.mark.parametrize("path", BODIES)
async def test_a_worker_that_counts_nothing_accepts_none(site: SiteMaker, path: str) -> None:
    async with site() as here, http(here) as client:
        answer = await client.post(path, json={**BODIES[path], **predicted("b")})
        details = answer.json()["usage"]["completion_tokens_details"]
        assert details == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


async def test_with_a_grammar_it_has_no_effect(site: SiteMaker) -> None:
    guided = {"structured_outputs": {"regex": "[a-z]+"}}
    async with site() as here, http(here) as client:
        for path, body in BODIES.items():
            answer = await client.post(path, json={**body, **guided, **predicted("b")})
            details = answer.json()["usage"]["completion_tokens_details"]
            assert details == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}, path
        assert reserved(here) == [([], None)] * 2


@pytest.mark.parametrize(("worker", "fault"), [("prefill-0", "break_prefills"), ("decode-0", "moves")])
async def test_retries_and_moves_carry_it(site: SiteMaker, worker: str, fault: str) -> None:
    """Counts are those of all attempts that have reported any."""
    async with site(prefill=2) as here:
        for name in {worker, worker.replace("prefill-0", "prefill-1")}:
            setattr(here.worker(name).behaviour, fault, 1)
        here.worker("decode-0").behaviour.drafts = COUNTED
        request = GenerateRequest(
            model=MODEL, text="a", prediction="b", max_draft_tokens=2, max_tokens=9, ignore_eos=True
        )
        last = (await here.generate(request))[-1]
        assert last.trace.attempts > 1
        assert reserved(here) == [([98], 2)] * last.trace.attempts
        ended = 2 if fault == "moves" else 1
        assert last.usage.accepted_prediction_tokens == 4 * ended
        assert last.usage.rejected_prediction_tokens == 2 * ended
        assert last.trace.drafts.steps == 10 * ended


async def test_what_a_reopened_stream_repeats_counts_once(site: SiteMaker) -> None:
    async with site() as here:
        behaviour = here.worker("decode-0").behaviour
        behaviour.drafts, behaviour.follow_drops, behaviour.repeat_all = COUNTED, 2, True
        request = GenerateRequest(model=MODEL, text="a", prediction="b", max_tokens=20, ignore_eos=True)
        last = (await here.generate(request))[-1]
        assert (last.usage.accepted_prediction_tokens, last.usage.rejected_prediction_tokens) == (4, 2)


@pytest.mark.parametrize(
    ("prediction", "details"),
    [({}, None), (predicted("b"), {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 2})],
    ids=["without", "with a prediction"],
)
async def test_an_output_that_a_stop_string_ends_has_its_counts(
    site: SiteMaker, prediction: dict[str, Any], details: dict[str, int] | None
) -> None:
    """The router ends it: the worker's last report is never awaited."""
    first, second, third = expected([97], 3)
    async with site() as here, http(here) as client:
        behaviour = here.worker("decode-0").behaviour
        behaviour.drafts, behaviour.script = COUNTED, (first, second, ord("X"), third, *[65] * 90)
        body = {**BODIES["/v1/completions"], **prediction, "max_tokens": 90, "stop": "X"}
        answer = await client.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        assert answer.headers[HEADER].endswith('desc="1.50 tokens per step"')
        assert answer.json()["usage"].get("completion_tokens_details") == details
        await here.quiet()


async def test_the_decode_span_has_tokens_a_step(site: SiteMaker, kept: KeptSpans) -> None:
    async with site() as here, http(here) as client:
        here.worker("decode-0").behaviour.drafts = COUNTED
        await client.post("/v1/completions", json=BODIES["/v1/completions"])
    attributes = kept.named()["baton.decode"].attributes
    assert attributes["baton.tokens_per_step"] == 1.5
    assert attributes["baton.decode_steps"] == 10
    assert "baton.decode_steps" not in kept.named()["baton.prefill"].attributes


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called, it has bodies read on the event loop, or in a helper process."""

    def switch() -> None:
        if request.param == "large":
            monkeypatch.setattr(sizes, "LARGE_BYTES", 0)

    return switch


async def test_bad_input_is_refused_by_name_and_limit(site: SiteMaker, size: Callable[[], None]) -> None:
    asked: list[tuple[dict[str, Any], str, str]] = [
        ({"max_draft_tokens": 8}, "max_draft_tokens", "from 0 to 7"),
        ({"max_draft_tokens": -1}, "max_draft_tokens", "from 0 to 7"),
        ({"max_draft_tokens": "3"}, "max_draft_tokens", "integer"),
        (predicted("a" * 17_000), "prediction", "16384"),
        *((predicted(content), "prediction", "") for content in BAD),
        ({"prediction": {"type": "image", "content": "a"}}, "prediction", "content"),
        ({"prediction": "text"}, "prediction", ""),
    ]
    async with site() as here, http(here) as client:
        size()
        for path, body in BODIES.items():
            for fields, name, limit in asked:
                answer = await client.post(path, json={**body, **fields})
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, name), (path, fields, error)
                assert limit in error["message"], (path, error)
        assert reserved(here) == []


async def test_grpc_refuses_the_same(site: SiteMaker, size: Callable[[], None]) -> None:
    async with site() as here:
        size()
        for prompt in (
            {"text": "a"},
            {"chat": ChatMessages(messages=[ChatMessage(role="user", content="a")])},
        ):
            for fields, words in (
                ({"max_draft_tokens": 8}, "max_draft_tokens must be from 0 to 7"),
                ({"prediction": "a" * 17_000}, "16384"),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await here.generate(GenerateRequest(model=MODEL, **prompt, **fields))
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert words in (caught.value.details() or "")
        assert reserved(here) == []


def test_the_client_refuses_what_the_message_cannot_have() -> None:
    with pytest.raises(BatonError) as caught:
        to_request(MODEL, "a", max_draft_tokens=-1)
    assert caught.value.kind is ErrorKind.INVALID


async def test_the_most_tokens_are_accepted(site: SiteMaker, size: Callable[[], None]) -> None:
    async with site() as here, http(here) as client:
        size()
        body = {**BODIES["/v1/completions"], **predicted("a" * 16_384)}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert reserved(here) == [([97] * 16_384, None)]
