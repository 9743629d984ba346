"""The driver in virtual time, against a target in memory whose times are exact."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from loadgen.common.record import Outcome, Record
from loadgen.common.settings import Settings
from loadgen.generator.driver import Driver
from loadgen.generator.plan import Share, numbers_of, open_times
from loadgen.load.workload import SyntheticWorkload
from loadgen.targets.target import Answer, Failure, Payload, Request, RunClock
from tests.loadgen.builders import settings
from tests.loadgen.virtual_time import run_virtual

WHOLE = Share()
Serve = Callable[["Memory", Record], Any]


class Memory:
    """A target without a network: `serve` says what a request meets."""

    def __init__(self, clock: RunClock, serve: Serve) -> None:
        self.clock = clock
        self._serve = serve
        self.prompts: list[Any] = []
        self.under_way = 0
        self.most_under_way = 0

    async def connect(self) -> None: ...

    def prepare(self, request: Request) -> Payload:
        self.prompts.append(request.prompt)
        return Payload(b"x")

    async def send(self, payload: Payload, record: Record, answer: Answer) -> None:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await self._serve(self, record)
            answer.ids.extend(range(1000, 1000 + len(record.token_times)))
        finally:
            self.under_way -= 1

    async def close(self) -> None: ...


def stream(first_s: float, gap_s: float) -> Serve:
    async def serve(memory: Memory, record: Record) -> None:
        await asyncio.sleep(first_s)
        for number in range(record.asked_output):
            if number:
                await asyncio.sleep(gap_s)
            record.token_times.append(memory.clock())
        record.finish_reason = "length"

    return serve


def drive(
    wanted: Settings, serve: Serve, *, share: Share = WHOLE, stop_after: float | None = None
) -> tuple[list[Record], Memory, float]:
    """All records of a run in virtual time, its target, and how long it took."""

    async def main() -> tuple[list[Record], Memory, float]:
        loop = asyncio.get_running_loop()
        clock = RunClock(loop.time)
        memory = Memory(clock, serve)
        records: list[Record] = []
        driver = Driver(memory, SyntheticWorkload(wanted), wanted, clock, records.append)
        if wanted.load.concurrency is not None:
            work = driver.closed_loop(
                driver.prepare(numbers_of(wanted.load, share), 100),
                share.concurrency(wanted.load.concurrency),
            )
        else:
            mine = [one for one in enumerate(open_times(wanted.load)) if one[0] % share.of == share.process]
            work = driver.open_loop(driver.prepare(number for number, _ in mine), (time for _, time in mine))
        running = asyncio.ensure_future(work)
        if stop_after is not None:
            await asyncio.sleep(stop_after)
            running.cancel()
            await driver.stop()
        else:
            await running
        return records, memory, loop.time()

    return run_virtual(main())


def by_time(records: list[Record]) -> list[Record]:
    return sorted(records, key=lambda record: record.scheduled)


def test_an_open_loop_sends_on_time_whatever_the_server_does() -> None:
    wanted = settings(rate=50.0, num_requests=500)
    records, memory, _ = drive(wanted, stream(30.0, 0.5))
    records = by_time(records)
    assert [record.scheduled for record in records] == list(open_times(wanted.load))
    assert all(record.sent == pytest.approx(record.scheduled, abs=1e-6) for record in records)
    assert memory.most_under_way == 500  # no request waited for another
    assert {record.outcome for record in records} == {Outcome.OK}


def test_a_stall_is_felt_by_everybody_who_came_while_it_lasted() -> None:
    """Coordinated omission: a server that stands still for 2 s makes those who come meanwhile wait; a client
    that waits with it would have sent one slow request."""

    async def serve(memory: Memory, record: Record) -> None:
        now = memory.clock()
        await asyncio.sleep((max(now, 7.0) if 5.0 <= now < 7.0 else now) - now + 0.010)
        record.token_times.append(memory.clock())

    records, _, _ = drive(settings(rate=100.0, num_requests=2000, prompts={"output_len": "1"}), serve)
    waited = sorted(record.token_times[0] - record.scheduled for record in records)
    slow = [one for one in waited if one > 0.1]
    came = sum(5.0 <= record.scheduled < 6.9 for record in records)
    assert len(slow) == came > 150
    assert waited[-1] == pytest.approx(2.01, abs=0.05)
    assert waited[int(0.95 * len(waited))] > 0.5  # 10 % of all were in it; evenly spread over 2 s


def test_many_processes_share_one_load() -> None:
    wanted = settings(rate=20.0, num_requests=101)
    whole = by_time(drive(wanted, stream(0.1, 0.01))[0])
    parts = [drive(wanted, stream(0.1, 0.01), share=Share(number, 3))[0] for number in range(3)]
    together = by_time(list(itertools.chain(*parts)))
    assert [(r.conversation, r.scheduled, r.asked_input) for r in together] == [
        (r.conversation, r.scheduled, r.asked_input) for r in whole
    ]


def test_a_closed_loop_keeps_its_users_busy() -> None:
    wanted = settings(concurrency=7, num_requests=50, prompts={"output_len": "3"})
    records, memory, took = drive(wanted, stream(1.0, 0.5))
    assert memory.most_under_way == 7
    assert sorted(record.conversation for record in records) == list(range(50))
    assert took == pytest.approx(8 * 2.0, abs=0.01)  # 50 requests of 2 s by 7 users


def test_a_closed_loop_ends_with_its_duration() -> None:
    wanted = settings(concurrency=2, duration_s=9.0, prompts={"output_len": "1"})
    records, _, took = drive(wanted, stream(2.0, 0.0))
    assert len(records) == 10
    assert took == pytest.approx(10.0, abs=0.01)  # what was under way may end


def test_shares_of_a_closed_loop_make_the_whole() -> None:
    assert [Share(number, 4).concurrency(10) for number in range(4)] == [3, 3, 2, 2]


def test_a_server_that_hangs_is_left_in_time() -> None:
    wanted = settings(rate=10.0, num_requests=20, target={"timeout_s": 5.0})

    async def serve(memory: Memory, record: Record) -> None:
        await asyncio.sleep(0.01 if record.conversation % 2 else 3600)
        record.token_times.append(memory.clock())

    records, _, took = drive(wanted, serve)
    assert [record.outcome for record in sorted(records, key=lambda r: r.conversation)] == [
        Outcome.TIMEOUT,
        Outcome.OK,
    ] * 10
    assert took < max(record.scheduled for record in records) + 5.1


def test_a_failure_is_one_record_and_no_end() -> None:
    async def serve(memory: Memory, record: Record) -> None:
        if record.conversation == 3:
            raise Failure("HTTP_503", "full")
        record.token_times.append(memory.clock())

    records, _, _ = drive(settings(rate=10.0, num_requests=10), serve)
    failed = [record for record in records if record.outcome != Outcome.OK]
    assert [(record.conversation, record.outcome, record.detail) for record in failed] == [
        (3, "HTTP_503", "full")
    ]
    assert len(records) == 10


def test_a_fault_of_ours_ends_the_run() -> None:
    async def serve(memory: Memory, record: Record) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        drive(settings(rate=10.0, num_requests=10), serve)


def test_some_clients_leave_early() -> None:
    wanted = settings(rate=20.0, num_requests=400, cancel_share=0.25, cancel_after="uniform:0.2-0.6")
    records, memory, _ = drive(wanted, stream(0.1, 1.0))
    left = [record for record in records if record.outcome == Outcome.CANCELLED]
    assert len(left) == pytest.approx(100, abs=30)
    for record in left:
        assert record.ended is not None
        assert record.sent is not None
        assert 0.2 <= record.ended - record.sent <= 0.6
    assert memory.under_way == 0


def test_more_than_it_may_have_in_flight_is_counted_and_not_sent() -> None:
    wanted = settings(rate=100.0, num_requests=100, generator={"max_in_flight": 30})
    records, memory, _ = drive(wanted, stream(60.0, 0.0))
    assert memory.most_under_way == 30
    refused = [record for record in records if record.outcome == Outcome.NOT_SENT]
    assert len(refused) == 70
    assert all(record.sent is None for record in refused)


def test_a_conversation_grows_and_waits_for_its_user() -> None:
    wanted = settings(
        rate=0.1,
        num_requests=2,
        prompts={"turns": "3", "think_time": "2.5", "input_len": "10", "output_len": "4"},
    )
    records, memory, _ = drive(wanted, stream(0.5, 0.1))
    turns = sorted((r for r in records if r.conversation == 0), key=lambda r: r.turn)
    assert [record.turn for record in turns] == [0, 1, 2]
    assert [record.asked_input for record in turns] == [10, 24, 38]
    for before, after in itertools.pairwise(turns):
        assert before.ended is not None
        assert after.scheduled == pytest.approx(before.ended + 2.5, abs=1e-6)
        assert after.sent == pytest.approx(after.scheduled, abs=1e-6)
    first = next(prompt for prompt in memory.prompts if len(prompt) == 10)
    second = next(prompt for prompt in memory.prompts if len(prompt) == 24)
    assert second[:10] == first
    assert second[10:14] == [1000, 1001, 1002, 1003]  # the server's own answer is in the next prompt


def test_a_run_that_is_stopped_leaves_nothing() -> None:
    records, memory, took = drive(settings(rate=10.0, num_requests=1000), stream(2.0, 0.0), stop_after=5.0)
    assert took == pytest.approx(5.0, abs=0.01)
    assert memory.under_way == 0
    stopped = [record for record in records if record.outcome == Outcome.STOPPED]
    assert 5 < len(stopped) < 40
    assert all(r.scheduled >= 3.0 - 0.4 for r in stopped)


def test_prompts_are_made_before_the_clock_starts() -> None:
    wanted = settings(num_requests=5)

    async def main() -> Iterator[Any]:
        memory = Memory(RunClock(), stream(0, 0))
        driver = Driver(memory, SyntheticWorkload(wanted), wanted, RunClock(), lambda _: None)
        prepared = driver.prepare(range(5), most=3)
        assert len(memory.prompts) == 3
        assert [one.conversation.number for one in prepared] == [0, 1, 2, 3, 4]
        assert len(memory.prompts) == 5
        return prepared

    run_virtual(main())
