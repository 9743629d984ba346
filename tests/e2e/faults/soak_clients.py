"""The soak's clients: each asks once, reads until the end or leaves, and records what it received.

What must hold of every stream is checked while it is read: numbers without gap or repeat, nothing after the
last message, and an end: whole, an error of Baton, or the client's own leaving; never silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import grpc.aio
import httpx

from baton.base.errors import BatonError, ErrorKind
from baton.rpc.grpc_errors import from_status
from baton.v1.router_pb2_grpc import RouterServiceStub
from baton.v1.types_pb2 import FinishReason
from services.common.errors import openai_body
from tests.e2e.faults.soak_asks import LIMIT_S, Api, Ask, Leave, Way
from tests.e2e.support.cluster import Cluster

if TYPE_CHECKING:
    from baton.v1.router_pb2_grpc import RouterServiceAsyncStub

_CHANNELS = 4
# From a client's deadline to its noticing it, where two cores serve all of this.
_LATE_S = 5.0


@dataclass(slots=True)
class Output:
    """One output, as far as it was reported."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""


@dataclass(slots=True)
class Outcome:
    """The outcome of one request."""

    ask: Ask
    choices: list[Output]
    # "whole", "left", or the kind of its error in lower case.
    ending: str = ""
    error: BatonError | None = None
    attempts: int = 1
    # Monotonic seconds.
    began: float = 0.0
    ended: float = 0.0
    # The longest wait for a message, the first one included.
    longest_gap_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Number of tokens of all its outputs."""
        return sum(len(output.token_ids) for output in self.choices)


@dataclass(frozen=True, slots=True)
class Part:
    """A message: more of one output."""

    index: int
    token_ids: Sequence[int]
    text: str
    logprobs: Sequence[float]
    finish: str
    attempts: int = 1


class Left(Exception):  # noqa: N818 (no error)
    """A client went away as it meant to."""


class Clients:
    """Channels and a connection pool that well-behaved clients share; a client that closes its connection
    has one of its own."""

    def __init__(
        self, cluster: Cluster, stubs: Sequence[RouterServiceAsyncStub], pool: httpx.AsyncClient
    ) -> None:
        self._cluster = cluster
        self._stubs = stubs
        self._pool = pool
        self._turn = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, cluster: Cluster) -> AsyncIterator[Clients]:
        async with contextlib.AsyncExitStack() as stack:
            stubs = [await stack.enter_async_context(own_stub(cluster)) for _ in range(_CHANNELS)]
            yield cls(cluster, stubs, await stack.enter_async_context(own_pool(cluster)))
        gc.collect()  # calls and channels of grpc.aio refer to each other: until then they stay connected

    async def all(
        self, asks: Sequence[Ask], at_once: int, on_end: Callable[[Outcome], None] = lambda outcome: None
    ) -> list[Outcome]:
        """Runs all requests and returns their outcomes in order; `at_once` clients run side by side, each
        takes the next one due."""
        waiting = iter(enumerate(asks))
        outcomes: dict[int, Outcome] = {}

        async def client() -> None:
            for number, ask in waiting:
                outcomes[number] = await self.one(ask)
                on_end(outcomes[number])

        async with asyncio.TaskGroup() as clients:
            for _ in range(at_once):
                clients.create_task(client())
        return [outcomes[number] for number in range(len(asks))]

    async def one(self, ask: Ask) -> Outcome:
        """Asks, and leaves if it is one that leaves."""
        outcome = Outcome(ask, [Output() for _ in range(ask.n)], began=time.monotonic())
        try:
            async with contextlib.aclosing(self._parts(ask)) as parts:
                outcome.ending = await _listen(parts, outcome)
        except BatonError as error:
            # A copy, since the traceback holds the connection.
            outcome.error = BatonError(error.kind, error.message, tokens_sent=error.tokens_sent)
            outcome.ending = error.kind.name.lower()
        outcome.ended = time.monotonic()
        _check_error(outcome)
        return outcome

    def _parts(self, ask: Ask) -> AsyncGenerator[Part]:
        if ask.api is Api.GRPC:
            return self._messages(ask)
        return self._events(ask) if ask.api is Api.EVENTS else self._body(ask)

    async def _messages(self, ask: Ask) -> AsyncGenerator[Part]:
        timeout = LIMIT_S
        if ask.leave is not None and ask.leave.way is Way.DEADLINE:
            timeout = max(0.001, ask.leave.after_s)
        async with contextlib.AsyncExitStack() as stack:
            call = (await self._stub(ask.leave, stack)).Generate(ask.message(), timeout=timeout)
            stack.callback(call.cancel)
            if ask.leave is not None and ask.leave.way is not Way.DEADLINE:
                # Not by cancelling the reading task: grpc.aio would leak the call and its connection.
                going = asyncio.get_running_loop().call_later(ask.leave.after_s, call.cancel)
                stack.callback(going.cancel)
            unfinished, known = ask.n, [0] * ask.n
            try:
                async for message in call:
                    assert unfinished, "a message after the last"
                    if message.token_ids:
                        assert message.first_number == known[message.index], "a gap or a repeat"
                    known[message.index] += len(message.token_ids)
                    unfinished -= bool(message.finish_reason)
                    if not unfinished:
                        assert message.usage.completion_tokens == sum(known)
                        assert message.usage.prompt_tokens == len(ask.prompt)
                    yield Part(
                        message.index,
                        message.token_ids,
                        message.text,
                        [one.logprob for one in message.logprobs],
                        _finish(message.finish_reason),
                        message.trace.attempts,
                    )
            except grpc.aio.AioRpcError as error:
                raise reported(error) from error
            except asyncio.CancelledError:
                if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise
                raise Left from None

    async def _stub(self, leave: Leave | None, stack: contextlib.AsyncExitStack) -> RouterServiceAsyncStub:
        if leave is not None and leave.way is Way.DISCONNECT:
            return await stack.enter_async_context(own_stub(self._cluster))
        self._turn += 1
        return self._stubs[self._turn % len(self._stubs)]

    async def _events(self, ask: Ask) -> AsyncGenerator[Part]:
        done = False
        async with self._client(ask) as client:
            async with client.stream("POST", "/v1/completions", json=ask.body()) as response:
                if response.status_code != 200:
                    raise error_of(json.loads(await response.aread()), response)
                async for line in response.aiter_lines():
                    assert not (done and line), f"something after the end: {line}"
                    if line == "data: [DONE]":
                        done = True
                    elif line:
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            raise error_of(event)
                        yield _choice(event["choices"][0])
            # Before [DONE] a stream may only end in an error.
            assert done, "the stream ended in silence"

    async def _body(self, ask: Ask) -> AsyncGenerator[Part]:
        async with self._client(ask) as client:
            response = await client.post("/v1/completions", json=ask.body())
            if response.status_code != 200:
                raise error_of(response.json(), response)
            answer = response.json()
            for choice in answer["choices"]:
                yield _choice(choice)
            counted = sum(len(choice["token_ids"]) for choice in answer["choices"])
            assert answer["usage"]["completion_tokens"] == counted

    @contextlib.asynccontextmanager
    async def _client(self, ask: Ask) -> AsyncIterator[httpx.AsyncClient]:
        if ask.leave is None:
            yield self._pool
        else:
            async with own_pool(self._cluster) as client:
                yield client


@contextlib.asynccontextmanager
async def own_stub(cluster: Cluster) -> AsyncIterator[RouterServiceAsyncStub]:
    """A connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(cluster.grpc_address, options=options) as channel:
        yield RouterServiceStub(channel)


def own_pool(cluster: Cluster) -> httpx.AsyncClient:
    # Certificates would cost 50 ms a client.
    return httpx.AsyncClient(base_url=cluster.url, timeout=LIMIT_S, verify=False)


async def _listen(parts: AsyncIterator[Part], outcome: Outcome) -> str:
    """Reads until the end, or until it is time to leave."""
    leave = outcome.ask.leave
    by_itself = outcome.ask.api is Api.GRPC
    goes_s = leave.after_s if leave is not None else LIMIT_S
    try:
        async with asyncio.timeout(None if by_itself else goes_s):
            last = time.monotonic()
            async for part in parts:
                now = time.monotonic()
                outcome.longest_gap_s, last = max(outcome.longest_gap_s, now - last), now
                output = outcome.choices[part.index]
                assert not output.finish, "more of an output that has ended"
                output.token_ids += part.token_ids
                output.text += part.text
                output.logprobs += part.logprobs
                output.finish = part.finish
                outcome.attempts = max(outcome.attempts, part.attempts)
                if leave is not None and _goes(leave, outcome):
                    return "left"
    except Left:
        return "left"
    except TimeoutError:
        assert goes_s < LIMIT_S, f"no end after {LIMIT_S} s: {outcome.ask}"
        return "left"
    assert all(output.finish for output in outcome.choices), f"it ended in silence: {outcome}"
    return "whole"


def _goes(leave: Leave, outcome: Outcome) -> bool:
    """True if the client has received what it leaves with."""
    if leave.at_end:
        return all(output.finish for output in outcome.choices)
    return leave.at_token is not None and outcome.tokens >= leave.at_token


def _check_error(outcome: Outcome) -> None:
    """An error has a reason, whether it may be retried, and whether tokens were sent before it."""
    error, ask = outcome.error, outcome.ask
    if error is None:
        return
    assert error.message, outcome
    if error.kind is ErrorKind.DEADLINE:
        assert ask.leave is not None, f"a deadline that was not set: {outcome}"
        assert ask.leave.way is Way.DEADLINE, f"a deadline that was not set: {outcome}"
        assert outcome.ended - outcome.began < ask.leave.after_s + _LATE_S, (
            f"its deadline came late: {outcome}"
        )
        return  # it may come from the client's own library, which knows no more
    assert error.kind.retryable, f"an error that a worker's death does not explain: {outcome}"
    if ask.api is Api.GRPC:
        assert error.tokens_sent == bool(outcome.tokens), outcome


def reported(error: grpc.aio.AioRpcError) -> BatonError:
    """The error that a status and its details stand for."""
    metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    return from_status(error.code(), error.details(), metadata)


def error_of(body: dict[str, Any], response: httpx.Response | None = None) -> BatonError:
    """The error that has this OpenAI body. AssertionError where none has, or the headers contradict it."""
    error = body["error"]
    for kind in ErrorKind:
        face = openai_body(BatonError(kind, ""))["error"]
        if (face["type"], face["code"]) == (error["type"], error["code"]):
            if response is not None:
                assert ("retry-after" in response.headers) == kind.retryable
            return BatonError(kind, error["message"], tokens_sent=response is None)
    raise AssertionError(f"not one of Baton's errors: {body}")


def _choice(choice: dict[str, Any]) -> Part:
    logprobs = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else ()
    return Part(choice["index"], choice["token_ids"], choice["text"], logprobs, choice["finish_reason"] or "")


def _finish(reason: FinishReason.ValueType) -> str:
    return FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower() if reason else ""


def draw_asks(seed: int, count: int) -> list[Ask]:
    """The same for the same seed."""
    dice = random.Random(seed)
    return [Ask.draw(dice) for _ in range(count)]
