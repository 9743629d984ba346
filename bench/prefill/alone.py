"""Long prompts one at a time, in a worker's steps. Torch is imported with the engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from baton.engine.plan.prefill_scheduler import StepBounds
from bench.case_output import show
from bench.precision import Precision
from bench.prefill.case import Case
from bench.prefill.engine import PrefillEngine
from bench.prefill.fairness import traffic
from bench.prefill.traffic import Load, Traffic
from services.common.config.worker import EngineConfig

# Between two prompts: less than what a worker takes for "lately".
_PAUSE_S = 0.02


def run_alone(arguments: argparse.Namespace, folder: Path) -> None:
    """Prints a line per bound of a step and number of tokens: time to first token and the steps' rows."""
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    config = EngineConfig()
    chunk_tokens = arguments.chunk_tokens or config.chunk_tokens_on(arguments.device)
    lengths = sorted({tokens for _, tokens in arguments.prompts})
    precision = Precision(arguments.dtype, kv_dtype=arguments.kv_dtype)
    case = Case(arguments.shape, precision, 1, lengths[-1], chunk_tokens)
    engine = PrefillEngine([case], arguments.device, folder, graphs=not arguments.no_graphs)
    engine.report_ready()
    step_s, age_cap_s = config.prefill_step_ms / 1e3, config.prefill_age_cap_ms / 1e3
    default_ms = config.prefill_alone_step_ms_on(arguments.device)
    for alone_ms in [float(ms) for ms in (arguments.step_ms or str(default_ms)).split(",")]:
        bounds = StepBounds(
            chunk_tokens, step_s, age_cap_s, engine.prompt_pass.alignment, alone_seconds=alone_ms / 1e3
        )
        prompts = traffic(engine, bounds)
        for tokens in lengths:
            settings = {"shape": arguments.shape, "chunk_tokens": chunk_tokens, "alone_step_ms": alone_ms}
            found = one_at_a_time(prompts, tokens, arguments.repeats)
            show({**settings, "tokens": tokens, **found}, arguments.json)


def one_at_a_time(prompts: Traffic, tokens: int, repeats: int) -> dict[str, Any]:
    """Times of `repeats` prompts after one that is not counted."""
    took, device, rows = [], [], []
    for _ in range(1 + repeats):
        served = prompts.run(Load(tokens, 1, users=1))
        prompts.wait(_PAUSE_S)
        took.append(served.short[0])
        device.append(sum(step.measured for step in served.steps))
        rows = [step.rows for step in served.steps]
    return {
        "ttft_p50_ms": round(float(np.median(took[1:])) * 1e3, 2),
        "ttft_max_ms": round(max(took[1:]) * 1e3, 2),
        "device_p50_ms": round(float(np.median(device[1:])) * 1e3, 2),
        "last_rows": rows,
    }
