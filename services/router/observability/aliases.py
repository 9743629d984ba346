"""The router's metrics under the names that vLLM and OpenTelemetry's conventions for generative AI give them,
so that dashboards made for those show this router.

vLLM: docs.vllm.ai, "Production Metrics". OpenTelemetry: "Semantic conventions for generative AI metrics", as
Prometheus spells them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric as PrometheusMetric

from services.common.observability.metrics import Metric, collect
from services.router.observability.status import Status

# Alias → the metric that it repeats.
_VLLM = {
    "vllm:num_requests_waiting": "baton_router_waiting_requests",
    "vllm:time_to_first_token_seconds": "baton_router_ttft_seconds",
    "vllm:inter_token_latency_seconds": "baton_router_itl_seconds",
    "vllm:time_per_output_token_seconds": "baton_router_itl_seconds",
    "vllm:request_time_per_output_token_seconds": "baton_router_tpot_seconds",
    "vllm:e2e_request_latency_seconds": "baton_router_e2e_seconds",
    "vllm:prompt_tokens_total": "baton_router_prompt_tokens_total",
    "vllm:generation_tokens_total": "baton_router_output_tokens_total",
    "vllm:prefix_cache_queries_total": "baton_router_prompt_tokens_total",
    "vllm:prefix_cache_hits_total": "baton_router_cached_prompt_tokens_total",
}
_GEN_AI = {
    "gen_ai_server_request_duration_seconds": "baton_router_e2e_seconds",
    "gen_ai_server_time_to_first_token_seconds": "baton_router_ttft_seconds",
    "gen_ai_server_time_per_output_token_seconds": "baton_router_tpot_seconds",
}
# What those who read these names expect the model's label to be called.
_VLLM_MODEL, _GEN_AI_MODEL = "model_name", "gen_ai_request_model"


def _running(router: Status) -> float:
    """vLLM does not count those that wait."""
    return max(0, router.dispatcher.running - router.queue.waiting)


def _kv_usage(router: Status) -> float | None:
    """Share of KV blocks in use; None while no worker has reported its blocks."""
    loads = [worker.described.load for worker in router.directory.workers]
    blocks = sum(load.blocks for load in loads)
    return sum(load.blocks - load.free_blocks for load in loads) / blocks if blocks else None


_COMPUTED: tuple[Metric[Status], ...] = (
    Metric("vllm:num_requests_running", "Requests that run and do not wait for workers.", _running),
    Metric(
        "vllm:kv_cache_usage_perc", "Share of all workers' KV blocks that are in use, from 0 to 1.", _kv_usage
    ),
)


class Aliases:
    """The metrics of a table under other names."""

    def __init__(self, table: Iterable[Metric[Status]]) -> None:
        known = {row.name: row for row in table}

        def repeated(names: dict[str, str]) -> tuple[Metric[Status], ...]:
            return tuple(
                dataclasses.replace(known[of], name=name, help=f"Same as `{of}`.")
                for name, of in names.items()
            )

        self.vllm = (*_COMPUTED, *repeated(_VLLM))
        self.gen_ai = repeated(_GEN_AI)

    def collect(self, router: Status) -> Iterator[PrometheusMetric]:
        """Reads them, with the label of the model that goes with each."""
        yield from collect(self.vllm, router, {_VLLM_MODEL: router.model.name})
        yield from collect(self.gen_ai, router, {_GEN_AI_MODEL: router.model.name})
