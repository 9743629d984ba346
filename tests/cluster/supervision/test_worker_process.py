"""A worker's process: how often its devices waited in vain for one another is counted past its end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from services.cluster.supervision.report import Phase
from services.cluster.supervision.worker_process import WorkerProcess
from services.common.config.worker import WorkerConfig
from tests.support.waiting import until

# Notes its configuration, and ends with an error before it serves.
ENDS = """
import json, sys
config = json.loads(sys.stdin.readline())
with open(sys.argv[1], "a") as log:
    log.write(json.dumps(config) + "\\n")
print(json.dumps({"error": json.loads(sys.argv[2])}), flush=True)
"""
# The same behind the line by which it serves, so that the error is how it ended.
SERVES_FIRST = ENDS.replace(
    "print(", """print('{"ready": {"grpc": "127.0.0.1:1"}}', flush=True)\nprint(""", 1
)


async def starts(tmp_path: Path, program: str, cause: str | None) -> list[tuple[int, int]]:
    """Starts a worker three times, which ends with an error of this cause → what it was told of restarts and
    of exchange timeouts."""
    error = {"kind": "unavailable", "message": "ended"} | ({} if cause is None else {"cause": cause})
    log = tmp_path / "log"
    process = WorkerProcess((sys.executable, "-c", program, str(log), json.dumps(error)))
    for number in range(1, 4):
        process.start(WorkerConfig(name="w", role="both", model="m"), number, 20.0)
        await until(lambda: process.report().phase is Phase.ENDED, 30)
        failure = process.report().failure
        assert failure is not None
        assert failure.message.endswith("ended")
        await process.stop(1.0)
    told = [json.loads(line) for line in log.read_text().splitlines()]
    return [(one["restarts"], one["exchange_timeouts"]) for one in told]


@pytest.mark.parametrize("program", [ENDS, SERVES_FIRST], ids=["at its start", "while it serves"])
@pytest.mark.parametrize(
    ("cause", "counts"),
    [("exchange", [0, 1, 2]), ("link", [0, 0, 0]), ("of a later release", [0, 0, 0]), (None, [0, 0, 0])],
)
async def test_exchange_timeouts_are_counted_past_the_end_of_a_worker(
    tmp_path: Path, program: str, cause: str | None, counts: list[int]
) -> None:
    assert await starts(tmp_path, program, cause) == list(enumerate(counts))
