"""Metrics, status and logs of one real cluster agree with its integrity reports and its client's counts."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.router.observability.metrics import FAMILIES as ROUTER_METRICS
from services.worker.front.metrics import FAMILIES as WORKER_METRICS
from tests.e2e.support.cluster import BATON, Answer, Cluster
from tests.e2e.support.prometheus_names import (
    exported,
    group_page,
    named_in_legends,
    named_in_rendered_charts,
)

PROMPTS = [(5, 9), (40, 20), (17, 33), (64, 1), (3, 12)]  # (prompt tokens, output tokens)


@pytest.fixture(scope="module")
def cluster(small: Cluster) -> Cluster:
    return small


@dataclass(frozen=True)
class Before:
    """Counters before this module asked anything: values by process and name, and the length of the log."""

    values: dict[str, dict[str, float]]
    logged: int


@pytest.fixture(scope="module")
def before(cluster: Cluster) -> Before:
    texts = asyncio.run(pages(cluster))
    return Before({name: samples(text) for name, text in texts.items()}, len(cluster.log.read_text()))


async def pages(cluster: Cluster) -> dict[str, str]:
    """The metrics of the router, and of each worker by name."""
    async with httpx.AsyncClient(timeout=10, verify=False) as client:
        status = await cluster.status(window_s=60)
        addresses = {worker.worker.identity.name: worker.metrics_address for worker in status.workers}
        urls = {"router": cluster.url} | {name: f"http://{address}" for name, address in addresses.items()}
        return {name: (await client.get(f"{url}/metrics")).text for name, url in urls.items()}


@pytest.fixture(scope="module")
def answers(cluster: Cluster, before: Before) -> list[Answer]:
    """All prompts at once, answered to their ends."""
    rng = random.Random(0)

    async def ask() -> list[Answer]:
        async with cluster.stub() as stub:
            prompts = [([rng.randrange(3, 100) for _ in range(count)], out) for count, out in PROMPTS]
            asked = (
                cluster.generate(stub, ids, max_tokens=out, temperature=0.0, ignore_eos=True)
                for ids, out in prompts
            )
            return list(await asyncio.gather(*asked))

    return asyncio.run(ask())


def samples(text: str) -> dict[str, float]:
    """Sums of a metric's samples over labels, by name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert not re.search(r"[0-9a-f]{16}", str(sample.labels)), "an id in a label"
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


async def test_metrics_agree_with_reports_and_client(
    cluster: Cluster, answers: list[Answer], before: Before
) -> None:
    texts = await pages(cluster)
    reports = await cluster.reports()
    prefill, decode = samples(texts["prefill-0"]), samples(texts["decode-0"])

    def counted(process: str, name: str) -> float:
        return samples(texts[process])[name] - before.values[process].get(name, 0.0)

    tokens_in = sum(count for count, _ in PROMPTS)
    tokens_out = sum(len(answer.token_ids) for answer in answers)
    assert counted("router", "baton_router_requests_total") == len(PROMPTS)
    assert counted("router", "baton_router_ttft_seconds_count") == len(PROMPTS)
    assert counted("router", "baton_router_prompt_tokens_total") == tokens_in
    assert counted("router", "baton_router_output_tokens_total") == tokens_out
    assert tokens_out == sum(out for _, out in PROMPTS)
    assert 0 < counted("router", "baton_router_token_messages_total") <= tokens_out
    assert 'role="prefill"' in texts["prefill-0"]
    assert 'worker="decode-0"' in texts["decode-0"]
    assert counted("prefill-0", "baton_worker_prompt_tokens_total") == tokens_in
    # Token 0 is prefill's.
    assert counted("decode-0", "baton_worker_decoded_tokens_total") == tokens_out - len(PROMPTS)
    # One needed a single token.
    assert counted("decode-0", "baton_worker_handoffs_total") == len(PROMPTS) - 1
    assert prefill["baton_worker_shipped_bytes_total"] == decode["baton_worker_received_bytes_total"] > 0
    for name, seen in (("prefill-0", prefill), ("decode-0", decode)):
        report = reports[name]
        assert seen["baton_worker_prompts_total"] == report.prompts_run
        assert seen["baton_worker_decode_steps_total"] == report.decode_steps
        assert seen["baton_worker_shipped_blocks_total"] == sum(report.blocks_shipped)
        assert seen["baton_worker_received_blocks_total"] == report.blocks_received
        assert seen["baton_worker_handoff_cached_blocks_total"] == report.blocks_resident
        assert seen["baton_worker_handoff_cached_bytes_total"] == report.bytes_resident
        assert seen["baton_worker_free_blocks"] == report.load.free_blocks == seen["baton_worker_blocks"]
        assert seen["baton_worker_staging_credits"] == seen["baton_worker_staging_pieces"] > 0
        assert seen["baton_worker_quarantined_pieces"] == seen["baton_worker_link_fallbacks_total"] == 0
        assert seen["baton_worker_restarts_total"] == 0
        assert seen["engine_process_resident_memory_bytes"] > 1 << 20
    assert decode["baton_worker_ring_poll_lag_seconds_count"] > 0
    busy = decode["baton_worker_decode_step_seconds_total"]
    assert 0 < busy == pytest.approx(reports["decode-0"].decode_busy_ns / 1e9)


def test_one_log_line_a_request(cluster: Cluster, answers: list[Answer], before: Before) -> None:
    log = cluster.log.read_text()[before.logged :]
    ended = [line for line in log.splitlines() if "event='request_ended'" in line]
    ids = {answer.last.request_id.hex() for answer in answers if answer.last is not None}
    assert {re.findall(r"request='(\w+)'", line)[0] for line in ended} == ids
    assert len(ended) == len(answers)
    for answer in answers:
        if len(answer.text) > 3:
            assert answer.text not in log


def test_status_once_and_watched(cluster: Cluster, answers: list[Answer]) -> None:
    def baton(*arguments: str, width: int = 80) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "COLUMNS": str(width)}
        return subprocess.run(
            [*BATON, *arguments], capture_output=True, text=True, timeout=30, env=environment
        )

    reported = baton("status", "--admin", cluster.admin_address, "--json")
    assert reported.returncode == 0, reported.stderr
    status = json.loads(reported.stdout)
    assert status["router"]["serving"] is True
    assert {worker["state"] for worker in status["workers"]} == {"WORKER_STATE_READY"}
    assert status["workers"][1]["worker"]["audit"]["slotStates"] == ["SLOT_STATE_FREE"] * 4
    for command in (["status"], ["status", "--watch", "--once"]):
        for address in ([cluster.grpc_address], ["--admin", cluster.admin_address]):
            shown = baton(*command, *address)
            assert shown.returncode == 0, shown.stderr
            # A public address alone gives totals: on loopback's default port this cluster has no admin.
            assert ("decode-0" in shown.stdout) == ("--admin" in address)
            assert "test-model serving" in shown.stdout
            assert max(map(len, shown.stdout.splitlines())) <= 80
            assert "\x1b" not in shown.stdout
        unreachable = baton(*command, "127.0.0.1:1")
        assert unreachable.returncode == 1
        assert unreachable.stderr.count("\n") == 1


def test_a_watch_on_a_terminal_ends_at_q(cluster: Cluster) -> None:
    ours, theirs = pty.openpty()
    command = [*BATON, "status", "--watch", "--admin", cluster.admin_address, "--interval", "0.1"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    top = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    while "decode-0  ····" not in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode(errors="ignore")):
        shown += os.read(ours, 65536)
    os.write(ours, b"q")
    try:
        while os.read(ours, 65536):
            pass
    except OSError:  # the terminal's last user is gone
        pass
    os.close(ours)
    assert top.wait(10) == 0


def test_the_worker_flag(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "services.cli.main",
        "worker",
        "--role",
        "decode",
        "--model",
        str(tmp_path),
    ]
    done = subprocess.run([*command, "--metrics-port", "x"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "metrics_port" in done.stderr
    assert done.stderr.count("\n") == 1


async def test_alerts_and_dashboards_name_what_is_exported(cluster: Cluster, answers: list[Answer]) -> None:
    """Every metric, every label, and every value of a label that is compared, except those of failures."""
    async with httpx.AsyncClient(timeout=10, verify=False) as client:
        status = await cluster.status(window_s=60)
        urls = [cluster.url, *(f"http://{worker.metrics_address}" for worker in status.workers)]
        pages = [(await client.get(f"{url}/metrics")).text for url in urls]
    live = exported([*pages, group_page()])
    named = named_in_rendered_charts()
    assert len(named) > 40, "the chart's expressions were not found"
    for name, labels in named_in_legends().items():
        named[name].labels |= labels
    absent = []
    for name, wanted in named.items():
        series = live.get(name)
        if series is None:
            absent.append(name)
            continue
        has = [one for one in series if wanted.labels <= one.keys()]
        if series and not has:
            absent.append(f"{name}: labels {sorted(wanted.labels)}, exported with {sorted(series[0])}")
        for label in wanted.values.keys() - {"model"}:
            absent += [
                f'{name}{{{label}="{value}"}}'
                for value in wanted.values[label]
                if series and not any(one.get(label) == value for one in series)
            ]
    absent.remove('baton_router_workers{role="both"}')  # this cluster has no combined workers
    assert not absent
    unseen = {name for name in named if not live[name]}
    assert unseen == {
        "baton_router_failed_attempts_total",
        "baton_router_refused_http_connections_total",
        "baton_worker_accepted_drafts_total",
        "baton_worker_draft_rows_total",
    }, "metrics whose series begin with the first such event"
    declared = {metric.name: {"model", *metric.labels} for metric in ROUTER_METRICS}
    declared |= {metric.name: {"model", "worker", "role", *metric.labels} for metric in WORKER_METRICS}
    assert all(named[name].labels <= declared[name] for name in unseen)
