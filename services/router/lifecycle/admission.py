"""Admission of requests: from the body of a client call to requests that may run.

A request is checked in three places and nowhere else, each before the work that it bounds:

1. sizes, before anything is built of the body (`RequestReader`, `sizes`)
2. fields, before the prompt is tokenised (`validate.check_fields`)
3. token ids and token limits, once it is tokenised (`validate.check_prompt`), and the size of the response
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import NamedTuple

from baton.base.errors import BatonError, ErrorKind, FieldError
from baton.v1.router_pb2 import TokenIds
from services.router.conversations.stored_responses import StoredResponses
from services.router.formats.openai.chat import ChatBody
from services.router.formats.openai.completions import CompletionBody
from services.router.formats.responses.body import ResponsesBody
from services.router.lifecycle.observations import Observations
from services.router.placement.pools import Pools
from services.router.request import validate
from services.router.request.call_headers import check_idempotency, check_not_past, timeout_of_headers
from services.router.request.current_call import CurrentCall, current_call, random_id
from services.router.request.limits import UNKNOWN, PairLimits
from services.router.request.request import ClientCall, Echo, ParsedRequest, Request
from services.router.request.sizes import check_response_size, shorten
from services.router.request.slo import Slo, slo_of_headers
from services.router.tenants.current import check_model, current_caller
from services.router.tenants.priority import priority_of
from services.router.text.model_info import ModelInfo
from services.router.text.stop_strings import automaton_of
from services.router.tokenization.request_reader import Body, RequestReader
from services.router.tokenization.tokenizer_pool import TokenizerPool
from services.router.tools.conversation_format import ConversationFormat
from services.router.tools.output_parser import OutputStructure

# Stop strings of more characters take a while to compile, so that it is done in a thread.
_LONG_STOPS = 1024
_GENERATE = "/baton.v1.RouterService/Generate"
# Tokens at the end of a prompt that show whether it has opened reasoning.
_PROMPT_END = 12
# Bytes of a tool's schema, about.
_TOOL_BYTES = 1024
NO_HEADERS: Mapping[str, str] = {}


class ServedModel:
    """Combines the limits of the model's files with those of the workers that serve it."""

    def __init__(self, name: str, info: ModelInfo, pools: Pools) -> None:
        self.name = name
        self._limits = info.limits
        self._pools = pools
        # The last answer of `limits`, and from what of the workers it was made.
        self._known: validate.RequestLimits | None = None
        self._made_of: tuple[object, int | None] = ((), None)

    @property
    def max_context_tokens(self) -> int:
        """Tokens that prompt and output may have together: those of the largest request that some pair of
        workers serves, within the model's limit."""
        return self.limits().max_context_tokens

    def limits(self) -> validate.RequestLimits:
        """The limits that apply to a request now: the same object until they change."""
        made_of = (self._pools.announced.pairs, self._pools.vocab_size)
        if self._known is None or made_of != self._made_of:
            self._known, self._made_of = self._combine(*made_of), made_of
        return self._known

    def _combine(self, announced: Sequence[PairLimits], vocab_size: int | None) -> validate.RequestLimits:
        most = self._limits.max_positions
        pairs = tuple(
            pair._replace(prompt=min(pair.prompt, most), total=min(pair.total, most)) for pair in announced
        )
        return validate.RequestLimits(
            self.name,
            self._limits.eos_token_ids,
            min(self._limits.vocab_size, vocab_size or UNKNOWN),
            max((pair.context for pair in pairs), default=most),
            pairs,
        )


class _Arrival(NamedTuple):
    """Arrival of a call, in monotonic nanoseconds, its deadline on the event loop's clock, in seconds, its
    limits where they are beside the body, what is known of who calls what, and the ids of its outputs."""

    at_ns: int
    deadline: float
    slo: Slo | None
    call: ClientCall
    ids: Iterator[bytes]


class Admission:
    """Admits the requests of both public APIs.

    Every method raises FieldError where a request is invalid, BatonError(OVERLOADED) where too many requests
    wait to be tokenised, BatonError(RATE_LIMITED) where the tenant has used up a limit, BatonError(FORBIDDEN)
    where the API key may not use the model; what is refused is counted. What a call takes of its tenant's
    limits is judged when it runs, by `Dispatcher.stream`.
    """

    def __init__(
        self,
        model: ServedModel,
        reader: RequestReader,
        tokenizer: TokenizerPool,
        observations: Observations,
        timeout_s: float,
        max_response_values: int,
        conversation_format: ConversationFormat | None = None,
        responses: StoredResponses | None = None,
    ) -> None:
        """`timeout_s`: the longest that a request may take. `max_response_values`: see `sizes`.
        `responses`: those that requests continue; None: none are stored."""
        self.model = model
        self.reader = reader
        self.tokenizer = tokenizer
        self._observations = observations
        self._timeout_s = timeout_s
        self._max_response_values = max_response_values
        self._format = conversation_format or ConversationFormat()
        self._responses = responses

    async def completion(
        self, body: Body, headers: Mapping[str, str] = NO_HEADERS
    ) -> tuple[CompletionBody, list[Request]]:
        """POST /v1/completions: the body, and a request for each output of each prompt, prompts first."""
        async with self._arrival("/v1/completions", headers=headers) as arrival:
            parsed, prompts = await self.reader.completion(body)
            return parsed, await self._admit(prompts, arrival)

    async def chat(
        self, body: Body, headers: Mapping[str, str] = NO_HEADERS
    ) -> tuple[ChatBody, list[Request]]:
        """POST /v1/chat/completions: the body, and a request for each output."""
        async with self._arrival("/v1/chat/completions", headers=headers) as arrival:
            parsed, prompt = await self.reader.chat(body)
            return parsed, await self._admit([prompt], arrival)

    async def response(
        self, body: Body, headers: Mapping[str, str] = NO_HEADERS
    ) -> tuple[ResponsesBody, Request, Body]:
        """POST /v1/responses: the body, its request, and the items to be stored with the response, as JSON;
        empty unless it is to be stored."""
        stored = self._responses
        async with self._arrival("/v1/responses", headers=headers) as arrival:
            earlier = None if stored is None else stored.conversation
            parsed, prompt, items = await self.reader.response(body, earlier)
            if stored is not None:
                stored.check(items)
            return parsed, (await self._admit([prompt], arrival))[0], items

    async def generate(
        self, data: bytes, remaining_s: float | None, metadata: Mapping[str, str] = NO_HEADERS
    ) -> list[Request]:
        """RouterService.Generate: a request for each output. `remaining_s`: until the client's deadline."""
        left_s = math.inf if remaining_s is None else remaining_s
        async with self._arrival(_GENERATE, left_s) as arrival:
            check_idempotency(metadata)
            return await self._admit([await self.reader.generate(data)], arrival)

    @contextlib.asynccontextmanager
    async def _arrival(
        self,
        route: str,
        remaining_s: float | None = None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> AsyncIterator[_Arrival]:
        """Opened when a call arrives, over HTTP with `headers`. Its deadline holds within; counts the
        call if it is refused there."""
        current = current_call.get() or CurrentCall()
        call = ClientCall(route=route, trace=current.trace)
        if (caller := current_caller.get()) is not None:
            call.key_id, call.tenant = caller.key_id, caller.tenant
        try:
            if call.tenant is not None:
                call.tenant.check()  # before anything is parsed or tokenised
            check_idempotency(headers)
            if remaining_s is None:
                remaining_s = timeout_of_headers(headers)
            left_s = self._timeout_s if remaining_s is None else min(remaining_s, self._timeout_s)
            check_not_past(left_s)
            deadline = asyncio.get_running_loop().time() + left_s
            slo = slo_of_headers(headers)
            timeout = asyncio.timeout_at(deadline)
            try:
                async with timeout:
                    yield _Arrival(time.monotonic_ns(), deadline, slo, call, _ids(current.id))
            except TimeoutError:
                if not timeout.expired():
                    raise
                raise BatonError(ErrorKind.DEADLINE, "the request's deadline passed") from None
        except BatonError as error:
            self._observations.refused(error.kind, call)
            raise

    async def _admit(self, prompts: Sequence[ParsedRequest], arrival: _Arrival) -> list[Request]:
        """The requests of one client call."""
        requests: list[Request] = []
        for parsed in prompts:
            check_model(parsed.model)
            call = parsed.call
            own = arrival.call
            call.key_id, call.tenant, call.route, call.trace = own.key_id, own.tenant, own.route, own.trace
            admitted = await self._outputs(parsed, arrival)
            if parsed.fills_context and parsed.max_tokens is None:
                admitted = shorten(admitted, self._max_response_values)
            requests += admitted
        check_response_size(requests, self._max_response_values)
        return await self._with_prediction(requests, prompts[0].prediction)

    async def _with_prediction(
        self, requests: list[Request], prediction: str | TokenIds | None
    ) -> list[Request]:
        """The requests with the prediction of their call. Those with a grammar have an empty one: their steps
        verify no drafts."""
        if prediction is None:
            return requests
        if isinstance(prediction, str):
            prediction = await self.tokenizer.encode_prediction(prediction, self.model.limits())
        none = TokenIds()
        return [
            dataclasses.replace(request, prediction=prediction if request.grammar is None else none)
            for request in requests
        ]

    async def _outputs(self, parsed: ParsedRequest, arrival: _Arrival) -> list[Request]:
        """A request for each output of one prompt."""
        parsed = await self._with_forced_calls(parsed)
        fields = validate.check_fields(parsed, self.model.limits())
        if (stop_chars := sum(map(len, fields.stop))) > _LONG_STOPS:
            await self.tokenizer.run(lambda: automaton_of(fields.stop), stop_chars)
        known, context = parsed.tokenized or parsed.token_ids, self.model.max_context_tokens
        prompt_ids = known or await self.tokenizer.encode(parsed, context)
        limits = validate.check_prompt(parsed, fields, prompt_ids, self.model.limits())
        parsed.call.priority = priority_of(parsed.call.tenant, fields.priority)
        structure = await self._structure(parsed, prompt_ids) if parsed.structured else None
        echo = await self._echo(parsed, prompt_ids) if parsed.echo else None
        return [
            Request(
                id=next(arrival.ids),
                prompt_ids=prompt_ids,
                sampling=validate.with_seed_of(fields.sampling, choice),
                max_tokens=limits.max_tokens,
                stop_token_ids=fields.stop_token_ids,
                stop=fields.stop,
                skip_special_tokens=parsed.skip_special_tokens is not False,
                arrived_ns=arrival.at_ns,
                deadline=arrival.deadline,
                min_tokens=limits.min_tokens,
                echo=echo,
                grammar=parsed.grammar,
                structure=structure,
                choice=choice,
                max_draft_tokens=fields.max_draft_tokens,
                slo=arrival.slo or parsed.slo,
                call=parsed.call,
            )
            for choice in range(fields.choices)
        ]

    async def _with_forced_calls(self, parsed: ParsedRequest) -> ParsedRequest:
        """The request, guided to the calls that it must make."""
        use = parsed.tools
        self._format.check(use)
        if use is None or not use.forced:
            return parsed
        forced = await self.tokenizer.run(lambda: self._format.grammar(use), _TOOL_BYTES * len(use.forced))
        if parsed.grammar is not None:
            field = parsed.api_name("grammar")
            raise FieldError(f"{field} and a tool_choice that forces a call cannot be combined", param=field)
        names = {**parsed.api_names, "grammar": "tools"}
        return dataclasses.replace(parsed, grammar=forced, api_names=names)

    async def _structure(self, parsed: ParsedRequest, prompt_ids: tuple[int, ...]) -> OutputStructure | None:
        """Returns what to look for in a conversation's outputs. The tools' schemas are read in a thread."""
        end, limits, use = "", self.model.limits(), parsed.tools
        if self._format.reasoning:
            end = await self.tokenizer.decode(prompt_ids[-_PROMPT_END:], limits, skip_special_tokens=False)
        guided = parsed.grammar is not None
        if use is None:
            return self._format.structure(None, end, guided=guided)
        return await self.tokenizer.run(
            lambda: self._format.structure(use, end, guided=guided), _TOOL_BYTES * len(use.tools)
        )

    async def _echo(self, parsed: ParsedRequest, prompt_ids: tuple[int, ...]) -> Echo:
        """The prompt to repeat: the client's own text if it sent one, since decoded ids may differ from
        it."""
        skip, limits = parsed.skip_special_tokens is not False, self.model.limits()
        if parsed.logprobs is None:
            text = parsed.text or await self.tokenizer.decode(prompt_ids, limits, skip_special_tokens=skip)
            return Echo(text)
        decoded, offsets = await self.tokenizer.decode_with_offsets(
            prompt_ids, limits, skip_special_tokens=skip
        )
        return Echo(parsed.text or decoded, offsets)


def _ids(first: bytes) -> Iterator[bytes]:
    """The ids of a call's outputs: that which the call is named by, then random ones."""
    yield first
    while True:
        yield random_id()
