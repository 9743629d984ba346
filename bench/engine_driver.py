"""Engines for measurements and tests: models of random weights, and steps driven without a worker."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.model_spec.split import WHOLE, Split
from bench.shapes import Precision, Shape, with_positions

if TYPE_CHECKING:
    from baton.device.streams.stream import ComputeStream
    from baton.engine.decode.slots import Grant
    from baton.engine.executor.decode_loop import DecodeLoop
    from baton.engine.executor.executor import StepExecutor
    from baton.engine.executor.prefill_steps import PrefillSteps
    from baton.engine.executor.step_handle import ChunkResult
    from baton.engine.memory.kv_cache import KVCache
    from baton.engine.model.modules import Model
    from baton.engine.parallel.rank_exchange import DeviceGroup
    from baton.engine.plan.prefill_scheduler import PrefillScheduler
    from baton.engine.prefill.prompt_pass import PromptPass
    from baton.engine.sequence import Limits, SamplingParams
    from baton.engine.shared_memory.logprob_records import Logprobs
    from baton.model_spec.layout import Layout

_POLL_S = 0.0002


def admit(
    loop: DecodeLoop,
    grant: Grant,
    *,
    token_ids: Sequence[int],
    prompt_length: int,
    last_token: int,
    last_logprobs: Logprobs | None = None,
    end: int,
    sampling: SamplingParams,
    limits: Limits,
    masked: bool = False,
    prediction: Sequence[int] = (),
    most_drafts: int | None = None,
    tenant: str | None = None,
) -> None:
    """Posts the admission of a sequence of which all is known; the arguments are those of `begin_admission`
    and `complete`."""
    entry = loop.begin_admission(
        grant, token_ids=token_ids, prompt_length=prompt_length, end=end, sampling=sampling, limits=limits,
        masked=masked, prediction=prediction, most_drafts=most_drafts, tenant=tenant,
    )  # fmt: skip
    loop.complete(
        entry, token_ids=token_ids, prompt_length=prompt_length, sampling=sampling, last_token=last_token,
        last_logprobs=last_logprobs,
    )  # fmt: skip
    loop.admit(entry)


def prompt_executor(
    prompt_pass: PromptPass,
    scheduler: PrefillScheduler,
    stream: ComputeStream,
    clock: Callable[[], float] = time.monotonic,
    group: DeviceGroup | None = None,
) -> StepExecutor:
    """Builds an executor that runs prefill steps alone. `group`: see `PrefillSteps`."""
    from baton.engine.executor.prefill_steps import PrefillSteps

    return executor_of(PrefillSteps(prompt_pass, scheduler, stream, clock, group=group), clock)


def executor_of(steps: PrefillSteps, clock: Callable[[], float] = time.monotonic) -> StepExecutor:
    """Runs these prefill steps alone."""
    from baton.engine.executor.executor import StepExecutor
    from baton.engine.plan.decode_state import DecodeState
    from baton.engine.plan.step_planner import StepPlanner
    from baton.engine.shared_memory.step_shape import StepShape

    idle = DecodeState(StepShape(1), (1,))
    return StepExecutor(StepPlanner(steps.scheduler, steps.state, idle, clock=clock), steps)


def decode_step(loop: DecodeLoop, between_layers: Callable[[], None] | None = None) -> bool:
    """Launches a decode step by itself; False where there was nothing to do or no room. `between_layers`: see
    `StepExecutor.launch`."""
    from baton.engine.plan.decode_rows import next_rows

    loop.observe()
    rows = next_rows(loop.steps)
    if rows is not None:
        loop.launch(rows, between_layers)
    return rows is not None


def take(executor: StepExecutor) -> list[ChunkResult]:
    """The results of all prefill steps that have ended since, with their accounting done."""
    results = executor.prompts.ended()
    executor.prompts.finalize()
    return results


def prefill_step(executor: StepExecutor) -> list[ChunkResult]:
    """Launches a prefill step where one is due, and takes what has ended; on a CPU, the same step."""
    executor.step_prompts()
    return take(executor)


def finish(executor: StepExecutor) -> list[ChunkResult]:
    """Runs prefill steps until there is nothing left to compute, and waits for all of them."""
    results = []
    while executor.step_prompts() is not None or executor.prompts.under_way:
        results += take(executor)
        if executor.prompts.under_way:
            time.sleep(_POLL_S)
    return results


# Blocks of a cache that are drawn at once.
_BLOCKS = 64


def random_model(
    shape: Shape,
    precision: Precision,
    tokens: int,
    block_tokens: int,
    device: str,
    change: Callable[[dict[str, Any]], None] = lambda weights: None,
    split: Split = WHOLE,
) -> Any:
    """A model for sequences of up to `tokens` tokens, or the part of one that a device has. Weights are drawn
    by the device's own generator: of no meaning, but of the right size. `change` is called with them, by
    name."""
    import torch

    from baton.engine.model import modules
    from baton.engine.model.families.registry import load_config
    from baton.engine.model.weight_formats import weight_formats
    from baton.engine.model.weight_places import weight_places

    kind, place = getattr(torch, precision.torch_dtype), torch.device(device)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(with_positions(shape, tokens).config))
        config = load_config(folder).of_rank(split)
    layout = config.layout(block_tokens, precision.cache_dtype)
    formats = weight_formats(config, precision.quantization, quantize_head=precision.quantize_head)
    weights = weight_places(config, place, kind, formats)
    draw(weights)
    if config.experts is not None:
        _route_evenly(weights)
    change(weights)
    kinds = modules.Precision.of(kind, getattr(torch, precision.cache_dtype))
    model = modules.Model(config, weights, layout, place, kinds)
    del weights
    if place.type == "cuda":
        torch.cuda.synchronize(place)
        torch.cuda.empty_cache()
    return model


def draw(weights: Mapping[str, Any]) -> None:
    """Draws weights by their names in place: gains of norms are 1, matrices keep a row's magnitude."""
    import torch

    for name, weight in weights.items():
        if not isinstance(weight, torch.Tensor):
            weight.randomize_()
        elif name.endswith("norm.weight"):
            weight.fill_(1)
        else:
            weight.normal_(0, weight.shape[-1] ** -0.5)


def places_of(device: str, count: int) -> list[str]:
    """The devices of a model's ranks: a CPU is that of all."""
    return [device] * count if device == "cpu" or count == 1 else [f"cuda:{rank}" for rank in range(count)]


def whole_layout(rank: Model) -> Layout:
    """The layout of the blocks that a rank has its heads of."""
    groups = rank.layout.groups
    config = replace(rank.config, num_kv_heads=rank.config.num_kv_heads * rank.config.split.count)
    return config.layout(groups[0].block_tokens, rank.layout.cache_dtype)


def _route_evenly(weights: dict[str, Any]) -> None:
    """Gives the rows of a mixture experts of their own, as `random_weights` does: an embedding of unit
    variance, beside which what attention adds, nearly the same for all rows, is small."""
    import torch

    for name, weight in weights.items():
        if name.endswith("embed_tokens.weight"):
            weight.normal_(0, 1)
        elif name.endswith("o_proj.weight"):
            (weight if isinstance(weight, torch.Tensor) else weight.scales).mul_(1 / 4)


def randomize(cache: KVCache) -> None:
    """Fills a cache with normal values, or with codes and scales that stand for such."""
    import torch

    from baton.engine.kernels.reference.kv_codes import quantise

    for group, scales in zip(cache.groups, cache.scales, strict=True):
        for start in range(0, group.shape[0], _BLOCKS):
            part = slice(start, start + _BLOCKS)
            if scales is None:
                group[part].normal_()
                continue
            codes, found = quantise(torch.randn(group[part].shape, device=group.device))
            group[part].copy_(codes)
            scales[part].copy_(found.movedim(2, -1))
