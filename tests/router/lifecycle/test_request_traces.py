"""Spans of calls through a whole router: how they end, what fails, what is refused. A collector that hangs or
is away delays nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest

from services.common.config.tls import Auth
from services.common.config.tracing import TracingSettings
from services.common.observability.tracing import recorder as recorder_module
from services.common.observability.tracing.span import Span
from tests.router.conftest import MODEL, Site, SiteMaker, ids_request, until
from tests.router.http_client import http
from tests.router.tenants.test_tenants_file import file_of, tenant
from tests.support.kept_spans import KeptSpans
from tests.support.otlp_collector import OtlpCollector, otlp_collector

TRACE, CLIENT = "a" * 32, "b" * 16
GIVEN = {"traceparent": f"00-{TRACE}-{CLIENT}-01"}
STAGES = {f"baton.{stage}" for stage in ("admission", "queue", "reserve", "prefill", "handoff", "decode")}


def roots(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.name == "baton.request"]


async def call(here: Site, *ids: int, max_tokens: int = 4, **fields: Any) -> dict[str, str]:
    """The trailing metadata of one call."""
    running = here.stub.Generate(
        ids_request(list(ids), max_tokens, **fields), metadata=tuple(GIVEN.items()), timeout=30
    )
    async for _ in running:
        pass
    return dict(await running.trailing_metadata())


async def test_a_call_of_several_outputs_has_one_root(site: SiteMaker, kept: KeptSpans) -> None:
    async with site() as here:
        given = await call(here, 1, 2, 3, n=3, seed=5, temperature=1.0)
    spans = kept.all()
    (root,) = roots(spans)
    assert root.parent_id == bytes.fromhex(CLIENT)
    assert given["traceresponse"] == root.context.header
    assert root.attributes["gen_ai.request.choice.count"] == 3
    assert root.attributes["gen_ai.operation.name"] == "generate_content"
    assert root.attributes["gen_ai.usage.input_tokens"] == 3
    assert root.attributes["gen_ai.usage.output_tokens"] == 12
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"] * 3
    stages = [span for span in spans if span is not root]
    outputs = {span.attributes["baton.request_id"] for span in stages}
    assert len(outputs) == 3
    for output in outputs:
        assert {s.name for s in stages if s.attributes["baton.request_id"] == output} == STAGES
    assert {span.parent_id for span in stages} == {root.context.span_id}
    assert len({span.context.span_id for span in spans}) == len(spans)
    assert {span.error for span in spans} == {""}


async def test_workers_are_told_the_spans_that_they_belong_to(site: SiteMaker, kept: KeptSpans) -> None:
    async with site() as here:
        await call(here, 1, 2, 3)
        prefill, reserve = here.worker("prefill-0").prefill.last, here.worker("decode-0").decode.reserves[0]
    named = kept.named()
    assert prefill is not None
    assert prefill.trace.trace_id == reserve.trace.trace_id == bytes.fromhex(TRACE)
    assert prefill.trace.span_id == named["baton.prefill"].context.span_id
    assert reserve.trace.span_id == named["baton.request"].context.span_id


async def test_an_attempt_that_fails_is_an_event(site: SiteMaker, kept: KeptSpans) -> None:
    async with site(prefill=2) as here:
        for name in ("prefill-0", "prefill-1"):
            here.worker(name).behaviour.break_prefills = 1
        await call(here, 1, 2, 3)
    root = kept.named()["baton.request"]
    failures = [event for event in root.events if event.name == "attempt_failed"]
    assert [event.attributes["error.type"] for event in failures] == ["unavailable"] * len(failures)
    assert len(failures) == root.attributes["baton.attempts"] - 1 >= 1  # type: ignore[operator]
    assert all(root.start_ns <= event.at_ns <= root.end_ns for event in failures)
    assert root.error == ""


async def test_a_request_that_fails_marks_where(site: SiteMaker, kept: KeptSpans) -> None:
    async with site(max_attempts=1) as here:
        here.worker("prefill-0").behaviour.break_prefills = 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(here, 1, 2, 3)
    named = kept.named()
    given = dict(cast("Iterable[tuple[str, str | bytes]]", caught.value.trailing_metadata()))
    assert given["traceresponse"] == named["baton.request"].context.header
    assert "grpc-status-details-bin" in given
    assert named["baton.request"].error == named["baton.prefill"].error == "unavailable"
    assert {named[f"baton.{stage}"].error for stage in ("admission", "queue")} == {""}


async def test_what_is_refused_has_a_root_alone(site: SiteMaker, kept: KeptSpans) -> None:
    async with site() as here, http(here) as client:
        body = {"model": MODEL, "prompt": "secret words", "temperature": -1}
        response = await client.post("/v1/completions", json=body, headers=GIVEN)
        assert response.status_code == 400
    root = kept.named()["baton.request"]
    assert root.error == "invalid"
    assert response.headers["traceresponse"] == root.context.header
    assert root.context.trace_id == bytes.fromhex(TRACE)
    assert root.attributes["baton.route"] == "/v1/completions"
    assert "secret" not in repr(root)


# Refused when it arrives, and when it would run.
@pytest.mark.parametrize("limit", [{"concurrent_requests": 1}, {"output_tokens_per_minute": 250}])
async def test_what_a_limit_refuses_has_one_root_with_the_error(
    limit: dict[str, int], site: SiteMaker, kept: KeptSpans, tmp_path: Path
) -> None:
    keys = tmp_path / "tenants"
    keys.write_text(file_of(tenant("a", "sk-1", **limit)))
    async with site(auth=Auth(tenants_file=keys)) as here, http(here) as client:
        here.worker("decode-0").behaviour.step_s = 0.05
        client.headers.update({"authorization": "Bearer sk-1", **GIVEN})
        body = {"model": MODEL, "prompt": "words", "max_tokens": 200, "ignore_eos": True}
        running = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: here.router.dispatcher.running == 1)
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 429
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await here.quiet()
    refused, ran = roots(kept.all())
    assert answer.headers["traceresponse"] == refused.context.header
    assert (refused.error, ran.error) == ("rate_limited", "")
    assert refused.attributes["baton.tenant"] == ran.attributes["baton.tenant"] == "a"


async def test_the_clients_flag_decides_whether_a_call_is_recorded(site: SiteMaker, kept: KeptSpans) -> None:
    unsampled = {"traceparent": GIVEN["traceparent"].removesuffix("1") + "0"}
    async with site() as here, http(here) as client:
        for prompt in ("words", -1):
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
            await client.post("/v1/completions", json=body, headers=unsampled)
        prefill, reserve = here.worker("prefill-0").prefill.last, here.worker("decode-0").decode.reserves[0]
    assert prefill is not None
    assert not prefill.HasField("trace")
    assert not reserve.HasField("trace")
    assert kept.all() == []


async def test_a_client_that_goes_away_leaves_a_whole_trace(site: SiteMaker, kept: KeptSpans) -> None:
    async with site() as here:
        here.worker("decode-0").behaviour.step_s = 0.05
        running = here.stub.Generate(ids_request([1, 2], 400), metadata=tuple(GIVEN.items()), timeout=30)
        async for _ in running:
            break
        running.cancel()
        await until(lambda: here.router.dispatcher.running == 0)
    root = kept.named()["baton.request"]
    assert (root.error, root.attributes["gen_ai.response.finish_reasons"]) == ("", ["cancelled"])


async def test_names_are_those_of_the_conventions(site: SiteMaker, kept: KeptSpans) -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    async with site() as here, http(here) as client:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "words"}], "max_tokens": 3}
        response = await client.post("/v1/chat/completions", json=body, headers=GIVEN)
        assert response.status_code == 200, response.text
    spans = kept.all()
    used = {name for span in spans for name in span.attributes if not name.startswith("baton.")}
    assert used
    assert used <= known
    assert roots(spans)[0].attributes["gen_ai.operation.name"] == "chat"


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    with otlp_collector() as running:
        yield running


@pytest.mark.parametrize("hangs", [True, False])
async def test_a_collector_that_hangs_or_is_away_delays_nothing(
    hangs: bool, site: SiteMaker, collector: OtlpCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are answered while an export hangs, and spans beyond the bound are counted."""
    monkeypatch.setattr(recorder_module, "BATCH", 7)
    monkeypatch.setattr(recorder_module.SpanRecorder.__init__, "__defaults__", (14, 0.01))
    if hangs:
        collector.hangs = True
    else:
        collector.close()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    settings = TracingSettings(otlp_endpoint=collector.url)
    async with site(tracing=settings) as here, http(here) as client:
        spans = here.router.observations.traces.recorder
        assert spans is not None
        await call(here, 1, 2, 3)
        if hangs:
            await asyncio.to_thread(collector.wait_for, lambda: bool(collector.paths))
        else:
            await until(lambda: spans.failed > 0, 30)
        for _ in range(5):
            await call(here, 1, 2, 3)
        if hangs:
            # Two calls' spans are queued, and those of the first one under way, its last one perhaps not.
            assert spans.exported == 0
            assert spans.crowded_out in (21, 22)
        lost = spans.crowded_out + spans.failed
        metrics = (await client.get("/metrics")).text
        assert 'baton_router_trace_spans_dropped_total{model="fake",reason="queue_full"}' in metrics
        assert lost > 0
