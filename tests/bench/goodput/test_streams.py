"""First gaps and inter-token latencies, and what an overload did, from records made by hand."""

from __future__ import annotations

import pytest

from bench.goodput.observed import stream_figures
from bench.goodput.runs import Limits, judge_overload
from loadgen.common.record import Record


def record(due: float, times: list[float], outcome: str = "OK", took_s: float = 0.0) -> Record:
    ended = times[-1] if times else due + took_s
    return Record(
        0, 0, "default", due, 16, len(times), sent=due, token_times=times, ended=ended, outcome=outcome
    )


def test_the_first_gap_is_told_apart() -> None:
    records = [record(0.0, [0.1, 0.1 + gap, 0.11 + gap, 0.12 + gap]) for gap in (0.02, 0.03, 0.04)]
    records.append(record(0.0, [0.1, 5.0, 9.0], "TIMEOUT"))
    found = stream_figures(records)
    assert found is not None
    assert found.step == pytest.approx(10)
    assert found.first_gap_p50 == pytest.approx(30)
    assert found.itl_p999 == pytest.approx(10)
    assert found.first_over_two_p99 == pytest.approx(19.8)
    assert "3.00 and 3.98 steps, p99 over two steps of its time +19.8 ms; ITL p99" in str(found)
    said = "ITL p99 and p99.9 10.0 and 10.0 ms, 1.00 and 1.00 steps; 0.0% of tokens with the one before"
    assert str(found).endswith(said)
    records.append(record(0.0, [0.1, 0.13, 0.14, 0.1401, 0.15]))
    found = stream_figures(records)
    assert found is not None
    assert found.together == pytest.approx(1 / 9)
    assert stream_figures(records[3:4]) is None


def test_a_step_is_the_gap_between_messages_however_many_tokens_they_have() -> None:
    """Steps with drafts give three tokens a message, of which two come with the one before."""
    message = [0.13 + 0.006 * (number // 3) for number in range(30)]
    found = stream_figures([record(0.0, [0.1, 0.12, *message]), record(0.0, [0.1, 0.12, 0.12])])
    assert found is not None
    assert found.step == pytest.approx(6)
    assert found.first_over_two_p99 == pytest.approx(20 - 12)
    assert found.together == pytest.approx(21 / 31)
    assert stream_figures([record(0.0, [0.1, 0.12, 0.12])]) is None


def test_what_the_router_saw_of_first_gaps_is_shown_where_it_told() -> None:
    records = [record(0.0, [0.1, 0.12, 0.13]) for _ in range(3)]
    for one, (transfer, first_step) in zip(
        records, ((0.001, 0.01), (0.002, 0.012), (0.003, 0.02)), strict=True
    ):
        one.stages = {"transfer": transfer, "first_step": first_step, "decode": 1.0}
    del records[2].stages["first_step"]  # type: ignore[union-attr]
    found = stream_figures(records)
    assert found is not None
    assert list(found.gap_parts) == ["transfer", "first_step"]
    assert found.gap_parts["transfer"] == pytest.approx((2, 2.98))
    assert found.gap_parts["first_step"] == pytest.approx((11, 11.98))
    assert str(found).endswith(
        "; of the first gap at the router, ms: transfer 2.0 and 3.0, first_step 11.0 and 12.0"
    )


def test_an_overload_ends_when_latencies_are_as_before() -> None:
    """Ten requests a second, twice that from 10 to 20; half of these are refused, one of them late; those of
    10 to 23 take twice as long a token."""

    def times(due: float) -> list[float]:
        each = 0.02 if 10 <= due < 23 else 0.01
        return [due + 0.1 + each * number for number in range(4)]

    records = [record(number / 10, times(number / 10)) for number in range(300)]
    refused = [
        record(10 + number / 10, [], "HTTP_429", 0.03 if number == 7 else 0.002) for number in range(100)
    ]
    found = judge_overload([*records, *refused], Limits(200, 15, 0.9), 10.0, 20.0)
    assert (found.before, found.during) == (10.0, 0.0)
    assert found.normal_after_s == 3.0
    assert (found.refused, found.late_refusals, found.refused_p50_ms) == (100, 1, 2.0)
    still_refused = [record(20.05 + number / 5, [], "HTTP_429", 0.002) for number in range(25)]
    found = judge_overload([*records, *refused, *still_refused], Limits(200, 15, 0.9), 10.0, 20.0)
    assert found.normal_after_s == 5.0, "a second in which a third is refused is not"
    loose = judge_overload(records, Limits(200, 30, 0.9), 10.0, 20.0)
    assert (loose.during, loose.refused, loose.refused_p99_ms) == (10.0, 0, None)


def test_a_queue_that_there_would_be_without_the_overload_is_normal() -> None:
    """Fifty requests come at once three seconds after the overload, in which ten a second had their first
    tokens: they wait for five seconds in any case, and those behind them until that queue is empty."""

    def served(due: float, wait: float) -> Record:
        return record(due, [due + 0.1 + wait + 0.01 * number for number in range(4)])

    before = [served(number / 5, 0.0) for number in range(50)]
    during = [served(10 + number / 10, 0.4) for number in range(100)]
    burst = [served(23.0, number / 10) for number in range(50)]
    after = [served(20 + number / 5, 0.4 if number < 10 else 0.0) for number in range(15)]
    behind = [served(23.1 + number / 5, max(0.0, 4.9 - number / 10)) for number in range(70)]
    records = [*before, *during, *after, *burst, *behind]
    limits = Limits(8000, 15, 0.9)
    assert judge_overload(records, limits, 10.0, 20.0).normal_after_s == 2.0
    late = [*before, *during, *[served(one.scheduled, 9.0) for one in after], *burst, *behind]
    assert judge_overload(late, limits, 10.0, 20.0).normal_after_s == 3.0
