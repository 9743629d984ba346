"""Recorded loads: read right, sent at their times, and as much shared as was shared."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.cli import main
from loadgen.common.errors import LoadgenError
from loadgen.common.settings import TraceFormat, TraceSettings
from loadgen.generator.plan import open_times
from loadgen.load.sources import recorded_times, workload_of
from loadgen.load.trace_facts import facts_of
from loadgen.load.traces import Entry, Trace, TraceWorkload, read_trace, scaled, sniff, write_mooncake
from tests.loadgen import builders

MOONCAKE = [
    {"timestamp": 1000, "input_length": 1200, "output_length": 5, "hash_ids": [1, 2, 3]},
    {"timestamp": 1500, "input_length": 1100, "output_length": 6, "hash_ids": [1, 2, 4]},
    {"timestamp": 3500, "input_length": 700, "output_length": 7, "hash_ids": [9, 2]},
    {"timestamp": 4000, "input_length": 2000, "output_length": 8},
]


@pytest.fixture
def mooncake(tmp_path: Path) -> str:
    file = tmp_path / "mooncake.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in MOONCAKE))
    return str(file)


def contents(file: str, scale: float = 1.0) -> list[list[int]]:
    trace = {"file": file, "format": sniff(file), "length_scale": scale}
    workload = workload_of(builders.settings(trace=trace, prompts={"vocab_size": 50_000}))
    found = []
    for number in range(len(MOONCAKE)):
        one = workload.conversation(number)
        assert one is not None
        content = one.turns[0].content
        assert isinstance(content, list)
        found.append(content)
    return found


def common(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def test_mooncakes_prefixes_are_shared_as_recorded(mooncake: str) -> None:
    first, second, third, fourth = contents(mooncake)
    assert [len(one) for one in (first, second, third, fourth)] == [1200, 1100, 700, 2000]
    assert common(first, second) == 1024
    assert common(first, third) == 0
    # The same block, elsewhere.
    assert third[512:] == first[512 : 512 + 188]
    assert common(first, fourth) == 0


def test_a_scaled_trace_shares_as_much(mooncake: str) -> None:
    first, second, third, _ = contents(mooncake, scale=0.125)
    assert [len(one) for one in (first, second, third)] == [150, 138, 88]
    assert common(first, second) == 128
    assert third[64:] == first[64 : 64 + 24]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(1, 512)),
        min_size=2,
        max_size=8,
    )
)
def test_sharing_pattern(requests: list[tuple[list[int], int]]) -> None:
    """Two prompts have as long a prefix in common as their ids say, to the block."""
    entries = tuple(Entry(0.0, 512 * (len(blocks) - 1) + rest, 1, tuple(blocks)) for blocks, rest in requests)
    workload = TraceWorkload(builders.settings(prompts={"vocab_size": 100_000}), Trace(entries, 0))
    prompts = []
    for number in range(len(entries)):
        one = workload.conversation(number)
        assert one is not None
        prompts.append(one.turns[0].content)
    for a, first in zip(entries, prompts, strict=True):
        for b, second in zip(entries, prompts, strict=True):
            assert isinstance(first, list)
            assert isinstance(second, list)
            shared = common(list(a.blocks), list(b.blocks))
            assert common(first, second) == min(512 * shared, len(first), len(second))


def test_times_are_the_recorded_ones(mooncake: str) -> None:
    for speed in (1.0, 4.0):
        wanted = builders.settings(trace={"file": mooncake, "format": "mooncake", "speed": speed})
        times = list(open_times(wanted.load, recorded_times(wanted)))
        assert times == pytest.approx([0.0, 0.5 / speed, 2.5 / speed, 3.0 / speed])
    cut = builders.settings(trace={"file": mooncake, "format": "mooncake"}, duration_s=2.6, num_requests=100)
    assert list(open_times(cut.load, recorded_times(cut))) == [0.0, 0.5, 2.5]


def test_azure(tmp_path: Path) -> None:
    file = tmp_path / "azure.csv"
    begin = datetime(2023, 11, 16, 18, 15, 46)
    gaps = np.random.default_rng(1).exponential(0.3, 200).cumsum()
    rows = [f"{begin + timedelta(seconds=round(gap, 6))}1,{100 + n},{n + 1}" for n, gap in enumerate(gaps)]
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    assert sniff(str(file)) == "azure"
    trace = read_trace(str(file), "azure")
    assert [entry.at for entry in trace.entries] == pytest.approx((gaps - gaps[0]).tolist(), abs=1e-5)
    assert (trace.entries[5].input_tokens, trace.entries[5].output_tokens) == (105, 6)


def test_burstgpt(tmp_path: Path) -> None:
    file = tmp_path / "burst.csv"
    file.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45.5,ChatGPT,1087,0,1087,API log\n"
        "118,GPT-4,417,276,693,API log\n"
    )
    assert sniff(str(file)) == "burstgpt"
    trace = read_trace(str(file), "burstgpt")
    assert trace.skipped == 1
    assert trace.entries == (Entry(0.0, 472, 18), Entry(113.0, 417, 276))


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("", "no trace"),
        ("hello\n", "no trace"),
        ('{"input_length": 3}\n', "entry 1: has no 'timestamp'"),
        ('{"timestamp": 1, "input_length": 3, "output_length": 1}\nnonsense', "entry 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "entry 1"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, reported: str) -> None:
    file = tmp_path / "bad"
    file.write_text(text)
    with pytest.raises(LoadgenError, match=reported):
        read_trace(str(file), sniff(str(file)))


def test_facts(mooncake: str) -> None:
    facts = facts_of(read_trace(mooncake, "mooncake"))
    assert (facts.requests, facts.seconds) == (4, 3.0)
    assert facts.mean_rate == pytest.approx(4 / 3)
    assert facts.input_tokens["max"] == 2000
    assert facts.shared_prefix == pytest.approx(1024 / 5000)
    assert sum(facts.rates) * 3.0 / 60 == pytest.approx(4)


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0])
def test_burstiness_is_read_back(burstiness: float) -> None:
    times = list(open_times(builders.settings(rate=10.0, num_requests=20_000, burstiness=burstiness).load))
    facts = facts_of(Trace(tuple(Entry(time, 1, 1) for time in times), 0))
    assert facts.burstiness == pytest.approx(burstiness, rel=0.1)


def test_the_command(mooncake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    converted = tmp_path / "half.jsonl"
    assert main(["trace", mooncake, "--json", "--speed", "2", "--convert", str(converted)]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert (reported["format"], reported["requests"], reported["seconds"]) == ("mooncake", 4, 1.5)
    kind: TraceFormat = "mooncake"
    half = scaled(read_trace(mooncake, kind), TraceSettings(file=mooncake, format=kind, speed=2.0))
    assert read_trace(str(converted), kind).entries == half.entries
    assert main(["trace", mooncake]) == 0
    assert "4 requests in 3.00 s" in capsys.readouterr().out
    assert main(["trace", str(tmp_path / "none")]) == 2


def test_writing_and_reading(tmp_path: Path) -> None:
    trace = Trace((Entry(0.0, 10, 2, (1, 2)), Entry(0.25, 5, 1)), 0)
    file = tmp_path / "out.jsonl"
    write_mooncake(trace, str(file))
    assert read_trace(str(file), "mooncake") == trace
