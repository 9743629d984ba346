"""Sends one process's share of a run, each conversation at its own time.

open loop     a conversation starts when it is due
closed loop   a fixed number of users; each starts its next conversation when the last one has ended

A turn after the first is due its think time after the previous answer. Latency counts from when a request was
due, so that neither a slow generator nor a stalled server can hide what a user would experience.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from loadgen.common.record import Outcome, Record
from loadgen.common.settings import Form, Settings
from loadgen.load.alphabet import Content
from loadgen.load.workload import Conversation, Turn, Workload
from loadgen.targets.target import Answer, Failure, Message, Payload, Prompt, Request, RunClock, Target

# Prompts generated before the clock starts; the rest is generated on demand.
PREPARED_BYTES = 256 * 1024 * 1024
_OVERHEAD_BYTES = 1024
_ANSWER_ROLE, _USER_ROLE = "assistant", "user"


@dataclass(slots=True)
class Prepared:
    """A conversation with its first request, encoded."""

    conversation: Conversation
    prompt: Prompt
    payload: Payload


class History:
    """A conversation so far; the next prompt is all of it plus the user's next message."""

    def __init__(self, form: Form) -> None:
        self._chat = form == "chat"
        self._messages: list[Message] = []
        self._ids: list[int] = []
        self._text = ""

    def ask(self, content: Content) -> Prompt:
        """The prompt of the next turn."""
        if isinstance(content, list):
            self._ids += content
            return list(self._ids)
        if self._chat:
            self._messages.append(Message(_USER_ROLE, content))
            return tuple(self._messages)
        self._text += content
        return self._text

    def add_answer(self, answer: Answer) -> None:
        """Appends the answer to the conversation."""
        self._ids += answer.ids
        self._text += "".join(answer.text)
        self._messages.append(Message(_ANSWER_ROLE, "".join(answer.text)))


@dataclass(slots=True)
class Counts:
    """Progress counters of this process."""

    sent: int = 0
    ended: int = 0
    failed: int = 0
    cancelled: int = 0
    tokens: int = 0
    lags: list[float] = field(default_factory=list)

    @property
    def in_flight(self) -> int:
        """Requests that were sent and have not ended."""
        return self.sent - self.ended


class Driver:
    """Runs a share of the load once. `sink` receives every record at its end."""

    def __init__(
        self,
        target: Target,
        workload: Workload,
        settings: Settings,
        clock: RunClock,
        sink: Callable[[Record], None],
        *,
        process: int = 0,
    ) -> None:
        self._target = target
        self._workload = workload
        self._settings = settings
        self._clock = clock
        self._sink = sink
        self._process = process
        self._running: set[asyncio.Task[None]] = set()
        self._stopped = False
        self._fault: BaseException | None = None
        self.counts = Counts()

    def prepare(self, numbers: Iterable[int], most: int | None = None) -> Iterator[Prepared]:
        """The conversations with these numbers, in order. The first `most` are generated at once, as far as
        memory allows, the others on demand.
        """
        coming = self._prepare_each(iter(numbers))
        made: list[Prepared] = []
        budget = PREPARED_BYTES
        for prepared in itertools.islice(coming, most):
            made.append(prepared)
            budget -= len(prepared.payload.data) + _OVERHEAD_BYTES
            if budget <= 0:
                break
        return _taken(made, coming)

    async def open_loop(self, prepared: Iterator[Prepared], times: Iterator[float]) -> None:
        """Starts each conversation at its time; returns when all have ended or timed out."""
        last = 0.0
        for time, one in zip(times, prepared, strict=False):
            last = time
            await self._sleep_until(time)
            if self._fault is not None:
                break
            if self.counts.in_flight >= self._settings.generator.max_in_flight:
                self._refuse(one, time)
            else:
                self._spawn(self._converse(one, time))
        await self._drain(last)

    async def closed_loop(self, prepared: Iterator[Prepared], users: int) -> None:
        """Keeps `users` conversations running, until there are no more or the duration has passed."""
        until = self._settings.load.duration_s

        async def user() -> None:
            for one in prepared:
                if until is not None and self._clock() >= until:
                    return
                await self._converse(one, self._clock())

        for _ in range(users):
            self._spawn(user())
        await asyncio.wait(self._running, timeout=None if until is None else max(0.0, until - self._clock()))
        await self._drain(self._clock())

    async def stop(self) -> None:
        """Cancels running requests, which are recorded as stopped."""
        self._stopped = True
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _prepare_each(self, numbers: Iterator[int]) -> Iterator[Prepared]:
        for number in numbers:
            conversation = self._workload.conversation(number)
            if conversation is None:
                return
            prompt = History(self._settings.target.form).ask(conversation.turns[0].content)
            request = self._request(conversation, 0, prompt)
            yield Prepared(conversation, prompt, self._target.prepare(request))

    def _request(self, conversation: Conversation, turn: int, prompt: Prompt) -> Request:
        request_id = f"{self._settings.load.seed:x}-{conversation.number}-{turn}"
        return Request(request_id, prompt, conversation.turns[turn].output_tokens, conversation.klass)

    async def _converse(self, prepared: Prepared, due: float) -> None:
        """Runs all turns of one conversation; a failed turn ends it."""
        conversation = prepared.conversation
        history = History(self._settings.target.form)
        payload = prepared.payload
        for number, turn in enumerate(conversation.turns):
            prompt = history.ask(turn.content)
            if number > 0:
                due = self._clock() + turn.think_s
                payload = self._target.prepare(self._request(conversation, number, prompt))
                await self._sleep_until(due)
            record = self._record(conversation, number, turn, prompt, due)
            answer = Answer()
            await self._send(payload, record, answer, turn.cancel_after_s)
            if record.outcome != Outcome.OK:
                return
            if number + 1 < len(conversation.turns):
                history.add_answer(answer)

    async def _send(self, payload: Payload, record: Record, answer: Answer, leave_s: float | None) -> None:
        """Sends one request and completes its record; raises only its own cancellation."""
        timeout_s = self._settings.target.timeout_s
        leaves = leave_s is not None and leave_s < timeout_s
        counts, clock = self.counts, self._clock
        record.sent = clock()
        counts.sent += 1
        counts.lags.append(record.sent - record.scheduled)
        try:
            async with asyncio.timeout(leave_s if leaves else timeout_s):
                await self._target.send(payload, record, answer)
            record.outcome = Outcome.OK
        except TimeoutError:
            record.outcome = Outcome.CANCELLED if leaves else Outcome.TIMEOUT
        except Failure as failure:
            record.outcome, record.detail = failure.outcome, failure.detail
        except asyncio.CancelledError:
            record.outcome = Outcome.STOPPED if self._stopped else Outcome.TIMEOUT
            raise
        finally:
            record.ended = clock()
            counts.ended += 1
            counts.cancelled += record.outcome == Outcome.CANCELLED
            counts.failed += record.outcome not in (Outcome.OK, Outcome.CANCELLED, Outcome.STOPPED)
            counts.tokens += len(record.token_times)
            self._sink(record)

    def _record(
        self, conversation: Conversation, number: int, turn: Turn, prompt: Prompt, due: float
    ) -> Record:
        asked_input = len(prompt) if isinstance(prompt, list) else turn.tokens if number == 0 else None
        return Record(
            conversation=conversation.number,
            turn=number,
            klass=conversation.klass.name,
            scheduled=due,
            asked_input=asked_input,
            asked_output=turn.output_tokens,
            exact_output=self._settings.target.ignore_eos,
            request_id=self._request(conversation, number, prompt).request_id,
            process=self._process,
        )

    def _refuse(self, prepared: Prepared, due: float) -> None:
        conversation = prepared.conversation
        record = self._record(conversation, 0, conversation.turns[0], prepared.prompt, due)
        record.outcome = Outcome.NOT_SENT
        self.counts.failed += 1
        self._sink(record)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        """Stores an internal error of a conversation, which ends the run."""
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = self._fault or error

    async def _sleep_until(self, due: float) -> None:
        """Sleeps until a time; yields to the loop even if it has passed."""
        await asyncio.sleep(max(0.0, due - self._clock()))

    async def _drain(self, last: float) -> None:
        """Waits for running requests, within the drain time of the settings."""
        generator, target = self._settings.generator, self._settings.target
        patience = target.timeout_s if generator.drain_s is None else generator.drain_s
        left = max(0.0, last + patience - self._clock())
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=left)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self._fault is not None:
            raise self._fault


def _taken(made: list[Prepared], rest: Iterator[Prepared]) -> Iterator[Prepared]:
    """Yields the generated items first, releasing each, then the rest."""
    made.reverse()
    while made:
        yield made.pop()
    yield from rest
