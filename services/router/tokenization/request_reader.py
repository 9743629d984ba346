"""Parses the bodies of client calls; large ones are parsed and tokenised in a helper process."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from baton.v1.router_pb2 import GenerateRequest, TokenIds
from services.router.formats.grpc.generate_message import parse_message, parsed_request
from services.router.formats.ignored_fields import IgnoredFields
from services.router.formats.json_bodies import encode_lines
from services.router.formats.openai.chat import ChatBody
from services.router.formats.openai.completions import CompletionBody
from services.router.formats.openai.fields import BodyT
from services.router.formats.responses.body import ResponsesBody
from services.router.formats.responses.conversation import check_storage, continued, stored_items
from services.router.request import sizes
from services.router.request.request import ParsedRequest
from services.router.request.validate import RequestLimits
from services.router.tokenization import helper_jobs
from services.router.tokenization.helper_jobs import Job
from services.router.tokenization.tokenizer_pool import TokenizerPool

Body = bytes | bytearray
# By a response's id: the items with which a request begins that continues it, as JSON.
Conversations = Callable[[str], Awaitable[bytes]]
# Ids converted to Python integers at once, so that the GIL is held for less than 1 ms.
_SLICE = 16 * 1024


class RequestReader:
    """Parses the bodies of both APIs.

    Each body is read once: a small one here, a large one in a helper process, by the same function.
    FieldError if a body is invalid or too large, BatonError(OVERLOADED) if too many large ones wait.
    """

    def __init__(
        self,
        pool: TokenizerPool,
        limits: Callable[[], RequestLimits],
        max_body_bytes: int,
        ignored: IgnoredFields,
    ) -> None:
        """`limits` returns the present limits of the model."""
        self.max_body_bytes = max_body_bytes
        self.ignored = ignored
        self._pool = pool
        self._limits = limits

    async def completion(self, data: Body) -> tuple[CompletionBody, list[ParsedRequest]]:
        """POST /v1/completions: the body, and one request for each of its prompts."""
        if (small := self._small(CompletionBody, data)) is not None:
            return small, small.parsed_requests()
        rest, *parts = await self._in_process(helper_jobs.completion, data)
        body = self._reported(CompletionBody.unpacked(rest))
        return body, await self._with_ids(body.parsed_requests(), parts)

    async def chat(self, data: Body) -> tuple[ChatBody, ParsedRequest]:
        """POST /v1/chat/completions: the body and its request."""
        if (small := self._small(ChatBody, data)) is not None:
            return small, small.parsed_request()
        rest, *parts = await self._in_process(helper_jobs.chat, data)
        body = self._reported(ChatBody.unpacked(rest))
        return body, (await self._with_ids([body.parsed_request()], parts))[0]

    async def response(
        self, data: Body, conversation: Conversations | None = None
    ) -> tuple[ResponsesBody, ParsedRequest, Body]:
        """POST /v1/responses: the body, its request, and the items to be stored with the response, as JSON;
        empty unless it is to be stored. `conversation` returns the items of an earlier response; None: none
        are stored."""
        stores, run = conversation is not None, partial(self._in_process, helper_jobs.response)
        if (small := self._small(ResponsesBody, data)) is not None:
            check_storage(small, enabled=stores)
            earlier = await _earlier(conversation, small.previous_response_id)
            if not sizes.is_large(data + earlier):
                return self._response(small, earlier, stores=stores)
            parts = await run(small.packed(), earlier, judged=True, stores=stores)
        else:
            parts = await run(data, stores=stores)
            if len(parts) == 2:
                judged, earlier_id = parts
                earlier = await _earlier(conversation, earlier_id.decode())
                parts = await run(judged, earlier, judged=True, stores=stores)
        rest, *prompt, items = parts
        body = self._reported(ResponsesBody.unpacked(rest))
        return body, (await self._with_prompts([body.parsed_request()], prompt))[0], items

    def _response(
        self, body: ResponsesBody, earlier: bytes, *, stores: bool
    ) -> tuple[ResponsesBody, ParsedRequest, Body]:
        """Returns the result of `response` for a small body that continues these items."""
        if earlier:
            body = continued(body, earlier, self._limits().max_context_tokens)
        request = body.parsed_request()
        return body, request, encode_lines(stored_items(body)) if stores and body.is_to_be_stored else b""

    async def generate(self, data: bytes) -> ParsedRequest:
        """RouterService.Generate: the request of a serialised message."""
        if len(data) <= sizes.LARGE_BYTES:
            request = parse_message(GenerateRequest, data)
            if len(request.chat.messages) <= sizes.MANY_PARTS:
                sizes.check_message(request, self._limits().max_context_tokens)
                return self._known(parsed_request(request))
        rest, *parts = await self._in_process(helper_jobs.generate, data)
        parsed = self._known(parsed_request(parse_message(GenerateRequest, bytes(rest))))
        return (await self._with_ids([parsed], parts))[0]

    async def run(self, job: Job, body: Body, small_bytes: int) -> Sequence[Body]:
        """Runs a job on a body of up to `small_bytes` in a thread, on a larger one in a helper process."""
        if len(body) > small_bytes:
            return await self._in_process(job, body)
        return await self._pool.run(lambda: job(self._pool.tokenizer, self._limits(), bytes(body)), len(body))

    def _known(self, request: ParsedRequest) -> ParsedRequest:
        """Reports the request's undocumented fields."""
        self.ignored.report(request.call.ignored_fields)
        return request

    def _small(self, body: type[BodyT], data: Body) -> BodyT | None:
        """A small body, whose undocumented fields are reported; None if a helper process must read it."""
        if sizes.is_large(data):
            return None
        return self._reported(body.read(data, self._limits().max_context_tokens))

    def _reported(self, body: BodyT) -> BodyT:
        """Reports the body's undocumented fields."""
        self.ignored.report(body.ignored)
        return body

    async def _in_process(self, job: Job, *parts: Body, **options: object) -> list[bytearray]:
        return await self._pool.processes.run(job.__name__, self._limits(), parts, **options)

    async def _with_ids(
        self, requests: Sequence[ParsedRequest], parts: Sequence[Body]
    ) -> list[ParsedRequest]:
        """The requests with their prompts and the prediction that they share. `parts`: the prediction's token
        ids (int32), then those of `_with_prompts`."""
        prediction, *prompts = parts
        if requests[0].prediction is not None:
            ids = await self._pool.run(lambda: TokenIds(ids=array("i", prediction)), len(prediction))
            requests = [dataclasses.replace(one, prediction=ids) for one in requests]
        return await self._with_prompts(requests, prompts)

    async def _with_prompts(
        self, requests: Sequence[ParsedRequest], prompts: Sequence[Body]
    ) -> list[ParsedRequest]:
        """The requests with their prompts. `prompts` alternates token ids (int32) and text to echo."""
        complete = []
        for one, ids, text in zip(requests, prompts[::2], prompts[1::2], strict=True):
            numbers = await self._pool.run(partial(token_ids, ids), len(ids))
            echo = text.decode() or None
            complete.append(dataclasses.replace(one, tokenized=numbers, text=echo, chat=None))
        return complete


async def _earlier(conversation: Conversations | None, response_id: str | None) -> bytes:
    """The items of the response that a body continues; empty if it continues none."""
    return b"" if conversation is None or response_id is None else await conversation(response_id)


def token_ids(data: Body) -> tuple[int, ...]:
    """Converts int32 ids to Python integers."""
    numbers = array("i", data)
    ids: list[int] = []
    for start in range(0, len(numbers), _SLICE):
        ids += numbers[start : start + _SLICE]
    return tuple(ids)
