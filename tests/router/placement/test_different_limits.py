"""Pools of workers whose limits differ: what each request gets, by a plain statement of the rules.

1. What no pair of live workers serves is refused at once: too long (`context_length_exceeded`), or with
   fields that none of them has. An output ends where the room of the pair with most of it does.
2. All else is placed on a pair that serves it, however busy, and never beyond a worker's limit.
3. Where a worker ends, what only it served still waits for as long as a request may wait, then is
   UNAVAILABLE; once its limits are not announced any more it is refused at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import cast

import grpc.aio
import pytest

from baton.base.errors import BatonError, ErrorKind, FieldError
from baton.rpc.grpc_errors import from_status
from baton.v1.router_pb2 import GenerateRequest, GenerateResponse
from baton.v1.types_pb2 import Choices, Grammar, WorkerRole
from baton.v1.worker_pb2 import WorkerLimits
from services.router.placement.announced import Announced
from tests.router.conftest import EOS, Site, SiteMaker, ids_request, tokens_of, until
from tests.router.fake_model import expected
from tests.router.fake_workers import FakeWorker

POSITIONS = 512
# Long enough for all that is served, on a busy machine; for what waits in vain; and of limits that have gone,
# which go by a clock of the test: how long so many requests take to be checked is the machine's.
LONG_S, SHORT_S, KEEP_S = 60.0, 0.7, 2.5
# Of a call: one that a busy machine may be too slow for is refused early.
NO_DEADLINE_S = 3600.0
GRAMMARS = {"regex": Grammar(regex="a*"), "choice": Grammar(choice=Choices(choices=["a"]))}
ROLES = {
    "prefill": WorkerRole.WORKER_ROLE_PREFILL,
    "decode": WorkerRole.WORKER_ROLE_DECODE,
    "both": WorkerRole.WORKER_ROLE_BOTH,
}


@dataclass(frozen=True)
class Machine:
    """The limits that one worker enforces."""

    name: str
    role: str
    context: int
    kv: int
    logprobs: int
    formats: tuple[str, ...]
    over: tuple[str, ...]


Pair = tuple[Machine, Machine]


@dataclass(frozen=True)
class Ask:
    """One request. `tokens`: of output; 0: the prompt is repeated, which needs no worker."""

    prompt: int
    tokens: int
    logprobs: int | None
    kind: str


def a_machine(draw: random.Random, number: int) -> Machine:
    role = draw.choice(("prefill", "decode", "both", "both"))
    return Machine(
        name=f"{role}-{number}",
        role=role,
        context=draw.choice((64, 200, 400, POSITIONS, 4096)),
        kv=draw.choice((24, 48, 100, 200, 300, 1000)),
        logprobs=draw.choice((0, 2, 20, 20, 20)),
        formats=draw.choice(((), ("regex",), tuple(GRAMMARS), tuple(GRAMMARS))),
        over=draw.choice((("grpc",), ("ipc:a", "grpc"), ("ipc:a", "grpc"), ("ipc:a",))),
    )


def an_ask(draw: random.Random) -> Ask:
    tokens = draw.choice((0, 1, 3, 10, 60, 400))
    return Ask(
        prompt=draw.choice((1, 5, 23, 24, 47, 60, 99, 150, 199, 250, 299, 399, 511, 512)),
        tokens=tokens,
        logprobs=draw.choice((None, None, None, 0, 2, 5)) if tokens else None,
        kind=draw.choice(("", "", "", *GRAMMARS)) if tokens else "",
    )


def links(prefill: Machine, decode: Machine) -> bool:
    if prefill is decode:
        return prefill.role == "both"
    return prefill.role == "prefill" and decode.role == "decode" and bool({*prefill.over} & {*decode.over})


def pairs(machines: list[Machine]) -> list[Pair]:
    return [pair for pair in itertools.product(machines, machines) if links(*pair)]


def offers(machine: Machine, ask: Ask) -> bool:
    logprobs = ask.logprobs is None or 0 < machine.logprobs >= ask.logprobs
    return logprobs and (not ask.kind or ask.kind in machine.formats)


def room(ask: Ask, pair: Pair) -> int:
    """Tokens of output that a pair has room for; -1 where it does not serve the request at all."""
    prefill, decode = pair
    left = min(prefill.context, decode.context, decode.kv, POSITIONS) - ask.prompt
    fits = ask.prompt <= min(prefill.kv, prefill.context) and left >= min(1, ask.tokens)
    return left if fits and offers(prefill, ask) and offers(decode, ask) else -1


def limits_of(pair: Pair) -> tuple[object, ...]:
    """The limits in which a pair differs from others."""
    prefill, decode = pair
    prompt, total = min(prefill.kv, prefill.context), min(prefill.context, decode.context, decode.kv)
    formats = frozenset(prefill.formats) & frozenset(decode.formats)
    return prompt, total, min(prefill.logprobs, decode.logprobs), formats


def tokens_due(ask: Ask, announced: list[Pair], live: list[Pair]) -> int | ErrorKind:
    """The number of tokens of a request's output, or the kind of its error."""
    unknown = POSITIONS - ask.prompt if ask.prompt + min(1, ask.tokens) <= POSITIONS else -1
    most = max((room(ask, pair) for pair in announced), default=unknown)
    if most < 0:
        return ErrorKind.INVALID
    tokens = min(ask.tokens, most)
    served = not ask.tokens or any(room(ask, pair) >= tokens for pair in live)
    return tokens if served else ErrorKind.UNAVAILABLE


def message(ask: Ask, number: int) -> GenerateRequest:
    ids = [(number * 7 + index) % 250 for index in range(ask.prompt)]
    request = ids_request(ids, ask.tokens)
    if ask.logprobs is not None:
        request.logprobs = ask.logprobs
    if ask.kind:
        request.ignore_eos = False
        request.grammar.CopyFrom(GRAMMARS[ask.kind])
    request.echo = not ask.tokens
    return request


async def answer(here: Site, request: GenerateRequest) -> list[GenerateResponse] | BatonError:
    try:
        return await here.generate(request, timeout=NO_DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
        return from_status(error.code(), error.details(), metadata)


def check(ask: Ask, request: GenerateRequest, got: object, announced: list[Pair], live: list[Pair]) -> None:
    due = tokens_due(ask, announced, live)
    if isinstance(got, BatonError) and got.kind is ErrorKind.OVERLOADED:
        assert due is not ErrorKind.INVALID
        return
    if isinstance(due, ErrorKind):
        assert isinstance(got, BatonError), (ask, due)
        assert got.kind is due, (ask, got)
        if due is ErrorKind.INVALID and ask.logprobs is None and not ask.kind:
            assert isinstance(got, FieldError)
            assert got.code == "context_length_exceeded"
        return
    assert isinstance(got, list), (ask, got)
    if not due:
        return
    wanted = expected(list(request.token_ids.ids), due)
    if ask.kind and EOS in wanted:
        wanted = wanted[: wanted.index(EOS) + 1]
    assert tokens_of(got) == wanted, ask
    names = got[-1].trace.prefill_worker, got[-1].trace.decode_worker
    assert names in {(prefill.name, decode.name) for prefill, decode in live}


@contextlib.asynccontextmanager
async def serving(here: Site, machine: Machine, slots: int) -> AsyncIterator[None]:
    """Runs a fake worker that enforces these limits; the router knows it."""
    limits = WorkerLimits(
        kv_tokens=machine.kv, max_logprobs=machine.logprobs, output_formats=machine.formats, max_prefills=2,
        sends_over=machine.over, receives_over=machine.over,
    )  # fmt: skip
    role, context = ROLES[machine.role], machine.context
    worker = FakeWorker(machine.name, role, here.cluster, slots=slots, max_context=context, limits=limits)
    worker.behaviour.step_s = 0.0
    async with worker.serving():
        here.router.directory.add(worker.address)
        yield


async def answers(here: Site, asks: list[Ask], announced: list[Pair], live: list[Pair]) -> None:
    """Sends all of them at once, and checks what they get."""
    requests = [message(ask, number) for number, ask in enumerate(asks)]
    got = await asyncio.gather(*(answer(here, request) for request in requests))
    if here.router.queue.timeout_s == LONG_S:  # else a busy machine may be too slow
        assert not any(isinstance(one, BatonError) and one.kind is ErrorKind.OVERLOADED for one in got)
    for ask, request, one in zip(asks, requests, got, strict=True):
        check(ask, request, one, announced, live)
    await here.quiet()


def alive(here: Site) -> set[str]:
    return {worker.name for worker in here.router.directory.workers if worker.alive}


async def run_pool(site: SiteMaker, seed: int, count: int) -> None:
    """One random pool, whole, and then without one of its workers."""
    draw = random.Random(seed)
    machines = [a_machine(draw, number) for number in range(draw.randint(1, 4))]
    asks, slots = [an_ask(draw) for _ in range(count)], draw.choice((1, 2, 8))
    live, gone = pairs(machines), draw.choice(machines)
    left = pairs([one for one in machines if one is not gone])
    async with (
        site(prefill=0, decode=0, queue_timeout_s=LONG_S) as here,
        contextlib.AsyncExitStack() as stack,
        contextlib.AsyncExitStack() as leaving,
    ):
        for one in machines:
            await (leaving if one is gone else stack).enter_async_context(serving(here, one, slots))
        await until(lambda: len(alive(here)) == len(machines))
        largest = [min(one.kv, one.context, other.kv, other.context, POSITIONS) for one, other in live]
        assert here.router.admission.model.max_context_tokens == max(largest, default=POSITIONS)
        assert here.router.readiness.ready() == bool(live)
        if live:
            await answers(here, asks, live, live)
        now, pools = 0.0, here.router.pools
        announced = pools.announced = Announced(pools.members, KEEP_S, clock=lambda: now)
        announced.review()
        here.router.queue.timeout_s = SHORT_S
        before = announced.pairs
        await leaving.aclose()
        await until(lambda: gone.name not in alive(here))
        assert announced.pairs == before
        await answers(here, asks, live, left)
        now += KEEP_S
        assert len(announced.pairs) == len({limits_of(pair) for pair in left})
        await answers(here, asks, left, left)
        assert not any(worker.behaviour.beyond_limits for worker in here.cluster.workers.values())


@pytest.mark.parametrize(
    ("first", "count"), [(0, 8), *(pytest.param(8 * n, 50, marks=pytest.mark.slow) for n in range(25))]
)
async def test_each_request_gets_what_the_rules_say(site: SiteMaker, first: int, count: int) -> None:
    """Eight random pools at a time, of up to four workers; at full size 200 pools and 50 requests each."""
    async with asyncio.TaskGroup() as pools:
        for seed in range(first, first + 8):
            pools.create_task(run_pool(site, seed, count))
