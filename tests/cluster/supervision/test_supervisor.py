"""The supervisor's loop over fake processes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest
from structlog.testing import capture_logs

from services.cluster.supervision.report import Failure, Phase, Report
from services.cluster.supervision.supervisor import HostLostError, Supervision, UnresponsiveError
from services.common.config.cluster import ClusterConfig
from services.common.config.worker import WorkerConfig


@dataclass
class FakeProcesses:
    """WorkerProcesses whose workers serve as soon as they are started, and end on request."""

    reports: dict[str, Report] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    refusing: set[str] = field(default_factory=set)
    lost_hosts: set[str] = field(default_factory=set)
    killed: list[tuple[str, bool]] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)

    async def report(self, name: str) -> Report | None:
        if name in self.silent:
            raise UnresponsiveError
        return self.reports.get(name)

    async def start(self, config: WorkerConfig, number: int) -> None:
        if config.name in self.lost_hosts:
            raise HostLostError("Ray node 10.0.0.4: its node has died")
        self.reports[config.name] = Report(
            phase=Phase.SERVING,
            starts=number,
            address=f"{config.name}:{number}",
            incarnation=f"{number:032x}",
        )
        if config.name in self.refusing:
            self.end(config.name, kind="INVALID", how="refused")

    async def kill(self, name: str, *, actor: bool) -> None:
        self.killed.append((name, actor))
        if actor:
            del self.reports[name]
            self.silent.discard(name)
        else:
            self.end(name)

    async def stop(self, name: str, within_s: float) -> None:
        self.stopped.append(name)

    def end(self, name: str, kind: str = "UNAVAILABLE", how: str = "ended") -> None:
        ended = {
            "phase": Phase.ENDED,
            "failure": Failure(kind=kind, message=f"{name} {how}"),
            "silent_s": 0.0,
        }
        self.reports[name] = self.reports[name].model_copy(update=ended)


class Site:
    """A supervisor, its processes, and a clock that is set by the test."""

    def __init__(self, processes: FakeProcesses | None = None, *, restart_always: bool = False) -> None:
        self.now = 100.0
        self.processes = processes or FakeProcesses()
        workers = tuple(
            WorkerConfig(name=f"{role}-0", role=role, model="m") for role in ("prefill", "decode")
        )
        config = ClusterConfig(cluster_id="c", workers=workers, drain_s=1, restart_always=restart_always)
        self.supervision = Supervision(config, self.processes, lambda: self.now)

    async def turns(self, count: int = 3, step_s: float = 0.25) -> None:
        for _ in range(count):
            await self.supervision.turn()
            for _ in range(3):
                await asyncio.sleep(0)
            self.now += step_s

    def starts(self, name: str) -> int:
        return self.processes.reports[name].starts


async def test_all_are_started_and_reported() -> None:
    site = Site()
    assert not site.supervision.status().complete
    await site.turns()
    status = site.supervision.status()
    assert status.serving
    assert status.addresses == ["prefill-0:1", "decode-0:1"]


async def test_the_dead_are_started_again_and_counted() -> None:
    site = Site()
    await site.turns()
    site.processes.end("decode-0")
    await site.turns()
    status = site.supervision.status()
    assert status.addresses == ["prefill-0:1", "decode-0:2"]
    assert [report.starts for report in status.reports.values()] == [1, 2]


async def test_a_lost_actor_does_not_reset_the_count_of_starts() -> None:
    site = Site()
    await site.turns()
    del site.processes.reports["decode-0"]
    await site.turns()
    assert site.starts("decode-0") == 2


async def test_one_that_hangs_is_killed_and_started_again() -> None:
    site = Site()
    await site.turns()
    frozen = site.processes.reports["prefill-0"].model_copy(update={"silent_s": 5.1, "ran_s": 5.1})
    site.processes.reports["prefill-0"] = frozen
    await site.turns()
    assert site.processes.killed == [("prefill-0", False)]
    assert site.starts("prefill-0") == 2
    assert site.starts("decode-0") == 1


async def test_a_hang_is_logged_once_however_often_it_is_killed() -> None:
    site = Site()
    await site.turns()
    hung = site.processes.reports["prefill-0"].model_copy(update={"silent_s": 5.1, "ran_s": 5.1})
    kills: list[tuple[str, bool]] = []

    async def kill(name: str, *, actor: bool) -> None:
        kills.append((name, actor))  # it ends some turns later

    site.processes.kill = kill  # type: ignore[method-assign]
    with capture_logs() as logs:
        for hang in (1, 2):
            site.processes.reports["prefill-0"] = hung
            await site.turns(6)
            site.processes.end("prefill-0")
            await site.turns()
            assert len(kills) >= 4 * hang
            assert site.starts("prefill-0") == 1 + hang
    assert [one["event"] for one in logs].count("worker_hung") == 2


async def test_an_unresponsive_actor_keeps_its_address_until_it_is_killed() -> None:
    site = Site()
    await site.turns()
    site.processes.silent.add("decode-0")
    await site.turns(8)
    assert site.supervision.status().addresses == ["prefill-0:1", "decode-0:1"]
    assert site.processes.killed == []
    await site.turns(45)
    assert site.processes.killed == [("decode-0", True)]
    assert site.starts("decode-0") == 2


async def test_a_supervisor_that_did_not_run_blames_nobody() -> None:
    site = Site()
    await site.turns()
    for _ in range(3):  # each time it is given no processor for a minute, its first question has no answer
        site.now += 60.0
        site.processes.silent.add("decode-0")
        await site.turns(4)
        site.processes.silent.clear()
        await site.turns()
    assert site.processes.killed == []


async def test_a_worker_that_was_replaced_stays_down() -> None:
    site = Site()
    await site.turns()
    site.processes.end("decode-0", kind="CONFLICT")
    await site.turns(400)
    assert site.starts("decode-0") == 1


async def test_a_group_restarts_a_worker_that_was_replaced_after_the_longer_pauses() -> None:
    site = Site(restart_always=True)
    await site.turns()
    for starts in (2, 3):
        site.processes.end("decode-0", kind="CONFLICT")
        await site.turns(4)
        assert site.starts("decode-0") == starts - 1, "not at once: that would take the name back"
        await site.turns(4 * 6)
        assert site.starts("decode-0") == starts


async def test_a_refused_restart_is_tried_again_and_the_pauses_grow() -> None:
    site = Site()
    await site.turns()
    site.processes.refusing.add("decode-0")
    site.processes.end("decode-0")
    await site.turns(4 * 60)
    status = site.supervision.status()
    assert status.failure is not None
    assert status.failure.message == "decode-0 refused"
    # Started again at once, then 2, 4, 8, 16 s after each refusal, 30 s after later ones.
    assert site.starts("decode-0") == 6
    site.processes.refusing.clear()
    await site.turns(4 * 32)
    assert site.supervision.status().serving, "what it was refused for is gone"
    assert site.starts("decode-0") == 7


async def test_pauses_start_anew_once_it_has_served() -> None:
    site = Site()
    await site.turns()
    for starts in (3, 5):
        site.processes.refusing.add("decode-0")
        site.processes.end("decode-0")
        await site.turns(4)
        site.processes.refusing.clear()
        await site.turns(12)
        assert site.supervision.status().serving
        assert site.starts("decode-0") == starts


async def test_a_successor_adopts_what_runs() -> None:
    first = Site()
    await first.turns()
    first.processes.end("decode-0")
    await first.turns()
    second = Site(first.processes)
    assert not second.supervision.status().complete
    await second.turns()
    assert second.supervision.status() == first.supervision.status()
    assert [first.starts(name) for name in ("prefill-0", "decode-0")] == [1, 2]


async def test_a_restarted_supervisor_decides_only_after_all_have_reported() -> None:
    first = Site()
    await first.turns()
    first.processes.silent.add("decode-0")
    second = Site(first.processes)
    await second.turns(4)
    assert not second.supervision.status().complete
    first.processes.silent.clear()
    await second.turns()
    assert second.supervision.status().addresses == ["prefill-0:1", "decode-0:1"]
    assert first.processes.killed == []


async def test_a_failed_action_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site()

    async def refuse(config: WorkerConfig, number: int) -> None:
        raise ValueError("no hosts")

    monkeypatch.setattr(site.processes, "start", refuse)
    await site.turns(1)
    failure = site.supervision.status().failure
    assert failure is not None
    assert "no hosts" in failure.message


async def test_stopping_stops_all() -> None:
    site = Site()
    await site.turns()
    await site.supervision.stop(1.0)
    assert sorted(site.processes.stopped) == ["decode-0", "prefill-0"]


async def test_a_host_that_is_lost_while_a_worker_starts_there_is_no_defect_and_no_start() -> None:
    site = Site()
    await site.turns()
    site.processes.end("decode-0")
    site.processes.lost_hosts.add("decode-0")
    with capture_logs() as logs:
        await site.turns(2)
        site.processes.lost_hosts.clear()
        await site.turns(2)
    assert site.starts("decode-0") == 2
    assert site.supervision.status().failure is None
    events = [one["event"] for one in logs]
    assert events.count("worker_host_lost") >= 1
    assert not {"action_failed", "action_unanswered"} & set(events)
    assert [one["log_level"] for one in logs if one["log_level"] == "error"] == []


async def test_an_action_that_is_not_answered_is_logged_once_until_something_is() -> None:
    site = Site()
    await site.turns()
    unanswered = 0

    async def kill(name: str, *, actor: bool) -> None:
        nonlocal unanswered
        unanswered += 1
        raise UnresponsiveError("no answer within 2 s")

    site.processes.kill = kill  # type: ignore[method-assign]
    with capture_logs() as logs:
        for _ in range(2):
            site.processes.silent.add("decode-0")
            await site.turns(60)
            site.processes.silent.clear()
            await site.turns(2)
    assert unanswered > 10
    events = [one["event"] for one in logs]
    assert (events.count("worker_hung"), events.count("action_unanswered")) == (2, 2)
