"""The load generator against a router that answers at known times."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator

import grpc.aio
import numpy as np
import pytest

from baton.v1 import router_pb2, router_pb2_grpc, types_pb2
from loadgen.arrivals import poisson
from loadgen.cli import main
from loadgen.client import Record
from loadgen.prompts import random_token_ids
from loadgen.report import Report


def test_arrivals_are_poisson_absolute_and_seeded() -> None:
    times = list(poisson(rate=20.0, count=20_000, seed=3))
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert times == list(poisson(20.0, 20_000, 3)) != list(poisson(20.0, 20_000, 4))
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.03)  # as large as the mean: exponential


def test_prompts_have_their_length_and_stay_in_the_vocabulary() -> None:
    prompts = list(random_token_ids(length=7, count=50, vocab_size=11, seed=1))
    assert {len(prompt) for prompt in prompts} == {7}
    assert {token for prompt in prompts for token in prompt} == set(range(11))
    assert prompts == list(random_token_ids(7, 50, 11, 1))


def test_report_counts_from_the_scheduled_send() -> None:
    records = [
        Record(scheduled=0.0, sent=0.5, token_times=[1.0, 1.1, 1.3], ended=1.3),
        Record(scheduled=1.0, sent=1.0, ended=2.0, error="UNAVAILABLE"),
    ]
    report = Report.of(records, requested_rate=1.0)
    assert report.ttft_ms.p50 == pytest.approx(1000)
    assert report.tpot_ms.p50 == pytest.approx(150)
    assert report.itl_ms.p50 == pytest.approx(150)
    assert report.send_lag_ms.p99 == pytest.approx(495)
    assert report.failed == {"UNAVAILABLE": 1}
    assert report.achieved_rate == pytest.approx(2.0)
    assert report.tokens_per_s == pytest.approx(1.5)


def test_a_run_without_a_token_has_no_numbers() -> None:
    report = Report.of([Record(scheduled=0.0, sent=0.0, ended=0.0, error="UNAVAILABLE")], 1.0)
    assert report.ttft_ms.p50 is None
    assert report.achieved_rate is None


class Router(router_pb2_grpc.RouterServiceServicer):
    """Refuses prompts that begin with an even id."""

    async def Generate(  # noqa: N802
        self, request: router_pb2.GenerateRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        if request.token_ids.ids[0] % 2 == 0:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        for number in range(request.max_tokens):
            await asyncio.sleep(0.001)
            yield router_pb2.GenerateResponse(first_number=number, token_ids=[number])
        yield router_pb2.GenerateResponse(finish_reason=types_pb2.FINISH_REASON_LENGTH)

    async def ListModels(  # noqa: N802
        self, request: router_pb2.ListModelsRequest, context: object
    ) -> router_pb2.ListModelsResponse:
        return router_pb2.ListModelsResponse()

    async def AuditCluster(  # noqa: N802
        self, request: router_pb2.AuditClusterRequest, context: object
    ) -> router_pb2.AuditClusterResponse:
        return router_pb2.AuditClusterResponse()

    async def GetStatus(  # noqa: N802
        self, request: router_pb2.GetStatusRequest, context: object
    ) -> router_pb2.GetStatusResponse:
        return router_pb2.GetStatusResponse()


@pytest.fixture
def door() -> Iterator[str]:
    """A router in a thread with a loop of its own, since `main` runs one too."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def serve() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        router_pb2_grpc.add_RouterServiceServicer_to_server(Router(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(serve(), loop).result(10)
    yield f"grpc://127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def test_a_run(door: str) -> None:
    command = [
        sys.executable,
        "-m",
        "loadgen",
        "run",
        door,
        "--model",
        "m",
        "--rate",
        "200",
        "--num-requests",
    ]
    done = subprocess.run(
        [*command, "40", "--output-len", "5", "--json"], capture_output=True, text=True, timeout=60
    )
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    refused = sum(prompt[0] % 2 == 0 for prompt in random_token_ids(64, 40, 256, 0))
    assert done.returncode == 1, done.stderr
    assert report["requests"] == 40
    assert report["failed"] == {"RESOURCE_EXHAUSTED": refused}
    assert report["output_tokens"] == 5 * (40 - refused)
    assert report["settings"]["rate"] == 200


@pytest.mark.parametrize(
    "flags", [["--rate", "0"], ["--rate", "nan"], ["--num-requests", "-1"], ["--input-len", "x"]]
)
def test_absurd_flags(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "grpc://127.0.0.1:1", "--model", "m", *flags])
    assert ended.value.code == 2


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("loadgen.cli.CONNECT_TIMEOUT_S", 0.2)
    assert main(["run", "grpc://127.0.0.1:1", "--model", "m"]) == 2
    assert capsys.readouterr().err == "loadgen: error: nobody answers at grpc://127.0.0.1:1\n"
