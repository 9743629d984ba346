"""Servers' own metrics during a run, from samples as loadgen takes them."""

from __future__ import annotations

import pytest

from bench.goodput.observed import server_times
from loadgen.common.server_samples import Sample
from loadgen.generator.scrape import read_metrics

ROUTER = """
# TYPE baton_router_stage_seconds histogram
baton_router_stage_seconds_bucket{{model="m",stage="queue",le="+Inf"}} {queued}
baton_router_stage_seconds_count{{model="m",stage="queue"}} {queued}
baton_router_stage_seconds_sum{{model="m",stage="queue"}} {queue_s}
baton_router_stage_seconds_count{{model="m",stage="decode"}} 3
baton_router_stage_seconds_sum{{model="m",stage="decode"}} 9
# TYPE baton_router_demand_requests gauge
baton_router_demand_requests{{model="m"}} {queued}
baton_router_demand_prefill_seconds{{model="m"}} 0.54
"""
WORKER = """
# TYPE baton_worker_prefill_step_seconds counter
baton_worker_prefill_step_seconds_total{{model="m",role="prefill",worker="p"}} {busy_s}
# TYPE baton_worker_prompt_tokens counter
baton_worker_prompt_tokens_total{{model="m",role="prefill",worker="p"}} {tokens}
# TYPE baton_worker_prompts counter
baton_worker_prompts_total{{model="m",role="prefill",worker="p"}} {prompts}
"""
DECODE = """
# TYPE baton_worker_decode_steps counter
baton_worker_decode_steps_total{{model="m",role="decode",worker="d"}} {steps}
# TYPE baton_worker_decode_step_seconds counter
baton_worker_decode_step_seconds_total{{model="m",role="decode",worker="d"}} {busy_s}
# TYPE baton_worker_decoded_tokens counter
baton_worker_decoded_tokens_total{{model="m",role="decode",worker="d"}} {tokens}
"""


def sample(at: float, source: str, text: str, **values: float) -> Sample:
    return Sample(at, source, read_metrics(text.format(**values)))


def test_figures_are_those_of_the_run_alone() -> None:
    found = server_times(
        [
            sample(1.0, "router", ROUTER, queued=2, queue_s=10),
            sample(1.0, "p", WORKER, busy_s=5, tokens=1000, prompts=1),
            sample(1.0, "d", WORKER, busy_s=0, tokens=0, prompts=0),
            sample(6.0, "p", WORKER, busy_s=6, tokens=2000, prompts=3),
            sample(11.0, "router", ROUTER, queued=6, queue_s=10.5),
            sample(11.0, "p", WORKER, busy_s=9, tokens=41_000, prompts=41),
            sample(11.0, "d", WORKER, busy_s=0, tokens=0, prompts=0),
        ]
    )
    (prefill,) = found.prefill
    assert prefill.worker == "p"
    assert prefill.busy == pytest.approx(0.4)
    assert prefill.tokens_s == pytest.approx(10_000)
    assert found.stages_ms == {"queue": pytest.approx(125)}
    said = "p busy 40.0%, 10,000 tokens/s, 100.0 ms a prompt; 90.0 ms a prompt are predicted"
    assert str(found) == f"{said}; stages, mean ms: queue 125.0"


def test_steps_of_a_decode_worker() -> None:
    found = server_times(
        [
            sample(2.0, "d", DECODE, steps=100, busy_s=1, tokens=500),
            sample(12.0, "d", DECODE, steps=1100, busy_s=9, tokens=64_500),
        ]
    )
    assert str(found) == "d busy 80.0%, 64.0 rows and 8.00 ms a step; stages, mean ms: -"
    assert found.as_dict()["decode"] == [{"worker": "d", "rows": 64.0, "step_ms": 8.0, "busy": 0.8}]


def test_other_servers_have_none() -> None:
    found = server_times([Sample(at, "vllm", {"vllm:num_requests_running": at}) for at in (0.0, 1.0)])
    assert (found.prefill, found.decode) == ([], [])
    assert str(found) == "stages, mean ms: -"
