"""The router's metrics, status and log lines of requests over fake workers."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from baton.v1.admin_pb2 import WORKER_STATE_READY, WORKER_STATE_UNREACHABLE, AdminServiceGetStatusRequest
from tests.router.conftest import Site, SiteMaker, ids_request, until
from tests.router.http_client import complete, http

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape(here: Site) -> Samples:
    """Every sample of /metrics without its `model` label, by name and labels."""
    async with http(here) as client:
        response = await client.get("/metrics")
    assert response.status_code == 200
    found: Samples = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = frozenset((k, v) for k, v in sample.labels.items() if k != "model")
            found[sample.name, labels] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"baton_router_{name}", frozenset(labels.items())]


async def test_counts_and_latencies_of_requests(site: SiteMaker) -> None:
    async with site() as here:
        for length in (3, 8):
            await here.generate(ids_request([1, 2, 3], length))
        async with http(here) as client:
            assert (await complete(client, max_tokens=-1)).status_code == 400
        await here.quiet()
        seen = await scrape(here)
        assert value(seen, "requests_total", outcome="length") == 2
        assert value(seen, "requests_total", outcome="invalid") == 1
        assert value(seen, "prompt_tokens_total") == 6
        assert value(seen, "output_tokens_total") == 11
        assert value(seen, "prompt_length_tokens_count") == 2
        assert value(seen, "output_length_tokens_sum") == 11
        assert value(seen, "attempts_total") == 2
        assert value(seen, "running_requests") == 0
        assert value(seen, "workers", role="decode", state="ready") == 1
        for stage in ("admission", "queue", "reserve", "prefill", "handoff", "decode"):
            assert value(seen, "stage_seconds_count", stage=stage) == 2, stage
        for latency in ("ttft", "tpot", "e2e"):
            assert value(seen, f"{latency}_seconds_count") == 2, latency
        messages = value(seen, "token_messages_total")
        assert value(seen, "itl_seconds_count") == messages - 2
        # The parts are no more than the whole.
        parts = sum(number for (name, _), number in seen.items() if name == "baton_router_stage_seconds_sum")
        assert 0 < parts <= value(seen, "e2e_seconds_sum")


async def test_requests_with_limits_by_what_they_missed(site: SiteMaker) -> None:
    async with site() as here:
        prefill, decode = (here.worker(name).behaviour for name in ("prefill-0", "decode-0"))
        await here.generate(ids_request([1], 3))
        await here.generate(ids_request([1], 3, ttft_slo_ms=60_000, tpot_slo_ms=60_000))
        prefill.prefill_s = decode.step_s = 0.05
        await here.generate(ids_request([1], 3, ttft_slo_ms=1, tpot_slo_ms=60_000))
        await here.generate(ids_request([1], 3, tpot_slo_ms=1))
        await here.generate(ids_request([1], 3, ttft_slo_ms=1, tpot_slo_ms=1))
        await here.generate(ids_request([1], 1, tpot_slo_ms=1))
        call = here.stub.Generate(ids_request([1], 100, tpot_slo_ms=1), timeout=10)
        await anext(aiter(call))
        call.cancel()
        prefill.break_prefills, prefill.break_code = 1, grpc.StatusCode.INTERNAL
        with pytest.raises(grpc.aio.AioRpcError):
            await here.generate(ids_request([1], 3, ttft_slo_ms=60_000))
        await here.quiet()
        seen = await scrape(here)
        missed = {kind: value(seen, "slo_requests_total", missed=kind) for kind in ("none", "ttft", "tpot")}
        assert missed == {"none": 2, "ttft": 1, "tpot": 1}
        assert value(seen, "slo_requests_total", missed="both") == 1
        assert value(seen, "slo_requests_total", missed="failed") == 1


async def test_failed_attempts_and_cancels(site: SiteMaker) -> None:
    async with site() as here:
        here.worker("prefill-0").behaviour.break_prefills = 1
        await here.generate(ids_request([1], 3))
        here.worker("decode-0").behaviour.step_s = 0.05
        call = here.stub.Generate(ids_request([1], 100), timeout=10)
        async for _ in call:
            call.cancel()
            break
        await here.quiet()
        seen = await scrape(here)
        assert value(seen, "failed_attempts_total", kind="unavailable") == 1
        assert value(seen, "requests_total", outcome="cancelled") == 1
        assert value(seen, "attempts_total") == 3
        assert value(seen, "cancels_total") == 2


async def test_broken_token_streams_are_counted(site: SiteMaker) -> None:
    async with site() as here:
        here.worker("decode-0").behaviour.follow_drops = 1
        await here.generate(ids_request([1], 20))
        await here.quiet()
        assert value(await scrape(here), "token_stream_breaks_total") == 1


async def test_while_it_runs(site: SiteMaker) -> None:
    async with site(slots=1) as here:
        here.worker("decode-0").behaviour.step_s = 0.05
        calls = [asyncio.create_task(here.generate(ids_request([1], 40))) for _ in range(3)]
        await until(lambda: here.router.queue.waiting == 2)
        seen = await scrape(here)
        assert value(seen, "running_requests") == 3
        assert value(seen, "waiting_requests") == 2
        assert value(seen, "claimed_slots", worker="decode-0") == 1
        assert value(seen, "reserved_tokens", worker="decode-0") == 41
        assert value(seen, "claimed_slots", worker="prefill-0") == 0
        status = await here.admin.GetStatus(AdminServiceGetStatusRequest(window_s=60), timeout=5)
        assert (status.router.running, status.router.waiting) == (3, 2)
        for call in calls:
            call.cancel()
        await here.quiet()
        seen = await scrape(here)
        assert value(seen, "claimed_slots", worker="decode-0") == 0
        assert value(seen, "reserved_tokens", worker="decode-0") == 0
        assert value(seen, "queued_prefill_tokens", worker="prefill-0") == 0
        assert value(seen, "pending_cancels") == 0


async def test_the_log_line_has_the_stage_in_which_a_request_ended(site: SiteMaker) -> None:
    stages = {"prefill_s": "prefilling", "handoff_s": "first_token", "reserve_s": "reserved"}
    with structlog.testing.capture_logs() as logged:
        async with site(slots=1) as here:
            for delay, stage in stages.items():
                if stage == "reserved":  # a worker that refused recently must reserve first
                    here.worker("decode-0").behaviour.refuse_reserves = 1
                    await here.generate(ids_request([1], 3))
                worker = here.worker("decode-0" if stage == "reserved" else "prefill-0")
                setattr(worker.behaviour, delay, 1.2)
                with pytest.raises(grpc.aio.AioRpcError):
                    await here.generate(ids_request([1], 5), timeout=0.6)
                setattr(worker.behaviour, delay, 0.0)
                await here.quiet()
            here.worker("decode-0").behaviour.step_s = 0.05
            first = asyncio.create_task(here.generate(ids_request([1], 100), timeout=2.0))
            await until(
                lambda: [one.claimed_slots for one in here.router.directory.workers if one.decodes] == [1]
            )
            second = here.generate(ids_request([1], 100), timeout=0.5)  # there is one slot
            await asyncio.gather(first, second, return_exceptions=True)
            await here.quiet()
            here.worker("decode-0").behaviour.step_s = 0.001
            await here.generate(ids_request([1], 3))
    logged_stages = [line["stage"] for line in logged if line["event"] == "request_ended"]
    assert logged_stages[:4] == ["prefilling", "first_token", "ended", "reserved"]
    assert sorted(logged_stages[4:6]) == ["admitted", "decoding"]
    assert logged_stages[6:] == ["ended"]


async def test_status_of_a_cluster(site: SiteMaker) -> None:
    async with site(decode=2) as here:
        await asyncio.gather(*(here.generate(ids_request([1, 2], 11)) for _ in range(4)))
        status = await here.admin.GetStatus(AdminServiceGetStatusRequest(window_s=60), timeout=5)
        router = status.router
        assert router.serving
        assert router.model == "fake"
        assert router.ttft.count == router.tpot.count == router.queue.count == 4
        assert 0 < router.ttft.p50_ms <= router.ttft.p99_ms
        assert router.requests_per_s * router.window_s == pytest.approx(4)
        assert router.prompt_tokens_per_s * router.window_s == pytest.approx(8)
        assert router.completion_tokens_per_s * router.window_s == pytest.approx(44)
        names = {worker.worker.identity.name: worker.state for worker in status.workers}
        assert names == dict.fromkeys(("prefill-0", "decode-0", "decode-1"), WORKER_STATE_READY)


async def test_status_of_a_cluster_that_cannot_serve(site: SiteMaker) -> None:
    async with site() as here:
        worker = next(worker for worker in here.router.directory.workers if worker.name == "decode-0")
        worker.following = False
        status = await here.admin.GetStatus(AdminServiceGetStatusRequest(), timeout=5)
        assert not status.router.serving
        states = {worker.worker.identity.name: worker.state for worker in status.workers}
        assert states == {"prefill-0": WORKER_STATE_READY, "decode-0": WORKER_STATE_UNREACHABLE}


async def test_one_log_line_a_request_and_no_content(site: SiteMaker) -> None:
    secret = "a prompt that is never shown"
    async with site() as here, http(here) as client:
        with structlog.testing.capture_logs() as logged:
            answer = await complete(client, prompt=secret, max_tokens=8)
            await here.quiet()
            with pytest.raises(grpc.aio.AioRpcError):
                await here.generate(ids_request([1], 8), timeout=0.0001)
    lines = [line for line in logged if line["event"] == "request_ended" and line["outcome"] == "length"]
    assert len(lines) == 1
    line = lines[0]
    assert (line["prompt_tokens"], line["completion_tokens"], line["attempts"]) == (len(secret), 8, 1)
    assert (line["prefill"], line["decode"], line["log_level"]) == ("prefill-0", "decode-0", "info")
    assert len(bytes.fromhex(line["request"])) == 16
    for key in (
        "queue_ms",
        "reserve_ms",
        "prefill_ms",
        "handoff_ms",
        "decode_ms",
        "ttft_ms",
        "tpot_ms",
        "e2e_ms",
    ):
        assert line[key] >= 0, key
    text = answer.json()["choices"][0]["text"]
    assert text
    for entry in logged:
        assert secret not in str(entry)
        assert text not in str(entry)
