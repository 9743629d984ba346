"""Sends requests to Baton's gRPC API."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from baton.v1 import router_pb2, types_pb2
from baton.v1.router_pb2 import GenerateResponse, Stage
from loadgen.common.errors import LoadgenError
from loadgen.common.record import Outcome, Record
from loadgen.common.settings import TargetSettings
from loadgen.targets.target import Answer, Failure, Payload, Prompt, Request, headers_of, temperature_of
from loadgen.targets.tls import grpc_channel

CONNECT_S = 10.0
GENERATE = "/baton.v1.RouterService/Generate"
# Each channel has its own connection, without retries.
OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", 32 * 1024 * 1024),
    ("grpc.max_send_message_length", 32 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
# Parts of a request's life at the server, from stage to stage.
SPANS = {
    "admission": (None, Stage.STAGE_ADMITTED),
    "queue": (Stage.STAGE_ADMITTED, Stage.STAGE_PREFILLING),
    "prefill": (Stage.STAGE_PREFILLING, Stage.STAGE_FIRST_TOKEN),
    "transfer": (Stage.STAGE_FIRST_TOKEN, Stage.STAGE_HANDED_OFF),
    "decode": (Stage.STAGE_HANDED_OFF, Stage.STAGE_ENDED),
    "first_step": (Stage.STAGE_HANDED_OFF, Stage.STAGE_DECODING),  # of decode; a part of it
}
_FINISHES = {
    value: name.removeprefix("FINISH_REASON_").lower() for name, value in types_pb2.FinishReason.items()
}


class GrpcTarget:
    """Distributes requests over several channels."""

    def __init__(self, settings: TargetSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._channels = [grpc_channel(settings, OPTIONS) for _ in range(settings.connections)]
        calls = [
            channel.unary_stream(
                GENERATE,
                request_serializer=_as_it_is,
                # Parsed here: gRPC would return None for an invalid message.
                response_deserializer=_as_it_is,
            )
            for channel in self._channels
        ]
        self._calls = itertools.cycle(calls)

    async def connect(self) -> None:
        """Connects. Raises LoadgenError where the server does not answer."""
        await wait_ready(self._channels, self._settings.url)

    def prepare(self, request: Request) -> Payload:
        """The serialised message and its metadata."""
        settings = self._settings
        message = router_pb2.GenerateRequest(
            model=settings.model,
            temperature=temperature_of(request, settings),
            max_tokens=request.output_tokens,
            ignore_eos=settings.ignore_eos,
        )
        if settings.slo_headers:
            limits = request.klass.goodput
            for metric, name in (("ttft", "ttft_slo_ms"), ("tpot", "tpot_slo_ms")):
                if metric in limits:
                    setattr(message, name, limits[metric])
        _set_prompt(message, request.prompt)
        if request.klass.priority is not None:
            message.priority = request.klass.priority
        return Payload(message.SerializeToString(), headers_of(request, settings))

    async def send(self, payload: Payload, record: Record, answer: Answer) -> None:
        """Makes one Generate call. Raises Failure with gRPC's code."""
        clock = self._clock
        call = next(self._calls)(payload.data, metadata=payload.metadata)
        try:
            async for message in call:
                now = clock()
                response = GenerateResponse.FromString(message)
                record.messages += 1
                if response.token_ids:
                    record.note_tokens(len(response.token_ids), now)
                    answer.ids.extend(response.token_ids)
                if response.text:
                    answer.text.append(response.text)
                if response.finish_reason:
                    _note_end(record, response)
        except grpc.aio.AioRpcError as error:
            raise Failure(error.code().name, error.details() or "") from None
        except DecodeError:
            call.cancel()
            raise Failure(Outcome.MALFORMED, "a message that is none of Generate's") from None
        if not record.finish_reason:
            raise Failure(Outcome.NO_FINISH)

    async def close(self) -> None:
        """Closes the channels and cancels running calls."""
        for channel in self._channels:
            await channel.close(None)


async def wait_ready(channels: Iterable[grpc.aio.Channel], url: str) -> None:
    """Waits until all channels are connected. Raises LoadgenError at the deadline."""
    import asyncio

    try:
        async with asyncio.timeout(CONNECT_S):
            for channel in channels:
                await channel.channel_ready()
    except TimeoutError:
        raise LoadgenError(f"no answer from {url}") from None


def _as_it_is(message: bytes) -> bytes:
    return message


def _set_prompt(message: router_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        message.text = prompt
    elif isinstance(prompt, list):
        message.token_ids.ids.extend(prompt)
    else:
        message.chat.messages.extend(
            router_pb2.ChatMessage(role=one.role, content=one.content) for one in prompt
        )


def _note_end(record: Record, response: GenerateResponse) -> None:
    record.finish_reason = _FINISHES.get(response.finish_reason, "unknown")
    if response.HasField("usage"):
        record.usage_input = response.usage.prompt_tokens
        record.usage_output = response.usage.completion_tokens
        record.usage_cached = response.usage.cached_tokens
    if response.HasField("trace"):
        trace = response.trace
        record.stages = _spans({one.stage: one.offset_ns for one in trace.stages})
        record.workers = f"{trace.prefill_worker},{trace.decode_worker}"


def _spans(reached: dict[Stage.ValueType, int]) -> dict[str, float]:
    """Seconds of each part of the request's life whose both ends are known."""
    spans: dict[str, float] = {}
    for name, (since, until) in SPANS.items():
        start = 0 if since is None else reached.get(since)
        end = reached.get(until)
        if start is not None and end is not None and end >= start:
            spans[name] = round((end - start) / 1e9, 6)
    return spans
