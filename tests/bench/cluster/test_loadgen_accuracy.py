"""What `bench.cluster.loadgen_accuracy limit` makes of runs: right, late on their way, wrong without a
word, INVALID."""

from __future__ import annotations

import dataclasses

import pytest

from bench.cluster import loadgen_accuracy as loadgen
from tests.loadgen.truth import Truth

RIGHT = Truth(
    protocol="http",
    rate=100.0,
    requests=800,
    valid=True,
    invalid=[],
    lag_p99_ms=1.0,
    read_lag_p99_ms=0.5,
    loop_lag_p99_ms=0.5,
    cpu_wait_p99_ms=0.1,
    cpu_share=0.2,
    output_tokens=400.0,
    errors={"ttft": {"99": 0.4}},
    own={"ttft": {"99": 0.3}},
    truth={"ttft": {"99": 20.0}},
)
LATE = dataclasses.replace(RIGHT, errors={"ttft": {"99": 4.0}})
WRONG = dataclasses.replace(LATE, own={"ttft": {"99": 3.5}})
UNKNOWN = dataclasses.replace(LATE, own={})
INVALID = dataclasses.replace(WRONG, valid=False, invalid=["the generator lagged"])


def limit_of(monkeypatch: pytest.MonkeyPatch, *runs: Truth) -> loadgen.Limit:
    """One that sees these runs, and no more."""
    coming = iter(runs)
    limit = loadgen.Limit(loadgen._parser().parse_args(["limit"]), "http", 1)
    monkeypatch.setattr(limit, "_run", lambda rate: next(coming))
    return limit


@pytest.mark.parametrize(
    ("runs", "believed", "late", "lied"),
    [
        ((RIGHT,), True, set(), set()),
        ((INVALID, RIGHT), True, set(), set()),
        ((LATE, RIGHT), True, {100.0}, set()),
        ((LATE, LATE), True, {100.0}, set()),
        ((INVALID, INVALID), False, set(), set()),
        ((WRONG, WRONG), False, set(), {100.0}),
        ((UNKNOWN, INVALID), False, set(), {100.0}),
    ],
)
def test_a_rate(
    monkeypatch: pytest.MonkeyPatch,
    runs: tuple[Truth, ...],
    believed: bool,
    late: set[float],
    lied: set[float],
) -> None:
    limit = limit_of(monkeypatch, *runs)
    assert limit.believed(100.0) is believed
    assert (limit.late, limit.lied) == (late, lied)
    assert limit.best()["requests_s"] == (100.0 if RIGHT in runs else None)


def test_the_reasons_are_those_of_the_lowest_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    far = dataclasses.replace(INVALID, invalid=["far beyond"])
    limit = limit_of(monkeypatch, far, far, INVALID, INVALID)
    assert not limit.believed(200.0)
    assert not limit.believed(125.0)
    assert limit.reasons == ["the generator lagged"]


def test_a_rate_that_is_believed_in_the_end_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = limit_of(monkeypatch, WRONG, LATE)
    assert limit.believed(100.0)
    assert limit.reasons == []
