"""RouterService, the public gRPC API."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from baton.base.errors import BatonError, ErrorKind
from baton.v1.router_pb2 import (
    DESCRIPTOR,
    GenerateResponse,
    GetStatusRequest,
    GetStatusResponse,
    ListModelsRequest,
    ListModelsResponse,
    Model,
    RequestTrace,
    Usage,
)
from baton.v1.types_pb2 import FinishReason, Logprobs
from services.common.errors import abort
from services.common.observability.logs import get_log
from services.router.api.grpc_calls import texts_of
from services.router.formats.answer_headers import answer_metadata
from services.router.formats.grpc.generate_message import MessageT, parse_message
from services.router.formats.grpc.plain_response import PlainResponses
from services.router.lifecycle.admission import Admission
from services.router.lifecycle.dispatcher import Dispatcher
from services.router.observability.status import Status
from services.router.request.current_call import current_id
from services.router.request.request import Delta, Finish, Request
from services.router.request.sizes import LARGE_BYTES
from services.router.tenants.current import current_caller
from services.router.tools.output_parser import OutputParser
from services.router.tools.pieces import CallArguments, CallBegin, Content, Reasoning

SERVICE_NAME = DESCRIPTOR.services_by_name["RouterService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]

_log = get_log("grpc")


class GrpcApi:
    """Implements RouterService. Parses messages itself, so that malformed ones get INVALID_ARGUMENT."""

    def __init__(
        self, admission: Admission, dispatcher: Dispatcher, status: Status, read_grace_s: float
    ) -> None:
        """`read_grace_s`: how long after a request's deadline its client may take to read the rest."""
        self._admission = admission
        self._dispatcher = dispatcher
        self._status = status
        self._read_grace_s = read_grace_s

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the service to a server that is not started yet."""
        handlers = {
            "Generate": grpc.unary_stream_rpc_method_handler(self.generate, response_serializer=_serialized),
            "ListModels": grpc.unary_unary_rpc_method_handler(
                self.list_models, response_serializer=ListModelsResponse.SerializeToString
            ),
            "GetStatus": grpc.unary_unary_rpc_method_handler(
                self.get_status, response_serializer=GetStatusResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    async def generate(self, data: bytes, context: Context) -> None:
        """Runs one request and streams its output. The end of the call cancels the request.

        Writes instead of yielding: a cancel while a write waits for a slow client is then raised here, and
        not only when the suspended generator is garbage-collected.
        """
        tokens, cached, accepted, rejected = 0, 0, 0, 0
        traces: list[RequestTrace] = []
        try:
            metadata = texts_of(context.invocation_metadata())
            requests = await self._admission.generate(data, context.time_remaining(), metadata)
            context.set_trailing_metadata(answer_metadata(requests[0]))
            read_by = asyncio.timeout_at(requests[0].deadline + self._read_grace_s)
            structures = (request.structure for request in requests)
            parsers = [None if one is None else OutputParser(one) for one in structures]
            async with read_by, self._dispatcher.stream(requests) as deltas:
                unfinished = len(requests)
                plain = [PlainResponses(request) for request in requests]
                cached = len(requests[0].prompt_ids)
                async for index, delta in deltas:
                    if (encoded := plain[index].encode(delta)) is not None:
                        tokens += len(delta.token_ids)
                        await context.write(encoded)
                        continue
                    response = to_response(requests[index], delta)
                    if (parser := parsers[index]) is not None:
                        add_structure(response, parser, delta)
                    tokens += len(delta.token_ids)
                    unfinished -= delta.finish is not None
                    if (own := delta.usage) is not None:
                        cached = min(cached, own.cached_tokens)  # what every output of the prompt found
                        accepted += own.accepted_prediction_tokens
                        rejected += own.rejected_prediction_tokens
                    if delta.trace is not None:
                        traces.append(delta.trace)
                    if not unfinished:
                        context.set_trailing_metadata(answer_metadata(requests[0], traces))
                        prompt = len(requests[0].prompt_ids)
                        response.usage.CopyFrom(
                            Usage(
                                prompt_tokens=prompt,
                                completion_tokens=tokens,
                                cached_tokens=cached,
                                accepted_prediction_tokens=accepted,
                                rejected_prediction_tokens=rejected,
                            )
                        )
                    await context.write(response)
        except TimeoutError:
            await abort(context, BatonError(ErrorKind.DEADLINE, "the answer was not read in time"))
        except BatonError as error:
            error.tokens_sent = tokens > 0  # of any output
            await abort(context, error)
        except Exception:
            _log.exception("grpc_internal_error", request=current_id())
            await abort(context, BatonError(ErrorKind.INTERNAL, "the router failed"))

    async def list_models(self, data: bytes, context: Context) -> ListModelsResponse:
        """Returns the served model, if the caller may use it."""
        try:
            _parse(ListModelsRequest, data)
        except BatonError as error:
            await abort(context, error)
        model, caller = self._admission.model, current_caller.get()
        if caller is not None and not caller.may_use(model.name):
            return ListModelsResponse()
        return ListModelsResponse(models=[Model(id=model.name, max_context_tokens=model.max_context_tokens)])

    async def get_status(self, data: bytes, context: Context) -> GetStatusResponse:
        """Readiness, model, rates and latencies, without addresses or workers."""
        try:
            request = _parse(GetStatusRequest, data)
        except BatonError as error:
            await abort(context, error)
        return GetStatusResponse(router=await self._status.totals(request.window_s))


def _serialized(response: GenerateResponse | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()


def to_response(request: Request, delta: Delta) -> GenerateResponse:
    """Converts a delta, without its usage: the stream reports the usage of all outputs together."""
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


def add_structure(response: GenerateResponse, parser: OutputParser, delta: Delta) -> None:
    """Replaces the text of a response by what it is made of."""
    response.text = ""
    for piece in parser.push(delta.text, last=delta.finish is not None):
        match piece:
            case Content(text):
                response.text += text
            case Reasoning(text):
                response.reasoning_content += text
            case CallBegin(index, id_, name):
                response.tool_calls.add(index=index, id=id_, name=name)
            case CallArguments(index, text):
                response.tool_calls.add(index=index, arguments=text)
    if delta.finish is Finish.STOP and parser.closed_calls:
        response.finish_reason = FinishReason.FINISH_REASON_TOOL_CALLS


def _parse(message: type[MessageT], data: bytes) -> MessageT:
    """Parses a message other than GenerateRequest, which has to be small."""
    if len(data) > LARGE_BYTES:
        raise BatonError(ErrorKind.INVALID, f"a {message.DESCRIPTOR.name} has at most {LARGE_BYTES} bytes")
    return parse_message(message, data)
