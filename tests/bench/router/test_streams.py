"""The clients that only count: the same counts however the bytes are cut."""

from __future__ import annotations

import asyncio
import struct
from typing import cast

from baton.v1.decode_pb2 import SubscribeResponse
from baton.v1.router_pb2 import GenerateResponse
from baton.v1.types_pb2 import Attempt
from bench.router.clients import Counts, GrpcConnection, Load, SseStream
from bench.router.fake_workers import Sequence, encode_output

_DATA, _HEADERS, _END_STREAM = 0, 1, 1


class Sink:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data


def frame(kind: int, flags: int, payload: bytes, stream: int = 1) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def message(tokens: int) -> bytes:
    data = GenerateResponse(token_ids=[7] * tokens, text="aad" * tokens).SerializeToString()
    return b"\0" + struct.pack(">I", len(data)) + data


async def grpc_counts(output_len: int, response: bytes, size: int) -> Counts:
    counts = Counts()
    connection = GrpcConnection(Load(output_len, 0.0), counts, 1)
    connection.connection_made(cast(asyncio.Transport, Sink()))
    await asyncio.sleep(0.01)
    for start in range(0, len(response), size):
        connection.data_received(response[start : start + size])
    return counts


async def test_messages_over_http2() -> None:
    """Messages within a frame, across frames, and a stream that ends too early."""
    both = message(1) + message(1)
    whole = frame(_HEADERS, 4, b"\x88") + frame(_DATA, 0, both[:9]) + frame(_DATA, 0, both[9:])
    end = frame(_HEADERS, 4 | _END_STREAM, b"")
    for size in (1, 7, 10_000):
        counts = await grpc_counts(2, whole + end, size)
        assert (counts.tokens, counts.messages, counts.requests, counts.failed) == (2, 2, 1, 0)
        assert len(counts.ttft_ms) == 1
    early = await grpc_counts(2, frame(_DATA, 0, message(1)) + end, 10_000)
    assert (early.tokens, early.requests, early.failed) == (1, 0, 1)


async def test_events_over_http1() -> None:
    """Events of one and of two tokens, whose chunks and texts are cut anywhere."""
    events = [b'data: {"text":"aad"}\n\n', b'data: {"text":"aadaad"}\n\n', b"data: [DONE]\n\n", b""]
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    response = head + b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events)
    for size in (1, 5, 10_000):
        counts = Counts()
        stream = SseStream(Load(2, 0.0), counts)
        stream.connection_made(cast(asyncio.Transport, sink := Sink()))
        await asyncio.sleep(0.01)
        assert sink.written.startswith(b"POST /v1/completions ")
        for start in range(0, len(response), size):
            stream.data_received(response[start : start + size])
        assert (counts.tokens, counts.messages, counts.failed) == (3, 2, 1)  # of two that it asked for
        stream.data_received(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\n{}")
        assert counts.failed == 2


def test_outputs_of_the_fake_worker() -> None:
    """Messages that the fake worker encodes by hand are read by protobuf as meant."""
    attempt = Attempt(request_id=b"r" * 16, number=3).SerializeToString()
    sequence = Sequence(b"router", 3, b"\x0a" + bytes((len(attempt),)) + attempt, last=400, next=250)
    (output,) = SubscribeResponse.FromString(encode_output(sequence, 150, last=True)).outputs
    assert (output.attempt.request_id, output.attempt.number) == (b"r" * 16, 3)
    assert (output.first_number, len(output.token_ids), output.finish_reason) == (250, 150, 2)
