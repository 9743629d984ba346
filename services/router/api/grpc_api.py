"""The gRPC door: RouterService."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from baton.errors import BatonError, ErrorKind
from baton.v1.router_pb2 import (
    DESCRIPTOR,
    GenerateResponse,
    GetStatusRequest,
    GetStatusResponse,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    Usage,
)
from baton.v1.types_pb2 import Logprobs
from services.common.errors import abort
from services.router.lifecycle.choices import running
from services.router.request.sizes import LARGE_BYTES

if TYPE_CHECKING:
    from services.router.lifecycle.service import Service
    from services.router.observability.status import Status
    from services.router.request.request import Delta, Request

SERVICE_NAME = DESCRIPTOR.services_by_name["RouterService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]
MessageT = TypeVar("MessageT", bound=Message)


class GrpcDoor:
    """Answers RouterService; parses messages itself, so that broken bytes are INVALID_ARGUMENT."""

    def __init__(self, service: Service, status: Status, read_grace_s: float) -> None:
        """`read_grace_s`: how long after its request's deadline a client may take to read the rest."""
        self._service = service
        self._read_grace_s = read_grace_s
        self._status = status

    def register(self, server: grpc.aio.Server) -> None:
        """Puts the service on a server that has not started."""
        handlers = {
            "Generate": grpc.unary_stream_rpc_method_handler(
                self.generate, response_serializer=GenerateResponse.SerializeToString
            ),
            "ListModels": grpc.unary_unary_rpc_method_handler(
                self.list_models, response_serializer=ListModelsResponse.SerializeToString
            ),
            "GetStatus": grpc.unary_unary_rpc_method_handler(
                self.get_status, response_serializer=GetStatusResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    async def generate(self, data: bytes, context: Context) -> None:
        """Streams one request; the call's end, whoever ends it, is the request's end.

        Writes instead of yielding: a cancel while a write waits for a slow client is then raised
        here, and not left to the collector of a suspended generator.
        """
        tokens, cached = 0, 0
        try:
            arrived_ns = time.monotonic_ns()
            with self._service.counting_refusals():
                asked = await self._service.intake.reader.generate(data)
            requests = await self._service.admit(
                asked, remaining_s=context.time_remaining(), arrived_ns=arrived_ns
            )
            read_by = asyncio.timeout_at(requests[0].deadline + self._read_grace_s)
            async with read_by, running(self._service, requests) as deltas:
                unfinished = len(requests)
                cached = len(requests[0].prompt_ids)
                async for index, delta in deltas:
                    response = to_response(requests[index], delta)
                    tokens += len(delta.token_ids)
                    unfinished -= delta.finish is not None
                    if delta.usage is not None:  # a prompt was computed unless every output found it
                        cached = min(cached, delta.usage.cached_tokens)
                    if not unfinished:
                        prompt = len(requests[0].prompt_ids)
                        response.usage.CopyFrom(
                            Usage(prompt_tokens=prompt, completion_tokens=tokens, cached_tokens=cached)
                        )
                    await context.write(response)
        except TimeoutError:
            await abort(context, BatonError(ErrorKind.DEADLINE, "the answer was not read in time"))
        except BatonError as error:
            error.tokens_sent = tokens > 0  # of any of its outputs
            await abort(context, error)

    async def list_models(self, data: bytes, context: Context) -> ListModelsResponse:
        """The one model that is served here."""
        try:
            _parse(ListModelsRequest, data)
        except BatonError as error:
            await abort(context, error)
        intake = self._service.intake
        return ListModelsResponse(
            models=[Model(id=intake.served_name, max_context_tokens=intake.max_context_tokens)]
        )

    async def get_status(self, data: bytes, context: Context) -> GetStatusResponse:
        """Whether requests are served, the model, rates and latencies; no addresses and no workers."""
        try:
            request = _parse(GetStatusRequest, data)
        except BatonError as error:
            await abort(context, error)
        return GetStatusResponse(router=self._status.totals(request.window_s))


def to_response(request: Request, delta: Delta) -> GenerateResponse:
    """One delta as a message of the stream, without the usage, which is of all outputs together."""
    response = GenerateResponse(
        request_id=request.id,
        first_number=delta.first_number,
        token_ids=delta.token_ids,
        text=delta.text,
        logprobs=[Logprobs.FromString(one) for one in delta.logprobs],
        trace=delta.trace,
        index=request.choice,
        resumable=delta.resumable,
    )
    if delta.opening:
        response.prompt_logprobs.extend(Logprobs.FromString(one) for one in delta.prompt_logprobs)
        if request.echo is not None:
            response.text = request.echo.text + delta.text
    if delta.finish is not None:
        response.finish_reason = delta.finish.value
    return response


def _parse(message: type[MessageT], data: bytes) -> MessageT:
    """A small message of any kind but GenerateRequest."""
    if len(data) > LARGE_BYTES:
        raise BatonError(ErrorKind.INVALID, f"a {message.DESCRIPTOR.name} has at most {LARGE_BYTES} bytes")
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise BatonError(ErrorKind.INVALID, f"not a {message.DESCRIPTOR.name} message") from error
