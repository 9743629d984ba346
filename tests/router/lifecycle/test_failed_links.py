"""Links between workers that fail: requests go over other pairs, and come back once a link works again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator

import grpc.aio
import pytest
import structlog

from baton.v1.admin_pb2 import AdminServiceGetStatusRequest
from baton.v1.types_pb2 import WorkerRole
from baton.v1.worker_pb2 import WorkerLimits
from services.router.queue.waiting_queue import WaitingQueue
from services.router.workers import links
from tests.router.conftest import Site, SiteMaker, ids_request, tokens_of, until
from tests.router.fake_model import expected
from tests.router.fake_workers import FakeWorker

# More than there are attempts: each has one token from prefill, whatever its link does.
TOKENS = 32
PAIRS = [(f"prefill-{one}", f"decode-{other}") for one, other in itertools.product(range(2), range(2))]
SUBSETS = [pairs for count in range(len(PAIRS) + 1) for pairs in itertools.combinations(PAIRS, count)]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MIN_PAUSE_S", 0.05)
    monkeypatch.setattr(links, "MAX_PAUSE_S", 0.2)


def break_links(here: Site, broken: tuple[tuple[str, str], ...]) -> None:
    """Exactly these links fail from now on."""
    for name, worker in here.cluster.workers.items():
        worker.behaviour.broken_links = {decode for prefill, decode in broken if prefill == name}


async def answers(here: Site, count: int, seed: int) -> list[bool]:
    """Sends `count` requests at a time and returns whether each had its tokens; none has others."""
    prompts = [[seed % 250, number, 7] for number in range(count)]
    requests = (here.generate(ids_request(prompt, TOKENS)) for prompt in prompts)
    found = await asyncio.gather(*requests, return_exceptions=True)
    for prompt, answer in zip(prompts, found, strict=True):
        if isinstance(answer, BaseException):
            assert isinstance(answer, grpc.aio.AioRpcError)
            assert answer.code() is grpc.StatusCode.UNAVAILABLE, answer.details()
        else:
            assert tokens_of(answer) == expected(prompt, TOKENS)
    return [not isinstance(answer, BaseException) for answer in found]


@contextlib.asynccontextmanager
async def always_usable(here: Site, *, expected: bool) -> AsyncIterator[None]:
    """Checks that some pair could always serve, where that is `expected`."""

    async def watch() -> None:
        while here.router.placement.usable():  # noqa: ASYNC110 (links have no events)
            await asyncio.sleep(0.001)

    watching = asyncio.create_task(watch())
    try:
        yield
        assert not (watching.done() and expected), "no pair was usable, though one had no failed link"
    finally:
        watching.cancel()


def forget_failures(here: Site) -> None:
    """All links are as if they had never failed."""
    for prefill, decode in itertools.product(here.router.directory.workers, repeat=2):
        prefill.links.worked(decode)


async def failed_links(here: Site) -> set[tuple[str, str]]:
    """The failed links that the status names."""
    status = await here.admin.GetStatus(AdminServiceGetStatusRequest())
    return {
        (worker.worker.identity.name, link.decode)
        for worker in status.workers
        for link in worker.failed_links
    }


async def test_whichever_links_fail_no_request_does_while_another_pair_is_free(site: SiteMaker) -> None:
    """Every set of links between two prefill and two decode workers, in random order."""
    order = random.Random(5).sample(SUBSETS, len(SUBSETS))
    async with site(prefill=2, decode=2) as here:
        for number, broken in enumerate(order):
            some_work = len(broken) < len(PAIRS)
            forget_failures(here)
            async with always_usable(here, expected=some_work):
                break_links(here, broken)
                served = await answers(here, 6, number)
            named = await failed_links(here)
            assert all(served) if some_work else not any(served), (broken, served)
            assert some_work or named
            reason = here.router.readiness.reason()
            assert reason in (None, "the links between prefill and decode workers have failed")
        break_links(here, ())
        while await failed_links(here):  # each is tried again by a request
            await answers(here, 6, 99)
            await asyncio.sleep(0.02)
        await here.quiet()


async def test_pauses_of_a_link_grow_until_a_handoff_succeeds(site: SiteMaker) -> None:
    """The link is the only one: requests wait for each try."""
    async with site(max_attempts=4) as here:
        (worker,) = (one for one in here.router.directory.workers if one.name == "prefill-0")
        break_links(here, (("prefill-0", "decode-0"),))
        with structlog.testing.capture_logs() as logged:
            assert await answers(here, 1, 1) == [False]
        pauses = [line["retry_s"] for line in logged if line["event"] == "link_failed"]
        assert pauses == [0.05, 0.1, 0.2, 0.2]
        (link,) = worker.links.status()
        assert (link.decode, link.failures) == ("decode-0", 4)
        assert "no link to decode-0" in link.reason
        assert not here.router.placement.usable()
        break_links(here, ())
        await until(here.router.placement.usable)
        assert await answers(here, 4, 3) == [True] * 4
        assert worker.links.status() == []


async def test_a_link_that_fails_a_request_again_counts(
    site: SiteMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though another pair looks free each time, as where pauses of other links end in turn."""
    monkeypatch.setattr(WaitingQueue, "has_other_pair", lambda *arguments: True)
    async with site(max_attempts=3) as here:
        break_links(here, (("prefill-0", "decode-0"),))
        with structlog.testing.capture_logs() as logged:
            assert await answers(here, 1, 1) == [False]
        assert sum(line["event"] == "attempt_failed" for line in logged) == 1 + 3


async def test_a_pair_that_failed_a_request_is_avoided_by_its_next_attempt(site: SiteMaker) -> None:
    """The pair is avoided whatever the reason: nothing says that the link has failed, so that other requests
    may use it."""
    async with site(prefill=1, decode=2, max_attempts=2) as here:
        here.worker("prefill-0").behaviour.broken_cause = None
        for broken in ("decode-0", "decode-1"):
            break_links(here, (("prefill-0", broken),))
            for seed in range(4):
                assert all(await answers(here, 4, seed))
        assert await failed_links(here) == set()
        await here.quiet()


async def test_the_only_pair_is_tried_again(site: SiteMaker) -> None:
    async with site() as here:
        behaviour = here.worker("prefill-0").behaviour
        behaviour.break_prefills, behaviour.break_code = 2, grpc.StatusCode.FAILED_PRECONDITION
        assert await answers(here, 1, 1) == [True]


def limits(sends: list[str], receives: list[str]) -> WorkerLimits:
    return WorkerLimits(
        kv_tokens=256, max_logprobs=20, max_prefills=8, sends_over=sends, receives_over=receives
    )


@pytest.mark.parametrize("sends", [["grpc"], ["ipc:a"], ["ipc:a", "grpc"]])
@pytest.mark.parametrize("receives", [["grpc"], ["ipc:b", "grpc"], ["ipc:a"], ["ipc:b"], ["nccl"]])
async def test_workers_need_a_transport_in_common(
    site: SiteMaker, sends: list[str], receives: list[str]
) -> None:
    """Without any the router is not ready and says why; no request is sent over a link that cannot be."""
    common = bool(set(sends) & set(receives))
    async with site(prefill=0, decode=0) as here, contextlib.AsyncExitStack() as stack:
        for name, role, own in (
            ("prefill-9", WorkerRole.WORKER_ROLE_PREFILL, limits(sends, [])),
            ("decode-9", WorkerRole.WORKER_ROLE_DECODE, limits([], receives)),
        ):
            worker = FakeWorker(name, role, here.cluster, limits=own)
            await stack.enter_async_context(worker.serving())
            here.router.directory.add(worker.address)
        await until(lambda: len([one for one in here.router.directory.workers if one.alive]) == 2)
        why = "no prefill worker has a transport in common with a decode worker"
        assert here.router.readiness.reason() == (None if common else why)
        if common:
            assert await answers(here, 2, 1) == [True, True]
