"""Tenants share the threads and the processes that tokenise: one that floods them does not delay the others
until its own jobs are done. Judged by the order in which jobs run."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from baton.base.errors import BatonError, ErrorKind
from services.router.request.request import ParsedRequest
from services.router.tenants.account import TenantAccount
from services.router.tenants.caller import Caller
from services.router.tenants.current import current_caller
from services.router.tenants.tenants_file import TenantLimits
from services.router.tokenization.fair_threads import FairThreads
from services.router.tokenization.helper_processes import HelperProcess, helper_settings
from tests.router.conftest import SiteMaker

FLOOD = 100
LARGE = 64 * 1024


class Jobs:
    """Starts jobs of tenants and records the order in which they run, one at a time, once `gate` is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.ran: list[str] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self._accounts: dict[str, TenantAccount] = {}

    def start(self, tenant: str, job: Callable[[Callable[[], None]], Coroutine[Any, Any, Any]]) -> None:
        """Starts a task as a call of this tenant; it is given what the job has to do."""
        if tenant not in self._accounts:
            self._accounts[tenant] = TenantAccount(tenant, TenantLimits(), lambda: 0.0)
        current_caller.set(Caller(tenant, self._accounts[tenant]))
        self.tasks.append(asyncio.create_task(job(lambda: self._run(tenant))))
        current_caller.set(None)

    def weigh(self, tenant: str, weight: float) -> None:
        self._accounts[tenant].weight = weight

    async def finish(self) -> None:
        """Opens the gate, and waits for all."""
        await asyncio.sleep(0)
        self.gate.set()
        await asyncio.gather(*self.tasks)

    def last_of(self, tenant: str) -> int:
        """The number of jobs that ran until this tenant's last one."""
        return len(self.ran) - self.ran[::-1].index(tenant)

    def _run(self, tenant: str) -> None:
        self.gate.wait(20)
        self.ran.append(tenant)


@pytest.fixture
async def threads() -> AsyncIterator[FairThreads]:
    one = FairThreads(1, "test")
    yield one
    one.shutdown(wait=True)


async def test_a_tenant_that_floods_delays_another_by_one_job(threads: FairThreads) -> None:
    jobs = Jobs()
    for _ in range(FLOOD):
        jobs.start("flood", lambda job: threads.run(job, LARGE))
    for _ in range(5):
        jobs.start("other", lambda job: threads.run(job, 400))
    await jobs.finish()
    assert Counter(jobs.ran) == {"flood": FLOOD, "other": 5}
    assert jobs.last_of("other") <= 2 + 5, "the one that ran, and one more"


async def test_shares_follow_weights(threads: FairThreads) -> None:
    jobs = Jobs()
    for name in ("light", "heavy"):
        for _ in range(FLOOD):
            jobs.start(name, lambda job: threads.run(job, LARGE))
    jobs.weigh("heavy", 3.0)
    await jobs.finish()
    first = Counter(jobs.ran[:80])
    assert 57 <= first["heavy"] <= 63


async def test_the_pool_of_a_router(site: SiteMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    async with site(tokenizer_threads=1) as here:
        pool, jobs = here.router.tokenizer, Jobs()

        def encode(parsed: ParsedRequest, context: int) -> list[int]:
            jobs.gate.wait(20)
            jobs.ran.append(parsed.model)
            return [1]

        monkeypatch.setattr(pool.tokenizer, "encode", encode)
        for name, count, size in (("flood", FLOOD, LARGE), ("other", 5, 400)):
            for _ in range(count):
                request = ParsedRequest(name, text="a" * size)
                jobs.start(name, lambda job, request=request: pool.encode(request, 1))  # type: ignore[misc]
        await jobs.finish()
        assert jobs.last_of("other") <= 3 + 5


async def test_helper_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    one, jobs = HelperProcess(helper_settings("", False, 1024)), Jobs()
    monkeypatch.setattr(one, "exchange", lambda header, parts: header["job"]() or [])
    for name, count, size in (("flood", 40, 1 << 20), ("other", 3, 70_000)):
        for _ in range(count):
            part = bytes(size)
            jobs.start(name, lambda job, part=part: one.run({"job": job}, [part]))  # type: ignore[misc]
    await jobs.finish()
    one.close()
    assert jobs.last_of("other") <= 2 + 3


async def test_cancelled_jobs_do_not_run_and_lose_no_thread(threads: FairThreads) -> None:
    """Jobs of four tenants are cancelled at random, as they wait, run, or have their turn."""
    jobs, draw = Jobs(), random.Random(5)
    for _ in range(400):
        jobs.start(draw.choice("abcd"), lambda job: threads.run(job, draw.randrange(LARGE)))
    await asyncio.sleep(0)
    for task in draw.sample(jobs.tasks, 200):
        task.cancel()
    jobs.gate.set()
    while not all(task.done() for task in jobs.tasks):
        draw.choice([task for task in jobs.tasks if not task.done()]).cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*jobs.tasks, return_exceptions=True)
    before = len(jobs.ran)
    assert before < 400
    jobs.tasks.clear()
    jobs.start("e", lambda job: threads.run(job, 1))
    await asyncio.wait_for(jobs.finish(), 20)
    assert jobs.ran[before:][-1] == "e"
    after = Jobs()  # again one job is started at a time, and the rest wait for their turns
    for _ in range(10):
        after.start("flood", lambda job: threads.run(job, LARGE))
    after.start("other", lambda job: threads.run(job, 400))
    await after.finish()
    assert after.last_of("other") <= 2 + 1


async def test_a_failing_job_raises_and_frees_its_thread(threads: FairThreads) -> None:
    def fail() -> None:
        raise BatonError(ErrorKind.INVALID, "no")

    for _ in range(3):
        with pytest.raises(BatonError, match="no"):
            await threads.run(fail, 1)


async def test_shutting_down_cancels_what_waits() -> None:
    threads, jobs = FairThreads(1, "test"), Jobs()
    for _ in range(3):
        jobs.start("a", lambda job: threads.run(job, 1))
    await asyncio.sleep(0.05)
    threads.shutdown(wait=False)
    jobs.gate.set()
    ended = await asyncio.gather(*jobs.tasks, return_exceptions=True)
    assert [type(one) for one in ended[1:]] == [asyncio.CancelledError] * 2
    assert jobs.ran == ["a"]
    with pytest.raises(RuntimeError):
        await threads.run(lambda: None, 1)
