"""What a client sent becomes requests in the validator's words; where it is large, in a text process."""

from __future__ import annotations

import dataclasses
from array import array
from functools import partial
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from baton.errors import BatonError, ErrorKind
from baton.v1.router_pb2 import GenerateRequest
from services.router.formats.generate_message import to_asked
from services.router.formats.json_body import parse_json
from services.router.formats.openai_chat import ChatBody, parse_chat
from services.router.formats.openai_completions import CompletionBody, parse_completion
from services.router.request import sizes
from services.router.request.request import Asked
from services.router.tokenization import helper_jobs as text_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.router.request.served_model import Model
    from services.router.tokenization.helper_jobs import Job
    from services.router.tokenization.tokenizer_pool import TextPool

Body = bytes | bytearray
# Ids made Python integers at once: the interpreter's lock is held for less than a millisecond.
_SLICE = 16 * 1024


class RequestReader:
    """Reads the bodies of both listeners."""

    def __init__(self, pool: TextPool, model: Callable[[], Model], max_body_bytes: int) -> None:
        """`model` gives what requests are judged by, as of now."""
        self.max_body_bytes = max_body_bytes
        self._pool = pool
        self._model = model

    async def completion(self, body: Body) -> tuple[CompletionBody, list[Asked]]:
        """POST /v1/completions: the body, and one request for each of its prompts."""
        document = self._small(body)
        if document is not None:
            small = parse_completion(document)
            return small, small.asked()
        rest, *prompts = await self._in_process(text_jobs.completion, body)
        parsed = parse_completion(parse_json(rest))
        return parsed, await self._prepared(parsed.asked(), prompts)

    async def chat(self, body: Body) -> tuple[ChatBody, Asked]:
        """POST /v1/chat/completions: the body and its request."""
        document = self._small(body)
        if document is not None:
            small = parse_chat(document)
            return small, small.asked()
        rest, *prompt = await self._in_process(text_jobs.chat, body)
        parsed = parse_chat(parse_json(rest))
        return parsed, (await self._prepared([parsed.asked()], prompt))[0]

    async def generate(self, data: bytes) -> Asked:
        """RouterService.Generate."""
        if len(data) <= sizes.LARGE_BYTES:
            request = parse_generate(data)
            if len(request.chat.messages) <= sizes.MANY_MESSAGES:
                sizes.check_message(request, self._model().context)
                return to_asked(request)
        rest, *prompt = await self._in_process(text_jobs.generate, data)
        return (await self._prepared([to_asked(parse_generate(bytes(rest)))], prompt))[0]

    async def run(self, job: Job, body: Body, small_bytes: int) -> Sequence[Body]:
        """The answer's parts: of a body up to `small_bytes` by a thread, else by a text process."""
        if len(body) > small_bytes:
            return await self._in_process(job, body)
        return await self._pool.run(lambda: job(self._pool.text, self._model(), bytes(body)))

    def _small(self, body: Body) -> object | None:
        """The document of a body that is read here; None where a text process is to read it."""
        if len(body) > sizes.LARGE_BYTES:
            return None
        document = parse_json(body)
        if sizes.has_many_messages(document):
            return None
        sizes.check_document(document, self._model().context)
        return document if document is not None else ()

    async def _in_process(self, job: Job, body: Body) -> list[bytearray]:
        return await self._pool.processes.run(job.__name__, self._model(), [body])

    async def _prepared(self, asked: Sequence[Asked], prompts: Sequence[Body]) -> list[Asked]:
        """The requests with their prompts, which alternate as ids and text."""
        prepared = []
        for one, ids, text in zip(asked, prompts[::2], prompts[1::2], strict=True):
            numbers = await self._pool.run(partial(token_ids, ids))
            echo = text.decode() or None
            prepared.append(dataclasses.replace(one, prepared=numbers, text=echo, chat=None))
        return prepared


def parse_generate(data: bytes) -> GenerateRequest:
    """The message; BatonError(INVALID) where the bytes are none."""
    try:
        return GenerateRequest.FromString(data)
    except DecodeError as error:
        raise BatonError(ErrorKind.INVALID, "not a GenerateRequest message") from error


def token_ids(data: Body) -> tuple[int, ...]:
    """int32 ids as Python integers."""
    numbers = array("i")
    numbers.frombytes(data)
    ids: list[int] = []
    for start in range(0, len(numbers), _SLICE):
        ids += numbers[start : start + _SLICE]
    return tuple(ids)
