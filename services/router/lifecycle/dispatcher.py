"""Runs this router's requests, each in a task of its own and those of one client call together; drains
them."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from functools import partial

from baton.base.errors import BatonError, ErrorKind
from services.router.lifecycle.outbox import MOST_TAKEN, Outbox
from services.router.lifecycle.request_lifecycle import LifecycleDeps, RequestLifecycle
from services.router.request.request import Delta, Request
from services.router.tenants.account import CallCost, Permit
from services.router.workers.worker_error import internal_error

_CANCELS_S = 5.0


class Dispatcher:
    """Starts requests and cancels them. A client that reads slowly delays no other."""

    def __init__(self, deps: LifecycleDeps) -> None:
        self._deps = deps
        # At most as many as the waiting queue and the workers' slots hold.
        self._tasks: set[asyncio.Task[None]] = set()
        self.draining = False
        # The router stops: it is not ready, but takes the requests that arrive over kept connections.
        self.leaving = False
        self._stopping = False

    @property
    def running(self) -> int:
        """Number of requests that run or wait."""
        return len(self._tasks)

    @contextlib.asynccontextmanager
    async def run(
        self, request: Request, available: asyncio.Event, permit: Permit | None = None
    ) -> AsyncIterator[Outbox]:
        """Runs the request while the context is open; leaving it cancels what still runs, at the workers too.

        `available` is set whenever the outbox has something. `permit`: where output tokens
        are counted. Raises BatonError(UNAVAILABLE) while draining; later errors come through the outbox.
        """
        if self.draining:
            raise BatonError(ErrorKind.UNAVAILABLE, "the router is shutting down")
        lifecycle = RequestLifecycle(self._deps, request, available)
        task = asyncio.create_task(lifecycle.run())
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, lifecycle))
        try:
            yield lifecycle.outbox
        finally:
            lifecycle.outbox.close()
            task.cancel()
            await asyncio.wait((task,))
            if permit is not None:
                permit.output_tokens += lifecycle.output_tokens

    def _ended(self, lifecycle: RequestLifecycle, task: asyncio.Task[None]) -> None:
        """Answers the client of a request however its task has ended: no effect where the outbox has an end
        already."""
        self._tasks.discard(task)
        if task.cancelled():  # maybe before it has begun
            lifecycle.outbox.fail(BatonError(ErrorKind.UNAVAILABLE, "the request was cancelled"))
        elif isinstance(error := task.exception(), Exception):
            lifecycle.outbox.fail(internal_error(lifecycle.request_id, error))

    @contextlib.asynccontextmanager
    async def stream(self, requests: Sequence[Request]) -> AsyncIterator[AsyncGenerator[tuple[int, Delta]]]:
        """Yields the deltas of all requests as they come, each with the index of its request. The first
        failure is raised. Leaving the context cancels whatever still runs. Raises BatonError(RATE_LIMITED)
        where a limit of the tenant is reached."""
        available = asyncio.Event()
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._deps.observations.traces.running(requests))
            permit = stack.enter_context(self._permit(requests))
            runs = (self.run(one, available, permit) for one in requests)
            outboxes = [await stack.enter_async_context(run) for run in runs]
            yield await stack.enter_async_context(contextlib.aclosing(_deltas(outboxes, available)))

    @contextlib.contextmanager
    def _permit(self, requests: Sequence[Request]) -> Iterator[Permit | None]:
        """Holds what a call takes of its tenant's limits; counts it if it is refused."""
        tenant = requests[0].call.tenant
        if tenant is None:
            yield None
            return
        cost = CallCost(
            prompt_tokens=sum(len(one.prompt_ids) for one in requests if one.choice == 0),
            output_tokens=sum(one.max_tokens for one in requests),
            outputs=len(requests),
        )
        with contextlib.ExitStack() as stack:
            try:
                permit = stack.enter_context(tenant.admit(cost))
            except BatonError as error:
                self._deps.observations.refused(error.kind, requests[0].call)
                raise
            yield permit

    async def collect(
        self, requests: Sequence[Request], take: Callable[[int, Delta], None] | None = None
    ) -> list[Delta]:
        """Runs all requests to their ends. Returns each whole output as one delta, which is compact: ids and
        offsets take four bytes each, logprobs stay serialised. `take` is given each delta as it comes, with
        the index of its request."""
        outputs = [Delta(0, token_ids=array("I"), offsets=array("I"), opening=True) for _ in requests]
        texts: list[list[str]] = [[] for _ in requests]
        async with self.stream(requests) as deltas:
            async for index, delta in deltas:
                if take is not None:
                    take(index, delta)
                whole = outputs[index]
                whole.token_ids.extend(delta.token_ids)
                whole.offsets.extend(delta.offsets)
                whole.logprobs += delta.logprobs
                whole.prompt_logprobs += delta.prompt_logprobs
                whole.finish, whole.usage, whole.trace = delta.finish, delta.usage, delta.trace
                texts[index].append(delta.text)
        for whole, parts in zip(outputs, texts, strict=True):
            whole.text = "".join(parts)
        return outputs

    def set_draining(self, draining: bool) -> None:
        """Refuses new requests, or accepts them again unless the router stops; running ones continue."""
        self.draining = draining or self._stopping

    async def drain(self, timeout_s: float) -> None:
        """Refuses new requests, gives running ones `timeout_s` to end, then cancels the rest."""
        self.draining = self._stopping = True
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._deps.cancels.drain(_CANCELS_S)


async def _deltas(outboxes: Sequence[Outbox], available: asyncio.Event) -> AsyncGenerator[tuple[int, Delta]]:
    unfinished = dict(enumerate(outboxes))
    while unfinished:
        await available.wait()
        available.clear()
        for index, outbox in list(unfinished.items()):
            while (delta := outbox.take()) is not None:
                if delta.finish is not None:
                    del unfinished[index]
                yield index, delta
                if len(delta.token_ids) == MOST_TAKEN:  # there may be many more
                    await asyncio.sleep(0)
