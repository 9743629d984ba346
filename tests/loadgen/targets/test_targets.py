"""Requests to each kind of server, and the record of each failure."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.v1.router_pb2 import GenerateRequest
from loadgen.common.errors import LoadgenError
from loadgen.common.record import Outcome, Record
from loadgen.common.settings import RequestClass, TargetSettings
from loadgen.targets.http_connection import HttpConnection
from loadgen.targets.http_target import spread
from loadgen.targets.open_target import open_target
from loadgen.targets.sse import EventReader
from loadgen.targets.target import Answer, Message, Request, RunClock
from tests.loadgen.fake_server import Behaviour, Server, serving
from tests.loadgen.targets.asking import LONG_TIMEOUT_S, ask

PROTOCOLS = ("grpc", "http")


def url_of(protocol: str, urls: tuple[Server, str, str]) -> str:
    return urls[1] if protocol == "grpc" else urls[2]


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_tokens_are_recorded_when_they_arrive(protocol: str) -> None:
    async with serving(Behaviour(first_s=0.03, gap_s=0.02)) as served:
        (record,), (answer,), (failure,) = await ask(url_of(protocol, served))
        emitted = served[0].emitted[0]
    assert failure is None
    assert emitted["id"] == "r0"
    assert len(record.token_times) == 5
    assert record.finish_reason == "length"
    assert (record.usage_input, record.usage_output) == (3, 5)
    assert answer.ids == [0, 1, 2, 3, 4]
    # Both clocks are the machine's: nothing is known before it was emitted, nor much later.
    for seen, sent in zip(record.token_times, emitted["emitted"], strict=True):
        assert 0.0 <= seen - sent < 1.0


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_tokens_of_one_message_share_their_time(protocol: str) -> None:
    async with serving(Behaviour(tokens_a_message=4)) as served:
        (record,), _, _ = await ask(url_of(protocol, served), tokens=6)
    assert len(record.token_times) == 6
    assert len(set(record.token_times)) == 2


async def test_stages_of_the_server() -> None:
    async with serving(Behaviour()) as (_, grpc_url, _http):
        (record,), _, _ = await ask(grpc_url)
    assert record.stages == {
        "admission": 0.0001,
        "queue": 0.001,
        "prefill": 0.003,
        "transfer": 0.002,
        "decode": 0.004,
        "first_step": 0.0015,
    }
    assert record.workers == "p0,d0"


@pytest.mark.parametrize(
    ("fault", "grpc_outcome", "http_outcome"),
    [
        ("hang", "TIMEOUT", "TIMEOUT"),
        ("reset", "UNAVAILABLE", "RESET"),
        ("no_finish", "NO_FINISH", "NO_FINISH"),
        ("busy", "RESOURCE_EXHAUSTED", "HTTP_429"),
        ("down", "UNAVAILABLE", "HTTP_503"),
        ("malformed", "MALFORMED", "MALFORMED"),
        ("stream_error", "UNAVAILABLE", "STREAM_ERROR"),
        ("late_reset", "UNAVAILABLE", "RESET"),
    ],
)
@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_each_failure_is_what_it_was(
    protocol: str, fault: str, grpc_outcome: str, http_outcome: str
) -> None:
    """And the next request over the same target is well."""
    async with serving(Behaviour(faults=(fault, "ok"))) as served:
        first_s = 1.0 if fault == "hang" else LONG_TIMEOUT_S
        records, _, failures = await ask(url_of(protocol, served), timeouts_s=(first_s, LONG_TIMEOUT_S))
        assert served[0].arrived == 2  # the failed one was not sent again
    assert failures[0] is not None
    assert failures[0].outcome == (grpc_outcome if protocol == "grpc" else http_outcome)
    if fault in ("stream_error", "late_reset"):
        assert len(records[0].token_times) >= 1
    assert failures[1] is None


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_no_answer(protocol: str) -> None:
    async with serving(Behaviour()) as served:
        url = url_of(protocol, served)
    settings = TargetSettings(url=url, model="m")
    target = open_target(settings, RunClock())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("loadgen.targets.grpc_target.CONNECT_S", 0.3)
        with pytest.raises(LoadgenError, match="no answer from"):
            await target.connect()
    await target.close()


@pytest.mark.parametrize("url", ["ftp://x:1", "127.0.0.1:80", "grpc://", "http://"])
def test_what_is_no_target(url: str) -> None:
    with pytest.raises(LoadgenError):
        open_target(TargetSettings(url=url, model="m"), RunClock())


async def test_http_counts_from_the_first_content_and_not_from_the_role() -> None:
    async with serving(Behaviour(first_s=0.2)) as (server, _, url):
        (record,), (answer,), (failure,) = await ask(url, (Message("user", "hello"),), form="chat")
        sent = server.requests[0]
    assert failure is None
    assert sent["path"] == "/v1/chat/completions"
    assert sent["body"]["messages"] == [{"role": "user", "content": "hello"}]
    assert len(record.token_times) == 5
    assert record.token_times[0] - record.scheduled > 0.19
    assert "".join(answer.text).split() == ["w0", "w1", "w2", "w3", "w4"]


COUNTED = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")


@pytest.mark.parametrize("field", COUNTED)
async def test_every_delta_with_output_counts(field: str) -> None:
    """Whatever carries the first tokens, they are the first ones."""
    async with serving(Behaviour(deltas=(field, field, field, "content"), gap_s=0.02)) as (server, _, url):
        (record,), _, (failure,) = await ask(url, (Message("user", "hello"),), form="chat")
        emitted = server.emitted[0]["emitted"]
    assert failure is None
    assert record.uncounted == ""
    assert len(record.token_times) == 5
    for seen, sent in zip(record.token_times, emitted, strict=True):
        assert 0.0 <= seen - sent < 1.0
    assert record.token_times == sorted(set(record.token_times))


@pytest.mark.parametrize("field", ["thoughts", "audio", "reasoning_details"])
async def test_output_in_other_fields_is_noted_before_the_first_token(field: str) -> None:
    async with serving(Behaviour(deltas=(field, "content", field))) as (_, _grpc, url):
        (record,), _, _ = await ask(url, (Message("user", "hello"),), form="chat")
    assert record.uncounted == field
    async with serving(Behaviour(deltas=("content", field))) as (_, _grpc, url):
        (record,), _, _ = await ask(url, (Message("user", "hello"),), form="chat")
    assert record.uncounted == ""


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_cached_prompt_tokens(protocol: str) -> None:
    async with serving(Behaviour(cached=2)) as served:
        (record,), _, _ = await ask(url_of(protocol, served))
    assert (record.usage_input, record.usage_cached) == (3, 2)


async def test_http_request_as_it_travels() -> None:
    klass = RequestClass(name="a", tenant="acme", priority=3, goodput={"ttft": 200.0, "tpot": 20.0})
    async with serving(Behaviour()) as (server, _, url):
        settings = TargetSettings(url=f"{url}/v1", model="m", slo_headers=True, extra_body={"top_k": 3})
        target = open_target(settings, RunClock())
        record = Record(0, 0, "a", 0.0, 2, 3, request_id="me")
        await target.send(target.prepare(Request("me", [7, 8], 3, klass)), record, Answer())
        await target.close()
        (seen,) = server.requests
    assert seen["path"] == "/v1/completions"
    assert seen["body"] == {
        "model": "m",
        "stream": True,
        "temperature": 0.0,
        "prompt": [7, 8],
        "max_tokens": 3,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "return_token_ids": True,
        "priority": 3,
        "top_k": 3,
    }
    headers = {name: seen["headers"][name] for name in ("x-request-id", "x-tenant-id", "x-slo-ttft-ms")}
    assert headers == {"x-request-id": "me", "x-tenant-id": "acme", "x-slo-ttft-ms": "200"}


async def test_a_class_has_a_temperature_of_its_own() -> None:
    for own, sent in ((None, 0.25), (0.0, 0.0), (1.5, 1.5)):
        request = Request("me", [7], 3, RequestClass(name="a", temperature=own))
        grpc = open_target(TargetSettings(url="grpc://127.0.0.1:1", temperature=0.25), RunClock())
        assert GenerateRequest.FromString(grpc.prepare(request).data).temperature == sent
        http = open_target(TargetSettings(url="http://127.0.0.1:1", temperature=0.25), RunClock())
        assert json.loads(http.prepare(request).data.partition(b"\r\n\r\n")[2])["temperature"] == sent
        await grpc.close()
        await http.close()


async def test_http_without_ids_usage_has_the_number_of_tokens() -> None:
    async with serving(Behaviour(tokens_a_message=2)) as (_, _grpc, url):
        settings = TargetSettings(url=url, model="m", extensions="no_ids")
        target = open_target(settings, RunClock())
        record = Record(0, 0, "default", 0.0, 1, 6, request_id="r")
        await target.send(target.prepare(Request("r", [1], 6, RequestClass())), record, Answer())
        await target.close()
    times = record.token_times
    assert (len(times), len(set(times)), record.messages, record.usage_output) == (6, 3, 5, 6)
    assert times == sorted(times)


@given(st.lists(st.floats(0, 9), min_size=1, max_size=9), st.integers(1, 20))
def test_tokens_are_dealt_out_over_their_chunks(times: list[float], count: int) -> None:
    times = sorted(times)
    dealt = spread(times, count)
    assert len(dealt) == count
    assert dealt[0] == times[0]
    assert dealt == sorted(dealt)
    assert count == 1 or dealt[-1] == times[-1]
    assert count < len(times) or set(dealt) == set(times)


async def test_http_uses_a_connection_again_but_not_a_stale_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[HttpConnection] = []
    original = HttpConnection.connection_made

    def counted(self: HttpConnection, transport: asyncio.BaseTransport) -> None:
        made.append(self)
        original(self, transport)

    monkeypatch.setattr(HttpConnection, "connection_made", counted)
    async with serving(Behaviour()) as (_, _grpc, url):
        await ask(url, timeouts_s=(LONG_TIMEOUT_S,) * 3)
        assert len(made) == 1
        monkeypatch.setattr("loadgen.targets.http_connection.IDLE_S", -1.0)
        await ask(url, timeouts_s=(LONG_TIMEOUT_S,) * 3)
        assert len(made) == 5  # one to connect, and one each


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (b"no http at all\r\n\r\n", Outcome.MALFORMED),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", Outcome.MALFORMED),
        (b"HTTP/1.1 500 No\r\nContent-Length: 3\r\n\r\n{no", "HTTP_500"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: [1]\n\n", Outcome.MALFORMED),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {}\n\n", Outcome.MALFORMED),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\nnonsense\n\n", Outcome.MALFORMED),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n", Outcome.NO_FINISH),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", Outcome.MALFORMED),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", Outcome.RESET),
        (b"", Outcome.RESET),
    ],
)
async def test_http_answers_that_are_none(answer: bytes, outcome: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    _, _, (failure,) = await ask(f"http://127.0.0.1:{port}")
    server.close()
    assert failure is not None
    assert failure.outcome == outcome


def test_events_come_in_pieces() -> None:
    stream = b": hello\n\ndata: a\ndata: b\r\n\r\nevent: error\ndata:c\n\nid: 4\n\ndata: \xc3\xa9\n\n"
    for size in (1, 2, 3, 7, 100):
        reader = EventReader()
        events = [
            event for at in range(0, len(stream), size) for event in reader.feed(stream[at : at + size])
        ]
        assert [(one.name, one.data) for one in events] == [
            ("message", b"a\nb"),
            ("error", b"c"),
            ("message", "é".encode()),
        ]


def test_an_event_without_an_end_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.targets.sse.LONGEST_EVENT", 100)
    with pytest.raises(ValueError, match="without an end"):
        EventReader().feed(b"data: " + b"x" * 200)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_cancelled_request_ends_at_the_server(protocol: str) -> None:
    """The request leaves when its task is cancelled, and the server stops streaming."""
    async with serving(Behaviour(first_s=0.01, gap_s=0.05)) as served:
        began = time.monotonic()
        (record,), _, (failure,) = await ask(url_of(protocol, served), tokens=1000, timeouts_s=(0.3,))
        assert time.monotonic() - began < 5
        await asyncio.sleep(0.3)
        assert served[0].emitted == []  # it never came to its end
    assert failure is not None
    assert failure.outcome == Outcome.TIMEOUT
    assert record.token_times


async def test_grpc_sends_metadata_and_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    klass = RequestClass(name="a", tenant="acme", priority=2, goodput={"ttft": 200.0})
    settings = TargetSettings(url="grpc://127.0.0.1:1", model="m", slo_headers=True, api_key_env="A_KEY")
    target = open_target(settings, RunClock())
    payload = target.prepare(Request("me", [7], 3, klass))
    await target.close()
    assert dict(payload.metadata) == {
        "x-request-id": "me",
        "x-tenant-id": "acme",
        "x-slo-ttft-ms": "200",
        "authorization": "Bearer secret",
    }
    assert GenerateRequest.FromString(payload.data).priority == 2
