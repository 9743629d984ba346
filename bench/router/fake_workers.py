"""A prefill and a decode worker that compute nothing and spend little time: one process, without an engine.

    python -m bench.router.fake_workers FOLDER STEP_MS SLOTS

FOLDER is that of the model, whose tokenizer they report. Writes a line of JSON with their two addresses, and
serves until its stdin ends. Prefill answers at once. Decode makes a token for each sequence every STEP_MS;
tokens that a router does not take in time go out with the next message, as those of a real worker do.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from baton.base.process_tuning import batch_wakeups
from baton.model_spec.model_files import TokenizerFiles
from baton.v1 import decode_pb2, prefill_pb2, worker_pb2
from baton.v1.types_pb2 import FinishReason, WorkerIdentity, WorkerRole
from bench.model_folders import CONTEXT, VOCAB
from services.common.rpc.grpc_server import GrpcServer

# Below 128, so that a token takes one byte in a message.
TOKEN = 7
_BEAT_S = 0.4
_TICKET_S = 5.0
_BLOCK_TOKENS = 16


@dataclass(slots=True)
class Sequence:
    """One attempt at decode. `attempt`: serialised, as the first field of a SequenceOutput."""

    router_id: bytes
    number: int
    attempt: bytes
    last: int
    # Numbers of the next token to send and, once it runs, of the first one, made in step `started`.
    next: int
    first: int = 0
    started: int = -1


class FakeWorkers:
    """A prefill and a decode worker that compute nothing."""

    def __init__(self, folder: Path, step_s: float, slots: int) -> None:
        self._step_s = step_s
        self._slots = slots
        self._tokenizer = TokenizerFiles.read(folder).digest
        self._step = 0
        self._servers: list[GrpcServer] = []
        self._sequences: dict[bytes, Sequence] = {}
        self._tickets: dict[bytes, asyncio.Event] = {}
        # By router: what its stream waits for.
        self._stepped: dict[bytes, asyncio.Event] = {}

    async def start(self) -> tuple[str, str]:
        """The addresses of the prefill and the decode worker."""
        prefill = self._server("prefill-0", WorkerRole.WORKER_ROLE_PREFILL)
        decode = self._server("decode-0", WorkerRole.WORKER_ROLE_DECODE)
        return await prefill.start("127.0.0.1", 0), await decode.start("127.0.0.1", 0)

    async def stop(self) -> None:
        """Ends all calls and both servers."""
        for server in self._servers:
            await server.stop(0)

    async def run_steps(self) -> None:
        """Makes tokens until it is cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._step_s, loop.time() - self._step_s)
            await asyncio.sleep(due - loop.time())
            self._step += 1
            for stepped in self._stepped.values():
                stepped.set()

    def _server(self, name: str, role: WorkerRole.ValueType) -> GrpcServer:
        server = GrpcServer(["baton.v1.WorkerService"])
        self._servers.append(server)  # a server without references is stopped
        identity = WorkerIdentity(name=name, incarnation=secrets.token_bytes(16), role=role)

        async def describe(request: bytes, context: Any) -> bytes:
            return self._described(identity).SerializeToString()

        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        services = {
            "WorkerService": {"Describe": unary(describe)},
            "PrefillService": {
                "Prefill": stream(self._prefill),
                "ProvideTicket": unary(self._provide_ticket),
            },
            "DecodeService": {
                "Reserve": unary(self._reserve),
                "Subscribe": stream(self._subscribe),
                "Cancel": unary(self._cancel),
            },
        }
        for service, handlers in services.items():
            generic = grpc.method_handlers_generic_handler(f"baton.v1.{service}", handlers)
            server.server.add_generic_rpc_handlers((generic,))
        return server

    def _described(self, identity: WorkerIdentity) -> worker_pb2.DescribeResponse:
        used = len(self._sequences) if identity.role == WorkerRole.WORKER_ROLE_DECODE else 0
        blocks = self._slots * CONTEXT // _BLOCK_TOKENS
        return worker_pb2.DescribeResponse(
            identity=identity,
            fingerprint=b"fake",
            max_context_tokens=CONTEXT,
            vocab_size=VOCAB,
            load=worker_pb2.Load(
                slots=self._slots,
                free_slots=self._slots - used,
                blocks=blocks,
                free_blocks=blocks,
                block_tokens=_BLOCK_TOKENS,
            ),
            cache_dtype="float32",
            pool=worker_pb2.Pool(
                model="fake",
                checkpoint=b"fake",
                tokenizer=self._tokenizer,
                kv_format="float32/16/native",
                numerics="exact",
            ),
            weight_format="float32",
        )

    async def _reserve(self, data: bytes, context: Any) -> bytes:
        request = decode_pb2.ReserveRequest.FromString(data)
        if len(self._sequences) >= self._slots:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no slot")
        attempt = request.attempt.SerializeToString()
        self._sequences[request.attempt.request_id] = Sequence(
            request.router_id,
            request.attempt.number,
            b"\x0a" + _varint(len(attempt)) + attempt,
            last=request.max_tokens,
            next=request.first_number + 1,
        )
        ticket = decode_pb2.Ticket(body=request.attempt.request_id)
        return decode_pb2.ReserveResponse(ticket=ticket).SerializeToString()

    async def _cancel(self, data: bytes, context: Any) -> bytes:
        request = decode_pb2.CancelRequest.FromString(data)
        self._sequences.pop(request.attempt.request_id, None)
        return b""

    async def _provide_ticket(self, data: bytes, context: Any) -> bytes:
        request = prefill_pb2.ProvideTicketRequest.FromString(data)
        self._tickets.setdefault(request.attempt.request_id, asyncio.Event()).set()
        return b""

    async def _prefill(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        request = prefill_pb2.PrefillRequest.FromString(data)
        request_id, number = request.attempt.request_id, len(request.token_ids) - request.prompt_length
        over = number + 1 >= request.limits.max_tokens
        first = prefill_pb2.FirstToken(number=number, token_id=TOKEN)
        if over:
            first.finish_reason = FinishReason.FINISH_REASON_LENGTH
        yield prefill_pb2.PrefillResponse(first_token=first).SerializeToString()
        if request.ticket_follows:
            ticket = self._tickets.setdefault(request_id, asyncio.Event())
            try:
                async with asyncio.timeout(_TICKET_S):
                    await ticket.wait()
            finally:
                del self._tickets[request_id]
        if over:
            self._sequences.pop(request_id, None)
            return
        if (sequence := self._sequences.get(request_id)) is not None:
            sequence.first, sequence.started = sequence.next, self._step + 1
        yield prefill_pb2.PrefillResponse(handed_off=prefill_pb2.HandedOff()).SerializeToString()

    async def _subscribe(self, data: bytes, context: Any) -> AsyncIterator[bytes]:
        router_id = decode_pb2.SubscribeRequest.FromString(data).router_id
        stepped = self._stepped[router_id] = asyncio.Event()
        await context.send_initial_metadata(())
        yield b""
        try:
            while self._stepped.get(router_id) is stepped:
                try:
                    async with asyncio.timeout(_BEAT_S):
                        while not (message := self._tokens_of(router_id)):
                            stepped.clear()
                            await stepped.wait()
                except TimeoutError:
                    message = b""
                yield message
        finally:
            if self._stepped.get(router_id) is stepped:
                del self._stepped[router_id]

    def _tokens_of(self, router_id: bytes) -> bytes:
        """A serialised SubscribeResponse with every token of a router's sequences that was not sent yet;
        empty where there is none."""
        parts = [b"\x08" + _varint(self._step)]
        ended = []
        for request_id, one in self._sequences.items():
            if one.started < 0 or one.router_id != router_id:
                continue
            until = min(one.last, one.first + self._step - one.started + 1)
            if (count := until - one.next) > 0:
                parts.append(encode_output(one, count, last=until == one.last))
                one.next = until
                if until == one.last:
                    ended.append(request_id)
        for request_id in ended:
            del self._sequences[request_id]
        return b"".join(parts) if len(parts) > 1 else b""


def encode_output(one: Sequence, count: int, *, last: bool) -> bytes:
    """Encodes one element of SubscribeResponse.outputs."""
    body = one.attempt + b"\x10" + _varint(one.next) + b"\x1a" + _varint(count) + bytes((TOKEN,)) * count
    if last:
        body += bytes((0x28, FinishReason.FINISH_REASON_LENGTH))
    return b"\x12" + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    if value < 128:
        return bytes((value,))
    parts = bytearray()
    while value >= 128:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


async def serve(folder: Path, step_s: float, slots: int, wait: Callable[[], object]) -> None:
    """Serves until `wait`, called on a thread, returns."""
    workers = FakeWorkers(folder, step_s, slots)
    prefill, decode = await workers.start()
    print(json.dumps({"prefill": prefill, "decode": decode}), flush=True)
    steps = asyncio.create_task(workers.run_steps())
    await asyncio.to_thread(wait)
    steps.cancel()
    await workers.stop()


if __name__ == "__main__":
    import uvloop

    batch_wakeups()
    uvloop.run(serve(Path(sys.argv[1]), float(sys.argv[2]) / 1e3, int(sys.argv[3]), sys.stdin.read))
