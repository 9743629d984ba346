"""Numbers computed from records: formulas, goodput, and when a run is INVALID."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as given_settings
from hypothesis import strategies as st

from loadgen.analysis.metrics import LIMITABLE, itl_of, limitable
from loadgen.analysis.presets import PRESETS
from loadgen.analysis.slo import Judge, parse_goodput
from loadgen.analysis.summary import ReasonKind, Summary, summarize
from loadgen.commands.flags import parse_class
from loadgen.common.errors import LoadgenError
from loadgen.common.record import Outcome, Record
from loadgen.common.settings import RequestClass
from tests.loadgen.builders import record, settings

ONE = record(10.0, [0.5, 0.6, 0.8, 0.9, 1.4], sent=10.1, ended=11.5)


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("ttft", 0.5),
        ("service_ttft", 0.4),
        ("tpot", 0.225),
        ("e2el", 1.5),
        ("ntpot", 0.3),
        ("itl_mean", 0.225),
        ("itl_max", 0.5),
        ("itl_p50", 0.15),
        ("tbt10", 0.5),
    ],
)
def test_formulas(name: str, seconds: float) -> None:
    assert limitable(name).of(ONE) == pytest.approx(seconds)


def test_tokens_of_a_message_share_its_gap() -> None:
    """A message of three tokens after two single ones, then one of two; the first message has two tokens."""
    several = record(0.0, [1.0, 1.0, 1.2, 1.8, 1.8, 1.8, 2.0, 2.0])
    assert itl_of(several.token_times) == pytest.approx([0.0, 0.2, 0.2, 0.2, 0.2, 0.1, 0.1])
    assert limitable("itl_max").of(several) == pytest.approx(0.2)
    assert limitable("itl_mean").of(several) == pytest.approx(1 / 7)
    assert limitable("tpot").of(several) == pytest.approx(1 / 7)
    assert limitable("tbt10").of(several) == pytest.approx(0.6)
    assert itl_of([1.0]).tolist() == itl_of([]).tolist() == []


def test_what_one_token_has() -> None:
    one = record(1.0, [0.2])
    assert limitable("ttft").of(one) == pytest.approx(0.2)
    assert limitable("tpot").of(one) is None
    assert limitable("itl_p99").of(one) is None
    nothing = record(1.0, [], outcome="UNAVAILABLE")
    assert [name for name in LIMITABLE if limitable(name).of(nothing) is not None] == ["e2el"]


def test_vllms_syntax() -> None:
    assert parse_goodput(["ttft:300", "tpot:30.5", "e2el:5000", "itl_p99:100", "itl:25"]) == {
        "ttft": 300.0,
        "tpot": 30.5,
        "e2el": 5000.0,
        "itl_p99": 100.0,
        "itl_mean": 25.0,
    }


@pytest.mark.parametrize(
    "text", ["ttft", "ttft:", "ttft:x", "ttft:-1", "ttft:inf", "ttft:nan", "nothing:3", ":3"]
)
def test_what_is_no_limit(text: str) -> None:
    with pytest.raises(LoadgenError):
        parse_goodput([text])


def test_presets_name_metrics_that_there_are() -> None:
    for preset in PRESETS.values():
        assert {limitable(name).name for name in preset.goodput} == set(preset.goodput)
        assert preset.attainment in (0.9, 0.99)


def test_a_class_in_words() -> None:
    words = ["weight:3", "tenant:acme", "priority:-1", "temperature:0.5", "input-len:uniform:5-9", "ttft:300"]
    one = parse_class(["chat", *words])
    assert one == RequestClass(
        name="chat",
        weight=3,
        tenant="acme",
        priority=-1,
        temperature=0.5,
        input_len="uniform:5-9",
        goodput={"ttft": 300.0},
    )
    with pytest.raises(LoadgenError, match="is not a valid priority"):
        parse_class(["chat", "priority:high"])
    with pytest.raises(LoadgenError, match="no metric"):
        parse_class(["chat", "colour:5"])


@pytest.mark.parametrize(
    ("some", "good"),
    [
        (record(0.0, [0.1, 0.12]), True),
        (record(0.0, [0.11, 0.12]), False),
        (record(0.0, [0.1, 0.131]), False),
        (record(0.0, [0.1]), True),  # no TPOT: that limit is met, as vLLM has it
        (record(0.0, [0.05, 0.06], outcome="HTTP_503"), False),
        (record(0.0, [0.05, 0.06], outcome=Outcome.TIMEOUT), False),
    ],
)
def test_good(some: Record, good: bool) -> None:
    assert Judge({"default": {"ttft": 100.0, "tpot": 30.0}}).good(some) is good


def steady_run(count: int = 300, **more: Any) -> list[Record]:
    """Ten a second, each 100 ms to the first token and 10 ms to every other."""
    tokens = [0.1 + 0.01 * n for n in range(4)]
    return [record(n / 10, tokens, conversation=n, **more) for n in range(count)]


def summary_of(
    records: list[Record], processes: list[dict[str, Any]] | None = None, **wanted: Any
) -> Summary:
    wanted.setdefault("judge", {"goodput": {"ttft": 150.0}})
    return summarize(records, settings(**wanted), processes or [])


def test_a_run_summed_up() -> None:
    summary = summary_of(steady_run())
    assert summary.valid
    assert summary.quantities["ttft"].at("50") == pytest.approx(100)
    assert summary.quantities["tpot"].at("99.9") == pytest.approx(10)
    assert summary.quantities["itl"].count == 3 * summary.due
    assert summary.throughput.offered == pytest.approx(10, rel=0.01)
    assert summary.throughput.output_tokens == pytest.approx(40, rel=0.02)
    assert summary.attainment is not None
    assert summary.attainment.share.value == 1.0
    json.dumps(summary.as_dict())


def test_failures_stay_in_the_denominator() -> None:
    records = steady_run()
    for place in range(0, 300, 10):
        records[place] = record(place / 10, [], conversation=place, outcome="HTTP_503")
    summary = summary_of(records, judge={"goodput": {"ttft": 150.0}, "max_error_share": 0.2})
    assert summary.valid
    assert summary.attainment is not None
    assert summary.attainment.share.value == pytest.approx(0.9, abs=0.005)
    assert summary.quantities["ttft"].at("99") == pytest.approx(100)
    assert summary.failed == {"HTTP_503": summary.due - summary.ok}


def test_clients_that_left_are_in_neither_count() -> None:
    records = steady_run()
    for place in range(0, 300, 3):
        records[place] = record(place / 10, [0.1], conversation=place, outcome=Outcome.CANCELLED)
    summary = summary_of(records)
    assert summary.attainment is not None
    assert (summary.attainment.judged, summary.cancelled) == (
        summary.due - summary.cancelled,
        summary.cancelled,
    )
    assert summary.attainment.share.value == 1.0
    assert summary.cancelled > 50


def test_classes_are_judged_by_their_own_limits() -> None:
    classes = (RequestClass(name="strict", goodput={"ttft": 50.0}), RequestClass(name="default"))
    records = steady_run(200) + [dataclasses.replace(one, klass="strict") for one in steady_run(200)]
    records.sort(key=lambda one: one.scheduled)
    summary = summary_of(records, classes=classes)
    assert {name: one.share.value for name, one in summary.classes.items()} == {"strict": 0.0, "default": 1.0}
    assert summary.attainment is not None
    assert summary.attainment.share.value == pytest.approx(0.5, abs=0.01)


def kinds(summary: Summary) -> list[str]:
    return [reason.kind.value for reason in summary.invalid]


def test_invalid_the_generator_sent_late() -> None:
    late = [
        dataclasses.replace(one, sent=one.scheduled + (0.05 if n % 20 == 0 else 0.0))
        for n, one in enumerate(steady_run())
    ]
    assert kinds(summary_of(late)) == [ReasonKind.LAG]
    rarely = [
        dataclasses.replace(one, sent=one.scheduled + (0.05 if n == 77 else 0.0))
        for n, one in enumerate(steady_run())
    ]
    assert summary_of(rarely).valid


def test_invalid_the_event_loop_was_late() -> None:
    processes = [{"loop_lag_ms": {"p99": 1.0}}, {"loop_lag_ms": {"p99": 11.0}}]
    assert kinds(summary_of(steady_run(), processes)) == [ReasonKind.LAG]


def test_invalid_the_generator_was_throttled() -> None:
    processes: list[dict[str, Any]] = [{"throttled_ms": {"p99": 0.0}}, {"throttled_ms": {"p99": 42.0}}]
    summary = summary_of(steady_run(), processes)
    assert kinds(summary) == [ReasonKind.LAG]
    assert "a CPU limit took 42.0 ms of each tenth of a second at p99 (at most 5)" in summary.invalid[0].text
    assert summary.generator["throttled_p99_ms"] == 42.0
    assert summary_of(steady_run(), processes, judge={"max_lag_ms": 50.0}).valid


def test_invalid_the_generator_read_late() -> None:
    """One token in fifty was read late, which invalidates the run; one in a thousand does not."""
    late = [
        dataclasses.replace(one, first_late=0.004 if n % 25 == 0 else 0.0001, last_late=0.0001)
        for n, one in enumerate(steady_run())
    ]
    summary = summary_of(late)
    assert kinds(summary) == [ReasonKind.LAG]
    assert "tokens were read 4.0 ms late" in summary.invalid[0].text
    assert summary_of(late, judge={"max_read_lag_ms": 4.5}).valid
    rarely = [
        dataclasses.replace(one, first_late=0.004 if n == 77 else 0.0001, last_late=0.0001)
        for n, one in enumerate(steady_run())
    ]
    assert summary_of(rarely).valid
    assert summary_of(steady_run()).quantities["read_lag"].count == 0


def test_invalid_not_all_were_sent() -> None:
    records = steady_run()
    records[200] = dataclasses.replace(records[200], sent=None, token_times=[], outcome=Outcome.NOT_SENT)
    assert kinds(summary_of(records)) == [ReasonKind.NOT_SENT]


def test_invalid_the_backlog_grows() -> None:
    records = [record(n / 10, [0.1 + n / 20, 0.2 + n / 20], conversation=n) for n in range(400)]
    summary = summary_of(records)
    assert kinds(summary) == [ReasonKind.WINDOW]
    assert "past its capacity" in summary.invalid[0].text


def test_invalid_too_many_failed() -> None:
    records = steady_run()
    for place in range(0, 300, 10):
        records[place] = record(place / 10, [], conversation=place, outcome=Outcome.RESET)
    assert kinds(summary_of(records)) == [ReasonKind.ERRORS]


def test_invalid_nothing_came() -> None:
    records = [record(n / 10, [], conversation=n, outcome="UNAVAILABLE") for n in range(50)]
    assert kinds(summary_of(records)) == [ReasonKind.NOTHING, ReasonKind.ERRORS]
    assert not summary_of([]).valid


@pytest.mark.parametrize(
    "wrong",
    [{"asked_output": 5}, {"usage_output": 3}, {"usage_input": 5}],
)
def test_invalid_counts_do_not_agree(wrong: dict[str, int]) -> None:
    assert kinds(summary_of(steady_run(**wrong))) == [ReasonKind.MISMATCH]
    right = {"asked_output": 4, "usage_output": 4, "usage_input": 4}
    assert summary_of(steady_run(**right)).valid


def test_invalid_output_began_before_what_was_counted() -> None:
    summary = summary_of([*steady_run(299), record(29.9, conversation=299, uncounted="thoughts")])
    assert kinds(summary) == [ReasonKind.UNCOUNTED]
    assert summary.uncounted == {"thoughts": 1}
    assert "1 with 'thoughts'" in summary.invalid[0].text


@pytest.mark.parametrize(
    ("cached", "prompts", "cautions"),
    [
        (None, {}, 0),
        (0, {}, 0),
        (1, {}, 0),
        (3, {}, 1),
        (3, {"file": "prompts.jsonl"}, 1),
        (3, {"prefix_len": 3}, 0),
        (3, {"turns": "3"}, 0),
        (3, {"dataset": "document"}, 0),
    ],
)
def test_prompts_from_a_cache(cached: int | None, prompts: dict[str, Any], cautions: int) -> None:
    summary = summary_of(steady_run(usage_input=4, usage_cached=cached), prompts=prompts)
    assert summary.valid
    assert summary.cached_share == (None if cached is None else cached / 4)
    assert sum("prefix cache" in caution for caution in summary.cautions) == cautions


def test_outputs_that_may_end_by_themselves_may_be_short() -> None:
    assert summary_of(steady_run(asked_output=50, exact_output=False)).valid


def test_a_run_that_was_stopped_counts_what_ended() -> None:
    records = steady_run()
    records[-10:] = [dataclasses.replace(one, outcome=Outcome.STOPPED) for one in records[-10:]]
    summary = summarize(records, settings(), [], stopped=True)
    assert summary.due <= 290
    assert "stopped" in summary.cautions[0]


def test_too_short_to_tell_is_a_caution() -> None:
    summary = summary_of(steady_run(12))
    assert summary.valid
    assert summary.cautions == ["too short to tell whether the server was in a steady state"]


def test_percentiles_are_numpys_and_within_their_intervals() -> None:
    random = np.random.default_rng(3)
    waits = random.lognormal(-2, 0.5, 2000)
    records = [record(n / 20, [wait, wait + 0.01], conversation=n) for n, wait in enumerate(waits)]
    summary = summary_of(records)
    since = summary.window.since
    inside = np.array([wait for n, wait in enumerate(waits) if n / 20 >= since])
    for percentile, estimate in summary.quantities["ttft"].percentiles.items():
        assert estimate.value == pytest.approx(float(np.percentile(inside, float(percentile))) * 1e3)
        assert estimate.low is not None
        assert estimate.high is not None
        assert estimate.low <= estimate.value <= estimate.high
    truth = float(np.exp(-2) * 1e3)
    median = summary.quantities["ttft"].percentiles["50"]
    assert median.low is not None
    assert median.high is not None
    assert median.low <= truth <= median.high


@given_settings(max_examples=40)
@given(
    st.builds(
        Record,
        conversation=st.integers(0, 2**40),
        turn=st.integers(0, 9),
        klass=st.text(max_size=5),
        scheduled=st.floats(0, 1e5).map(lambda value: round(value, 6)),
        asked_input=st.none() | st.integers(0, 9999),
        asked_output=st.integers(1, 9999),
        token_times=st.lists(st.floats(0, 1e5).map(lambda value: round(value, 6)), max_size=5),
        outcome=st.sampled_from([*Outcome, "HTTP_429"]).map(str),
        detail=st.text(max_size=20),
        stages=st.none() | st.dictionaries(st.sampled_from(["queue", "decode"]), st.floats(0, 10)),
    )
)
def test_a_record_is_read_as_it_was_written(one: Record) -> None:
    assert Record.from_line(one.to_line()) == one
