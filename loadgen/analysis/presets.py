"""Published latency limits, by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Preset:
    """Limits in milliseconds, and the share of requests that must meet all of them.

    MLPerf bounds the 99th percentile of each metric separately; 99 % of requests within all limits is at
    least as strict.
    """

    attainment: float
    goodput: dict[str, float]
    source: str


def _limits(ttft: float, tpot: float) -> dict[str, float]:
    return {"ttft": ttft, "tpot": tpot}


_MLPERF = "MLPerf Inference"
_DISTSERVE = "DistServe's evaluation"
PRESETS = {
    "mlperf-llama2-70b-server": Preset(0.99, _limits(2000, 200), _MLPERF),
    "mlperf-llama2-70b-interactive": Preset(0.99, _limits(450, 40), _MLPERF),
    "mlperf-llama3.1-8b-server": Preset(0.99, _limits(2000, 100), _MLPERF),
    "mlperf-llama3.1-8b-interactive": Preset(0.99, _limits(500, 30), _MLPERF),
    "mlperf-llama3.1-405b-server": Preset(0.99, _limits(6000, 175), _MLPERF),
    "mlperf-llama3.1-405b-interactive": Preset(0.99, _limits(4500, 80), _MLPERF),
    "mlperf-mixtral-8x7b-server": Preset(0.99, _limits(2000, 200), _MLPERF),
    "mlperf-deepseek-r1-server": Preset(0.99, _limits(2000, 80), _MLPERF),
    "mlperf-deepseek-r1-interactive": Preset(0.99, _limits(1500, 15), _MLPERF),
    "distserve-chatbot-opt-13b": Preset(0.9, _limits(250, 100), _DISTSERVE),
    "distserve-chatbot-opt-66b": Preset(0.9, _limits(400, 100), _DISTSERVE),
    "distserve-chatbot-opt-175b": Preset(0.9, _limits(4000, 200), _DISTSERVE),
    "distserve-code-opt-66b": Preset(0.9, _limits(125, 200), _DISTSERVE),
    "distserve-summarization-opt-66b": Preset(0.9, _limits(15_000, 150), _DISTSERVE),
    "mooncake": Preset(0.9, {"ttft": 30_000, "tbt10": 100}, "Mooncake's effective request capacity"),
    "dynamo-conversation": Preset(
        0.9, {"ttft": 2000, "itl_mean": 25}, "Dynamo's goodput on Mooncake's trace"
    ),
}
