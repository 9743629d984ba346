"""Parses the bodies of client calls; large ones are parsed and tokenised in a helper process."""

from __future__ import annotations

import dataclasses
import re
from array import array
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from baton.base.errors import BatonError
from baton.v1.router_pb2 import GenerateRequest
from services.router.formats.grpc import peek
from services.router.formats.grpc.generate_message import parse_message, parsed_request
from services.router.formats.ignored_fields import IgnoredFields
from services.router.formats.json_bodies import encode_lines, parse_json
from services.router.formats.json_counts import check_counts
from services.router.formats.openai.chat import ChatBody
from services.router.formats.openai.completions import CompletionBody
from services.router.formats.responses.body import ResponsesBody
from services.router.formats.responses.conversation import check_storage, continued, stored_items
from services.router.request import sizes
from services.router.request.request import ParsedRequest
from services.router.request.validate import RequestLimits, check_fields, text_exceeds_context
from services.router.tokenization import helper_jobs
from services.router.tokenization.helper_jobs import Job
from services.router.tokenization.tokenizer_pool import TokenizerPool

Body = bytes | bytearray
# Of a large body so much is judged on the event loop, which takes a few milliseconds at most.
_COUNTED_BYTES = 32 * 1024
# By a response's id: the items with which a request begins that continues it, as JSON.
Conversations = Callable[[str], Awaitable[bytes]]
# Unescaped quotes are never part of a JSON string's content, so this is a member, if maybe of another object.
_PREVIOUS_ID = re.compile(rb'"previous_response_id"\s{0,16}:\s{0,16}"(resp_[0-9a-f]{32})"')
# Ids converted to Python integers at once, so that the GIL is held for less than 1 ms.
_SLICE = 16 * 1024


class RequestReader:
    """Parses the bodies of both APIs.

    Sizes are checked before anything is built of a body. FieldError if a body is invalid or too large,
    BatonError(OVERLOADED) if too many large ones wait.
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

    async def completion(self, body: Body) -> tuple[CompletionBody, list[ParsedRequest]]:
        """POST /v1/completions: the body, and one request for each of its prompts."""
        document = self._small(body)
        if document is not None:
            small = CompletionBody.parse(document)
            self.ignored.report(small.ignored)
            return small, small.parsed_requests()
        rest, *prompts = await self._in_process(helper_jobs.completion, self._counted(body))
        parsed = CompletionBody.parse(parse_json(rest))
        self.ignored.report(parsed.ignored)
        return parsed, await self._with_prompts(parsed.parsed_requests(), prompts)

    async def chat(self, body: Body) -> tuple[ChatBody, ParsedRequest]:
        """POST /v1/chat/completions: the body and its request."""
        document = self._small(body)
        if document is not None:
            small = ChatBody.parse(document)
            self.ignored.report(small.ignored)
            return small, small.parsed_request()
        rest, *prompt = await self._in_process(helper_jobs.chat, self._counted(body))
        parsed = ChatBody.parse(parse_json(rest))
        self.ignored.report(parsed.ignored)
        return parsed, (await self._with_prompts([parsed.parsed_request()], prompt))[0]

    async def response(
        self, body: Body, conversation: Conversations | None = None
    ) -> tuple[ResponsesBody, ParsedRequest, Body]:
        """POST /v1/responses: the body, its request, and the items to be stored with the response, as JSON;
        empty unless it is to be stored. `conversation` returns the items of an earlier response; None: none
        are stored."""
        document, earlier, earlier_id = self._small(body), b"", None
        if document is not None:
            small = ResponsesBody.parse(document)
            self.ignored.report(small.ignored)
            check_storage(small, enabled=conversation is not None)
            if conversation is not None and small.previous_response_id is not None:
                earlier_id = small.previous_response_id
                earlier = await conversation(earlier_id)
                if len(body) + len(earlier) <= sizes.LARGE_BYTES:
                    small = continued(small, earlier, self._limits().max_context_tokens)
                    earlier = b""
            if not earlier:
                request = small.parsed_request()
                stored = conversation is not None and small.is_to_be_stored
                return small, request, encode_lines(stored_items(small)) if stored else b""
        body = self._counted(body)
        if conversation is not None and earlier_id is None and (earlier_id := _previous_id(body)):
            try:
                earlier = await conversation(earlier_id)
            except BatonError:  # what else may be wrong with the body is reported first
                earlier_id = None
        run = partial(self._in_process, helper_jobs.response, body, stores=conversation is not None)
        rest, *parts = await run(earlier, earlier_id=earlier_id)
        parsed = ResponsesBody.parse(parse_json(rest))
        self.ignored.report(parsed.ignored)
        if not parts:  # it continues another response than it seemed to
            earlier_id = parsed.previous_response_id
            earlier = b"" if conversation is None or earlier_id is None else await conversation(earlier_id)
            rest, *parts = await run(earlier, earlier_id=earlier_id)
        *prompt, items = parts
        return parsed, (await self._with_prompts([parsed.parsed_request()], prompt))[0], items

    async def generate(self, data: bytes) -> ParsedRequest:
        """RouterService.Generate: the request of a serialised message."""
        if len(data) <= sizes.LARGE_BYTES:
            request = parse_message(GenerateRequest, data)
            if len(request.chat.messages) <= sizes.MANY_MESSAGES:
                sizes.check_message(request, self._limits().max_context_tokens)
                return self._known(parsed_request(request))
        peek.check_counts(data)
        self._check_text(data)
        rest, *prompt = await self._in_process(helper_jobs.generate, data)
        parsed = self._known(parsed_request(parse_message(GenerateRequest, bytes(rest))))
        return (await self._with_prompts([parsed], prompt))[0]

    def _check_text(self, data: bytes) -> None:
        """Refuses a message whose text is too long by its bytes alone, unless something else in it is to be
        refused first."""
        limits, token_bytes = self._limits(), self._pool.tokenizer.token_bytes
        size, rest = peek.without_text(data, limits.served_name)
        too_long = token_bytes is not None and size > limits.max_context_tokens * token_bytes
        if not too_long or len(rest) > sizes.LARGE_BYTES:
            return
        request = parse_message(GenerateRequest, rest)
        if request.WhichOneof("prompt") is not None:
            return  # another prompt follows, and counts
        request.text = "a"
        sizes.check_message(request, limits.max_context_tokens)
        check_fields(parsed_request(request), limits)
        raise text_exceeds_context("prompt", size, limits.max_context_tokens)

    async def run(self, job: Job, body: Body, small_bytes: int) -> Sequence[Body]:
        """Runs a job on a body of up to `small_bytes` in a thread, on a larger one in a helper process."""
        if len(body) > small_bytes:
            return await self._in_process(job, self._counted(body))
        return await self._pool.run(lambda: job(self._pool.tokenizer, self._limits(), bytes(body)), len(body))

    def _known(self, request: ParsedRequest) -> ParsedRequest:
        """Reports the request's undocumented fields."""
        self.ignored.report(request.call.ignored_fields)
        return request

    def _small(self, body: Body) -> object | None:
        """Parses a small body, whose sizes are checked; None if a helper process must parse it."""
        if len(body) > sizes.LARGE_BYTES:
            return None
        document = parse_json(body)
        if sizes.has_many_messages(document):
            return None
        sizes.check_document(document, self._limits().max_context_tokens)
        return document if document is not None else ()

    def _counted(self, body: Body) -> Body:
        """A body for a helper process, unless its beginning shows that it is to be refused."""
        check_counts(body, self._limits().max_context_tokens, _COUNTED_BYTES)
        return body

    async def _in_process(self, job: Job, *parts: Body, **options: object) -> list[bytearray]:
        return await self._pool.processes.run(job.__name__, self._limits(), parts, **options)

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


def _previous_id(body: Body) -> str | None:
    """The id of the response that a large body seems to continue, of which only both ends are looked at:
    parsing all of it to know takes a helper process's time twice."""
    for part in (body[:_COUNTED_BYTES], body[-_COUNTED_BYTES:]):
        if (found := _PREVIOUS_ID.search(part)) is not None:
            return found[1].decode()
    return None


def token_ids(data: Body) -> tuple[int, ...]:
    """Converts int32 ids to Python integers."""
    numbers = array("i", data)
    ids: list[int] = []
    for start in range(0, len(numbers), _SLICE):
        ids += numbers[start : start + _SLICE]
    return tuple(ids)
