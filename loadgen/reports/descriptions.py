"""Describes a run's load and settings in words."""

from __future__ import annotations

import math
from typing import Any

from loadgen.analysis.summary import Summary
from loadgen.common.formatting import limits, number
from loadgen.common.settings import LoadSettings, PromptSettings, Settings


def load_words(load: LoadSettings) -> str:
    """The load: `Poisson, 5/s, 200 requests`."""
    if load.trace is not None:
        name = load.trace.file.rpartition("/")[2]
        words = [f"{load.trace.format} trace {name} at {load.trace.speed:g} times its speed"]
    elif load.concurrency is not None:
        words = [f"closed loop of {load.concurrency}"]
    else:
        rate = " ".join(load.stages) if load.stages else f"{number(load.rate)}/s"
        words = [_process(load.burstiness), rate]
    if load.num_requests is not None:
        words.append(f"{load.num_requests} requests")
    if load.duration_s is not None:
        words.append(f"{load.duration_s:g} s")
    words.append(f"seed {load.seed}")
    if load.cancel_share:
        words.append(f"{load.cancel_share:.0%} leave after {load.cancel_after} s")
    return ", ".join(words)


def prompt_words(settings: Settings) -> str:
    """The prompts: `random prompts of 64 tokens, outputs of 32`."""
    prompts = settings.prompts
    if settings.load.trace is not None:
        return "lengths and shared prefixes of the trace"
    if prompts.file is not None:
        return f"prompts of {prompts.file.rpartition('/')[2]}, outputs of {prompts.output_len} tokens"
    words = f"{prompts.dataset} prompts of {prompts.input_len} tokens, outputs of {prompts.output_len}"
    return words + _sharing(prompts)


def cache_words(summary: Summary) -> str:
    """Describes the share of the prompts that was cached."""
    if summary.cached_share is None:
        return "prompt tokens in the server's prefix cache: not reported"
    return f"prompt tokens in the server's prefix cache: {summary.cached_share:.1%}"


def limit_words(settings: Settings) -> str:
    """The goal: `90 % within ttft:300 tpot:30`; empty without limits."""
    judge = settings.judge
    return f"{judge.attainment:.0%} within {limits(judge.goodput)}" if judge.goodput else ""


def leak_words(about: dict[str, Any]) -> str:
    """The result of the leak check: passed, what is still in use, or why it was not checked."""
    held = about.get("leaks")
    if held is None:
        reason = about.get("leaks_not_checked")
        return f"leak check: not checked ({reason})" if reason else "leak check: not checked"
    return f"leak check: FAILED, still held: {'; '.join(held)}" if held else "leak check: passed"


def _sharing(prompts: PromptSettings) -> str:
    words = ""
    if prompts.dataset == "document":
        words += f", about {prompts.num_prefixes} documents"
    elif prompts.prefix_len:
        words += f", {prompts.prefix_len} of them one of {prompts.num_prefixes} shared prefixes"
    if prompts.system_len:
        words += f", after one of {prompts.num_prefixes} system prompts of {prompts.system_len}"
    if prompts.turns != "1":
        words += f", {prompts.turns} turns with {prompts.think_time} s between"
    return words


def _process(burstiness: float) -> str:
    if burstiness == 1.0:
        return "Poisson"
    return "constant" if math.isinf(burstiness) else f"gamma with burstiness {burstiness:g}"
