"""A server whose truth is known: it streams at set times, over gRPC and HTTP, and logs when it emitted what.

    python -m tests.loadgen.fake_server '{"first_s": 0.02, "gap_s": 0.005}'

writes {"grpc": PORT, "http": PORT} on stdout and serves until stdin ends. The log has one line a request:
{"id": …, "emitted": [times of the machine's monotonic clock]}. Faults are dealt out by arrival, in turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import sys
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from baton.base.process_tuning import batch_wakeups
from baton.v1.router_pb2 import (
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    RequestTrace,
    Stage,
    StageTime,
    Usage,
)
from baton.v1.types_pb2 import FinishReason

# What a request may meet. The first four are reported on either protocol in its own way.
FAULTS = (
    *("ok", "hang", "reset", "no_finish", "busy", "down", "malformed"),
    *("stream_error", "late_reset", "short"),
)


@dataclass(frozen=True)
class Behaviour:
    """Times in seconds. With `service_s` requests are served one after another, each as long as one of them
    by chance (all alike: M/D/1), before their first token. During a stall (from when after the start, for how
    long) nothing is emitted."""

    first_s: float = 0.005
    gap_s: float = 0.001
    tokens_a_message: int = 1
    service_s: tuple[float, ...] = ()
    stall: tuple[float, float] | None = None
    faults: tuple[str, ...] = ("ok",)
    seed: int = 0
    usage_off_by: int = 0
    # What carries each token of a chat, in turn; the last one all further ones.
    deltas: tuple[str, ...] = ("content",)
    # Of each prompt so many tokens are reported as cached; None: nothing is reported.
    cached: int | None = None
    # Whether the HTTP protocol knows fields that OpenAI's does not.
    extensions: bool = True
    # Tokens of a text: a word costs so many, and every prompt some more.
    tokens_a_word: int = 1
    tokens_a_prompt: int = 1
    log: str | None = None
    # Ports of gRPC and HTTP (0: any); servers that share theirs are given connections by chance.
    ports: tuple[int, int] = (0, 0)
    share_ports: bool = False
    # The processor that it runs on; None: any.
    cpu: int | None = None


@dataclass
class Server:
    """Serves gRPC and HTTP with one behaviour."""

    behaviour: Behaviour
    arrived: int = 0
    free_at: float = 0.0
    begun: float = field(default_factory=time.monotonic)
    emitted: list[dict[str, Any]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.behaviour.seed)

    def fault(self) -> str:
        """The fault that the next request meets."""
        self.arrived += 1
        return self.behaviour.faults[(self.arrived - 1) % len(self.behaviour.faults)]

    async def times(self, count: int, log: list[float]) -> AsyncIterator[int]:
        """Numbers of tokens to emit now; the time of each is logged as it is handed out."""
        behaviour = self.behaviour
        due = time.monotonic() + behaviour.first_s
        if behaviour.service_s:
            self.free_at = max(self.free_at, time.monotonic()) + self.random.choice(behaviour.service_s)
            due = self.free_at
        left = count
        while left:
            await asyncio.sleep(self._not_in_stall(due) - time.monotonic())
            tokens = min(left, behaviour.tokens_a_message)
            left -= tokens
            log.extend([time.monotonic()] * tokens)
            yield tokens
            due = max(due, time.monotonic() - behaviour.gap_s) + behaviour.gap_s

    def _not_in_stall(self, due: float) -> float:
        if self.behaviour.stall is None:
            return due
        begin, length = self.behaviour.stall
        begin += self.begun
        return max(due, begin + length) if begin <= due else due

    def count(self, prompt: str | list[int]) -> int:
        """Tokens of a prompt, as billed."""
        behaviour = self.behaviour
        if isinstance(prompt, list):
            return len(prompt) + behaviour.usage_off_by
        return behaviour.tokens_a_prompt + len(prompt.split()) * behaviour.tokens_a_word

    def keep(self, request_id: str, log: list[float], prompt: object) -> None:
        """`prompt`: as it came; the log has its checksum."""
        checksum = zlib.crc32(json.dumps(prompt).encode())
        self.emitted.append({"id": request_id, "emitted": log, "prompt": checksum})


class GrpcServer:
    """RouterService.Generate, as raw as it goes: the server must not be slower than who measures it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        behaviour = server.behaviour
        self.grpc = grpc.aio.server(options=(("grpc.so_reuseport", int(behaviour.share_ports)),))
        handler = grpc.unary_stream_rpc_method_handler(
            self.generate,
            request_deserializer=GenerateRequest.FromString,
            response_serializer=_serialized,
        )
        models = grpc.unary_unary_rpc_method_handler(
            self.list_models,
            request_deserializer=ListModelsRequest.FromString,
            response_serializer=ListModelsResponse.SerializeToString,
        )
        handlers = {"Generate": handler, "ListModels": models}
        self.grpc.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("baton.v1.RouterService", handlers),)
        )
        self.port = self.grpc.add_insecure_port(f"127.0.0.1:{behaviour.ports[0]}")

    async def list_models(
        self, request: ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> ListModelsResponse:
        return ListModelsResponse(models=[Model(id="fake")])

    async def generate(
        self, request: GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[GenerateResponse | bytes]:
        server = self._server
        server.requests.append({"prompt": list(request.token_ids.ids), "text": request.text})
        metadata = {str(key): str(value) for key, value in context.invocation_metadata() or ()}
        fault = server.fault()
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault in ("reset", "down"):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        if fault == "busy":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        log: list[float] = []
        number = 0
        count = max(1, request.max_tokens - (fault == "short"))
        async for tokens in server.times(count, log):
            if fault in ("stream_error", "late_reset") and number:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone on the way")
            if fault == "malformed" and number:
                yield b"\xff no message"
            yield GenerateResponse(first_number=number, token_ids=range(number, number + tokens))
            number += tokens
        if fault != "no_finish":
            yield self._last(request, number)
        server.keep(metadata.get("x-request-id", ""), log, list(request.token_ids.ids) or request.text)

    def _last(self, request: GenerateRequest, number: int) -> GenerateResponse:
        stages = [
            (Stage.STAGE_ADMITTED, 100_000),
            (Stage.STAGE_PREFILLING, 1_100_000),
            (Stage.STAGE_FIRST_TOKEN, 4_100_000),
            (Stage.STAGE_HANDED_OFF, 6_100_000),
            (Stage.STAGE_DECODING, 7_600_000),
            (Stage.STAGE_ENDED, 10_100_000),
        ]
        return GenerateResponse(
            finish_reason=FinishReason.FINISH_REASON_LENGTH,
            usage=Usage(
                prompt_tokens=self._server.count(request.text or list(request.token_ids.ids)),
                completion_tokens=number,
                cached_tokens=self._server.behaviour.cached or 0,
            ),
            trace=RequestTrace(
                prefill_worker="p0",
                decode_worker="d0",
                stages=[StageTime(stage=stage, offset_ns=offset) for stage, offset in stages],
            ),
        )


def _serialized(message: GenerateResponse | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def _delta(field: str, text: str) -> dict[str, Any]:
    """A delta that carries text in this field."""
    if field == "tool_calls":
        return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}
    if field == "function_call":
        return {"content": None, "function_call": {"arguments": text}}
    return {field: text}


class HttpConnection(asyncio.Protocol):
    """One connection of an OpenAI server: /v1/completions, /v1/chat/completions, /v1/models."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._buffer = b""
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        lines = head.decode().split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
        }
        length = int(headers.get("content-length", "0"))
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        path = lines[0].split()[1]
        body = json.loads(rest[:length]) if length else {}
        self._task = asyncio.get_running_loop().create_task(self._answer(path, headers, body))

    async def _answer(self, path: str, headers: dict[str, str], body: dict[str, Any]) -> None:
        server, unknown = self._server, {"ignore_eos", "return_token_ids"} & set(body)
        server.requests.append({"path": path, "headers": headers, "body": body})
        if path == "/v1/models":
            self._whole(200, {"data": [{"id": "fake"}]})
        elif path not in ("/v1/completions", "/v1/chat/completions"):
            self._whole(404, {"error": {"message": "nothing here"}})
        elif unknown and not server.behaviour.extensions:
            self._whole(400, {"error": {"message": f"unknown field {sorted(unknown)[0]}"}})
        else:
            await self._stream(headers, body, chat="chat" in path)

    async def _stream(self, headers: dict[str, str], body: dict[str, Any], *, chat: bool) -> None:
        server = self._server
        fault = server.fault()
        assert self._transport is not None
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "reset":
            return self._transport.abort()
        if fault in ("busy", "down"):
            return self._whole(429 if fault == "busy" else 503, {"error": {"message": "full"}})
        self._write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        if chat:
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        log: list[float] = []
        number = 0
        async for tokens in server.times(max(1, body["max_tokens"] - (fault == "short")), log):
            if number and fault == "late_reset":
                return self._transport.abort()
            if number and fault == "malformed":
                return self._chunk(b"data: {not json}\n\n")
            if number and fault == "stream_error":
                return self._chunk(b'event: error\ndata: {"error": {"message": "lost"}}\n\n')
            self._event({"choices": [self._choice(number, tokens, body, chat=chat)], "usage": None})
            number += tokens
        if fault != "no_finish":
            finish: dict[str, Any] = {"index": 0, "finish_reason": "length"}
            finish["delta" if chat else "text"] = {} if chat else ""
            self._event({"choices": [finish]})
            prompt = body.get("prompt") or "".join(one["content"] for one in body.get("messages", []))
            usage: dict[str, Any] = {"prompt_tokens": server.count(prompt), "completion_tokens": number}
            if server.behaviour.cached is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": server.behaviour.cached}
            self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._write(b"0\r\n\r\n")
        server.keep(headers.get("x-request-id", ""), log, body.get("prompt") or body.get("messages"))

    def _choice(self, number: int, tokens: int, body: dict[str, Any], *, chat: bool) -> dict[str, Any]:
        text = "".join(f" w{n}" for n in range(number, number + tokens))
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        deltas = self._server.behaviour.deltas
        choice |= {"delta": _delta(deltas[min(number, len(deltas) - 1)], text)} if chat else {"text": text}
        if chat and self._server.behaviour.deltas != ("content",):
            return choice
        if body.get("return_token_ids"):
            choice["token_ids"] = list(range(number, number + tokens))
        return choice

    def _event(self, document: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(document).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self._write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _whole(self, status: int, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._write(head.encode() + body)

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)


@contextlib.asynccontextmanager
async def serving(behaviour: Behaviour) -> AsyncIterator[tuple[Server, str, str]]:
    """The server and its addresses, gRPC and HTTP, in this process."""
    server = Server(behaviour)
    protocol = GrpcServer(server)
    await protocol.grpc.start()
    loop = asyncio.get_running_loop()
    http = await loop.create_server(
        lambda: HttpConnection(server),
        *("127.0.0.1", behaviour.ports[1]),
        reuse_port=behaviour.share_ports,
        backlog=4096,  # a connection refused for want of room is tried again after a second
    )
    port = http.sockets[0].getsockname()[1]
    try:
        yield server, f"grpc://127.0.0.1:{protocol.port}", f"http://127.0.0.1:{port}"
    finally:
        http.close()
        await protocol.grpc.stop(0)


async def _main(behaviour: Behaviour) -> list[dict[str, Any]]:
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    async with serving(behaviour) as (server, grpc_url, http_url):
        sys.stdout.write(json.dumps({"grpc": grpc_url, "http": http_url}) + "\n")
        sys.stdout.flush()
        await commands.read()
    return server.emitted


def main(argv: Sequence[str]) -> None:
    """Serves as the JSON in the first argument says."""
    wanted: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(argv[0]).items()
    }
    behaviour = Behaviour(**wanted)
    gc.disable()  # it keeps all that it saw; to look that through would take it tens of milliseconds
    if behaviour.cpu is not None:
        os.sched_setaffinity(0, {behaviour.cpu})
    batch_wakeups()  # what it logs as emitted is then on its way sooner
    emitted = asyncio.run(_main(behaviour))
    if behaviour.log is not None:
        Path(behaviour.log).write_text("".join(json.dumps(one) + "\n" for one in emitted))


if __name__ == "__main__":
    main(sys.argv[1:])
