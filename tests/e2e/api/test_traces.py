"""One trace of a request over router, prefill, wire and decode, as a collector on loopback receives it."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from baton.v1.router_pb2 import GenerateRequest
from tests.e2e.support.cluster import MODEL, Cluster
from tests.support.otlp_collector import OtlpCollector, ReceivedSpan

SERVER, CLIENT, INTERNAL = 2, 3, 1
TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STATE = "vendor=opaque,other=1"
PROMPT = "Once upon a time there was a very unusual sentence"
# What one streamed or whole request leaves.
SPANS = {
    "baton-router": {"request", "admission", "queue", "reserve", "prefill", "handoff", "decode"},
    "baton-prefill": {
        "worker.prefill",
        "worker.prefill.queue",
        "worker.prefill.compute",
        "worker.prefill.transfer",
    },
    "baton-decode": {"worker.decode"},
}
COUNT = sum(map(len, SPANS.values()))
# Clocks of processes are read one after the other.
SLACK_NS = 5_000_000


@pytest.fixture
def cluster(small: Cluster) -> Cluster:
    return small


def by_name(spans: list[ReceivedSpan]) -> dict[str, ReceivedSpan]:
    return {span.name.removeprefix("baton."): span for span in spans}


def check_whole(spans: list[ReceivedSpan], parent_id: str) -> dict[str, ReceivedSpan]:
    """Checks names, parents and times of one request's spans; returns them by name."""
    found: dict[str, set[str]] = {}
    for span in spans:
        found.setdefault(span.service, set()).add(span.name.removeprefix("baton."))
    assert found == SPANS
    assert len(spans) == COUNT
    named = by_name(spans)
    root, call = named["request"], named["worker.prefill"]
    assert (root.parent_id, root.kind) == (parent_id, SERVER)
    for stage in SPANS["baton-router"] - {"request"}:
        assert named[stage].parent_id == root.span_id
    assert named["prefill"].kind == named["reserve"].kind == CLIENT
    assert (call.parent_id, call.kind) == (named["prefill"].span_id, SERVER)
    for part in ("queue", "compute", "transfer"):
        assert named[f"worker.prefill.{part}"].parent_id == call.span_id
        assert named[f"worker.prefill.{part}"].kind == INTERNAL
    assert (named["worker.decode"].parent_id, named["worker.decode"].kind) == (root.span_id, SERVER)
    for span in spans:
        assert span.start_ns <= span.end_ns
        assert root.start_ns - SLACK_NS <= span.start_ns
        assert not span.is_error
    stages = [named[stage] for stage in ("admission", "queue", "reserve")]
    stages += [named[stage] for stage in ("prefill", "handoff", "decode")]
    for before, after in itertools.pairwise(stages):
        assert before.start_ns <= after.start_ns <= root.end_ns
    parts = [named[f"worker.prefill.{part}"] for part in ("queue", "compute", "transfer")]
    assert parts[0].end_ns == parts[1].start_ns <= parts[1].end_ns <= parts[2].end_ns + SLACK_NS
    assert call.events["first_token"] <= named["prefill"].end_ns + SLACK_NS
    assert call.start_ns >= named["prefill"].start_ns - SLACK_NS
    return named


async def test_a_request_over_http_is_one_trace(cluster: Cluster, collector: OtlpCollector) -> None:
    headers = {"traceparent": f"00-{TRACE}-{CLIENT_SPAN}-01", "tracestate": STATE}
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "temperature": 0.25}
    async with cluster.http() as client:
        response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    output = response.json()
    await asyncio.to_thread(collector.wait_for, lambda: len(collector.of_trace(TRACE)) >= COUNT)
    named = check_whole(collector.of_trace(TRACE), CLIENT_SPAN)
    root = named["request"]
    assert response.headers["traceresponse"] == f"00-{TRACE}-{root.span_id}-01"
    assert {span.state for span in named.values()} == {STATE}
    usage, request_id = output["usage"], response.headers["x-request-id"]
    assert root.attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.temperature": 0.25,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "baton.route": "/v1/completions",
        "baton.request_id": request_id,
        "baton.attempts": 1,
        "baton.prefill_worker": "prefill-0",
        "baton.decode_worker": "decode-0",
        "baton.kv_bytes_shipped": root.attributes["baton.kv_bytes_shipped"],
        "gen_ai.response.time_to_first_chunk": root.attributes["gen_ai.response.time_to_first_chunk"],
    }
    first_s = root.attributes["gen_ai.response.time_to_first_chunk"]
    assert 0 < first_s <= (root.end_ns - root.start_ns) / 1e9
    assert {span.attributes.get("baton.request_id", request_id) for span in named.values()} == {request_id}
    transfer = named["worker.prefill.transfer"].attributes
    assert transfer["baton.transport"] == "grpc"
    assert transfer["baton.kv_bytes_shipped"] == root.attributes["baton.kv_bytes_shipped"] > 0
    assert named["worker.decode"].attributes["gen_ai.usage.output_tokens"] == 12
    instances = {one["service.name"]: one.get("service.instance.id") for one in collector.resources}
    assert instances == {"baton-router": None, "baton-prefill": "prefill-0", "baton-decode": "decode-0"}
    assert set(collector.paths) == {"/v1/traces"}
    assert {one["authorization"] for one in collector.headers} == {"Bearer of-the-collector"}
    assert "of-the-collector" not in cluster.log.read_text()
    # No content, in whole or in words.
    sent = b"".join(collector.bodies)
    for words in (PROMPT, output["choices"][0]["text"], "unusual"):
        assert words.encode() not in sent


async def test_a_request_over_grpc_is_one_trace(cluster: Cluster, collector: OtlpCollector) -> None:
    trace = "1" * 32
    request = GenerateRequest(model=MODEL, text=PROMPT, max_tokens=3, ignore_eos=True)
    async with cluster.stub() as stub:
        call = stub.Generate(request, metadata=(("traceparent", f"00-{trace}-{CLIENT_SPAN}-01"),), timeout=60)
        _ = [message async for message in call]
        given = dict(await call.trailing_metadata())
    await asyncio.to_thread(collector.wait_for, lambda: len(collector.of_trace(trace)) >= COUNT)
    named = check_whole(collector.of_trace(trace), CLIENT_SPAN)
    assert given["traceresponse"] == f"00-{trace}-{named['request'].span_id}-01"


async def test_what_is_not_sampled_leaves_no_span(cluster: Cluster, collector: OtlpCollector) -> None:
    """The client's flag decides, and without one the configured share, which is 0 here."""
    unsampled = "2" * 32
    # An answer that ends with its first token has no handoff.
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}
    async with cluster.http() as client:
        own = await client.post(
            "/v1/completions", json=body, headers={"traceparent": f"00-{unsampled}-{CLIENT_SPAN}-00"}
        )
        none = await client.post("/v1/completions", json=body)
        last = await client.post(
            "/v1/completions", json=body, headers={"traceparent": f"00-{'3' * 32}-{CLIENT_SPAN}-01"}
        )
    assert own.status_code == none.status_code == last.status_code == 200
    assert own.headers["traceresponse"].startswith(f"00-{unsampled}-")
    assert own.headers["traceresponse"].endswith("-00")
    assert none.headers["traceresponse"].endswith("-00")
    # Spans are exported in order, so that those of earlier requests would have come before these.
    await asyncio.to_thread(collector.wait_for, lambda: len(collector.of_trace("3" * 32)) >= COUNT)
    traces = {span.trace_id for span in collector.spans}
    assert unsampled not in traces
    assert none.headers["traceresponse"].split("-")[1] not in traces
