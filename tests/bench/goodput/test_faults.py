"""Faults of engines: what counts as lost, as wrong and as back, and a cluster that bears one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from bench.goodput.faults import Answer, Fault, compare, parse_faults, recovery
from bench.goodput.runs import Limits
from loadgen.common.record import Record

LIMITS = Limits(500, 12, 0.9)


def test_faults_are_parsed() -> None:
    assert parse_faults("kill:decode,stop:both") == [Fault("kill", "decode"), Fault("stop", "both")]
    for text in ("kill", "halt:decode", "kill:router"):
        with pytest.raises(ValueError, match="is not SIGNAL:ROLE of kill, stop and prefill, decode, both"):
            parse_faults(text)


def test_lost_wrong_and_again() -> None:
    first = [Answer([number, 2]) for number in range(4)]
    other = [Answer([0, 2], 1), Answer([1, 3], 2), Answer([2], 2, "UNAVAILABLE: gone"), Answer([3, 2], 1)]
    found = compare(first, other)
    assert (found["requests"], found["lost"], found["wrong"], found["again"]) == (4, 1, 1, 2)
    assert found["error"] == "UNAVAILABLE: gone"


def records(late: Collection[int]) -> list[Record]:
    """Ten requests a second; those that are due in the seconds `late` have 40 ms a token."""
    made = []
    for number in range(600):
        due = number / 10
        each_s = (40.0 if int(due) in late else 10.0) / 1e3
        times = [due + 0.1 + token * each_s for token in range(11)]
        made.append(
            Record(number, 0, "", due, 1, 11, sent=due, token_times=times, ended=times[-1], outcome="OK")
        )
    return made


def test_the_time_until_attainment_is_back() -> None:
    assert recovery(records(()), LIMITS, 20.0) == (1.0, 0.0)
    assert recovery(records(range(20, 27)), LIMITS, 20.0) == (1.0, 7.0)
    # One good window between two bad ones is not enough.
    assert recovery(records({20, 21, 28, 29, 30, 31, 32}), LIMITS, 20.0) == (1.0, 13.0)
    assert recovery(records(range(20, 60)), LIMITS, 20.0) == (1.0, None)


def test_a_fault_without_a_time_before_it() -> None:
    with pytest.raises(LookupError, match=r"9\.0 s after the first arrival"):
        recovery(records(()), LIMITS, 9.0)


@pytest.mark.slow
def test_an_engine_that_dies_loses_no_request(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    command = [
        sys.executable, "-m", "bench.goodput", "faults", "--arm", "2both --numerics exact", "--rate", "4",
        "--tpot", "500", "--workload", "tiny", "--faults", "kill:both", "--compare", "12", "--seconds", "0",
        "--shape", "tiny", "--dtype", "fp32", "--device", "cpu", "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (found,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert (found["requests"], found["lost"], found["wrong"]) == (12, 0, 0)
    assert found["worker_back_s"] > 0
