"""Metrics under the names of vLLM and OpenTelemetry, on a live /metrics."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.router.conftest import MODEL, Site, SiteMaker, ids_request, until
from tests.router.http_client import http

SAME = {
    "vllm:time_to_first_token_seconds_count": "baton_router_ttft_seconds_count",
    "vllm:inter_token_latency_seconds_count": "baton_router_itl_seconds_count",
    "vllm:e2e_request_latency_seconds_sum": "baton_router_e2e_seconds_sum",
    "vllm:prompt_tokens_total": "baton_router_prompt_tokens_total",
    "vllm:generation_tokens_total": "baton_router_output_tokens_total",
    "vllm:prefix_cache_hits_total": "baton_router_cached_prompt_tokens_total",
    "gen_ai_server_request_duration_seconds_count": "baton_router_e2e_seconds_count",
    "gen_ai_server_time_to_first_token_seconds_sum": "baton_router_ttft_seconds_sum",
    "gen_ai_server_time_per_output_token_seconds_count": "baton_router_tpot_seconds_count",
}


async def scrape(here: Site) -> dict[str, tuple[float, dict[str, str]]]:
    """Value and labels of each sample that is not a bucket's."""
    async with http(here) as client:
        text = (await client.get("/metrics")).text
    return {
        sample.name: (sample.value, sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_bucket")
    }


async def test_aliases_have_the_values_of_their_metrics(site: SiteMaker) -> None:
    async with site(metric_aliases=True) as here:
        here.worker("prefill-0").behaviour.cached_tokens = 2
        await here.generate(ids_request([1, 2, 3], 8))
        await here.quiet()
        found = await scrape(here)
        for alias, name in SAME.items():
            assert found[alias][0] == found[name][0] > 0, alias
            label = "model_name" if alias.startswith("vllm:") else "gen_ai_request_model"
            assert found[alias][1] == {label: MODEL}, alias
        assert found["vllm:num_requests_running"][0] == found["vllm:num_requests_waiting"][0] == 0
        assert 0 <= found["vllm:kv_cache_usage_perc"][0] <= 1


async def test_running_requests_are_those_that_do_not_wait(site: SiteMaker) -> None:
    async with site(slots=1, metric_aliases=True) as here:
        here.worker("decode-0").behaviour.step_s = 0.2
        calls = [here.stub.Generate(ids_request([1], 50), timeout=10) for _ in range(3)]
        await until(lambda: here.router.queue.waiting == 2)
        found = await scrape(here)
        assert found["vllm:num_requests_running"][0] == 1
        assert found["vllm:num_requests_waiting"][0] == 2
        for call in calls:
            call.cancel()
        await here.quiet()


async def test_they_are_off_unless_asked_for(site: SiteMaker) -> None:
    async with site() as here:
        assert not [name for name in await scrape(here) if name.startswith(("vllm", "gen_ai"))]
