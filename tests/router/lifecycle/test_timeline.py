"""The times at which a request reached each stage, to the nanosecond."""

from __future__ import annotations

import pytest

from baton.v1.router_pb2 import Stage
from services.router.lifecycle import timeline
from services.router.lifecycle.timeline import RequestTimeline
from tests.router.lifecycle.scripted_router import Clock, request_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timeline, "time", clock)
    return clock


async def test_stages_and_latencies_are_seconds_between_marks(clock: Clock) -> None:
    """A stage that takes no time has ended, too."""
    times = RequestTimeline(request_of())
    for ms, stage in (
        (10, Stage.STAGE_ADMITTED),
        (30, Stage.STAGE_PREFILLING),
        (40, Stage.STAGE_FIRST_TOKEN),
        (40, Stage.STAGE_HANDED_OFF),
    ):
        clock.ms = ms
        times.mark(stage)
    clock.ms = 70
    assert times.latencies_s(2) == {"e2e": 0.07, "ttft": 0.04}, "nothing was delivered"
    times.delivered()
    clock.ms = 80
    assert times.stages_s() == {"admission": 0.01, "prefill": 0.01, "handoff": 0.0, "decode": 0.04}
    assert times.latencies_s(1) == {"e2e": 0.08, "ttft": 0.04}
    assert times.latencies_s(2) == {"e2e": 0.08, "ttft": 0.04, "tpot": 0.03}
    assert times.latencies_s(4) == {"e2e": 0.08, "ttft": 0.04, "tpot": 0.01}


async def test_the_first_stage_begins_at_the_arrival(clock: Clock) -> None:
    times = RequestTimeline(request_of())
    assert times.intervals_ns() == {"admission": (0, None)}
    clock.ms = 10
    times.mark(Stage.STAGE_ADMITTED)
    assert times.intervals_ns() == {"admission": (0, 10_000_000), "queue": (10_000_000, None)}
