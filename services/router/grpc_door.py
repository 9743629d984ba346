"""The gRPC door: RouterService."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from baton.errors import BatonError, ErrorKind, FieldError
from baton.v1.router_pb2 import (
    DESCRIPTOR,
    AuditClusterRequest,
    AuditClusterResponse,
    GenerateRequest,
    GenerateResponse,
    GetStatusRequest,
    GetStatusResponse,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    Usage,
)
from services.common.errors import abort
from services.router.choices import running
from services.router.request import Asked, Chat, ChatTurn

if TYPE_CHECKING:
    from services.router.request import Delta, Request
    from services.router.service import Service
    from services.router.status import Status

SERVICE_NAME = DESCRIPTOR.services_by_name["RouterService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]
MessageT = TypeVar("MessageT", bound=Message)


class GrpcDoor:
    """Answers RouterService; parses messages itself, so that broken bytes are INVALID_ARGUMENT."""

    def __init__(self, service: Service, status: Status) -> None:
        self._service = service
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
            "AuditCluster": grpc.unary_unary_rpc_method_handler(
                self.audit_cluster, response_serializer=AuditClusterResponse.SerializeToString
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
            asked = to_asked(_parse(GenerateRequest, data))
            requests = await self._service.admit(asked, context.time_remaining())
            async with running(self._service, requests) as deltas:
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

    async def audit_cluster(self, data: bytes, context: Context) -> AuditClusterResponse:
        """Asks every configured address; one that does not answer in time has an error instead."""
        try:
            _parse(AuditClusterRequest, data)
        except BatonError as error:
            await abort(context, error)
        return await self._status.audit()

    async def get_status(self, data: bytes, context: Context) -> GetStatusResponse:
        """Rates, latencies, and every worker as it stands."""
        try:
            request = _parse(GetStatusRequest, data)
        except BatonError as error:
            await abort(context, error)
        return await self._status.get(request)


def to_asked(request: GenerateRequest) -> Asked:
    """The message in the validator's words; FieldError where it has no prompt."""
    prompt = request.WhichOneof("prompt")
    if prompt is None:
        raise FieldError("the prompt is empty", param="prompt")
    turns = tuple(ChatTurn(turn.role, turn.content) for turn in request.chat.messages)
    return Asked(
        model=request.model,
        text=request.text if prompt == "text" else None,
        token_ids=tuple(request.token_ids.ids) if prompt == "token_ids" else None,
        chat=Chat(turns) if prompt == "chat" else None,
        logit_bias=tuple((bias.token_id, bias.bias) for bias in request.logit_bias),
        stop_token_ids=tuple(request.stop_token_ids),
        stop=tuple(request.stop),
        ignore_eos=request.ignore_eos,
        echo=request.echo,
        **{name: getattr(request, name) for name in _OPTIONAL if request.HasField(name)},
    )


# Fields of GenerateRequest that know whether they were set, and are called the same in Asked.
_OPTIONAL: tuple[Any, ...] = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "skip_special_tokens",
    "logprobs",
    "n",
)


def to_response(request: Request, delta: Delta) -> GenerateResponse:
    """One delta as a message of the stream, without the usage, which is of all outputs together."""
    response = GenerateResponse(
        request_id=request.id,
        first_number=delta.first_number,
        token_ids=delta.token_ids,
        text=delta.text,
        logprobs=delta.logprobs,
        trace=delta.trace,
        index=request.choice,
        resumable=delta.resumable,
    )
    if delta.opening:
        response.prompt_logprobs.extend(delta.prompt_logprobs)
        if request.echo is not None:
            response.text = request.echo.text + delta.text
    if delta.finish is not None:
        response.finish_reason = delta.finish.value
    return response


def _parse(message: type[MessageT], data: bytes) -> MessageT:
    try:
        return message.FromString(data)
    except DecodeError as error:
        raise BatonError(ErrorKind.INVALID, f"not a {message.DESCRIPTOR.name} message") from error
