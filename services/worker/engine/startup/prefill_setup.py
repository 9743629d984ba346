"""Builds what runs a worker's prefill steps, from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.device.streams.cuda_stream import compute_stream
from baton.device.streams.stream import ComputeStream
from baton.engine.executor.prefill_steps import PrefillSteps
from baton.engine.forward.joined_rows import JoinedRows
from baton.engine.model.tensors import busy_rows, half_context
from baton.engine.parallel.rank_exchange import DeviceGroup
from baton.engine.plan.prefill_scheduler import PrefillScheduler, StepBounds
from baton.engine.prefill.factory import prompt_pass
from baton.engine.prefix_cache.cache import PrefixCache
from baton.perf_model.prefill_fit import PrefillFit
from services.common.config.worker import EngineConfig
from services.common.observability.logs import get_log
from services.worker.engine.startup.model_loader import LoadedModel

log = get_log(__name__)


def prefill_steps(
    model: LoadedModel,
    engine: EngineConfig,
    prefix_cache: PrefixCache | None = None,
    *,
    stream: ComputeStream | None = None,
    serves: bool = True,
    before_step: Callable[[float], None] | None = None,
    joined: Sequence[JoinedRows] = (),
    group: DeviceGroup | None = None,
) -> PrefillSteps:
    """Scheduler, pass and stream of a worker's prefill steps. `serves`: False where no prompt will ever
    arrive, so that nothing need be compiled. `stream`: that steps run on; None: one of their own.
    `before_step`: see `PrefillSteps`. `joined`: the decode rows that may join steps. `group`: through which
    several GPUs exchange."""
    chunk_tokens = model.chunk_tokens
    exact = model.exact or not serves
    group = None if exact else group
    prompts = prompt_pass(
        model.ranks,
        model.cache,
        chunk_tokens,
        exact=exact,
        graphs=engine.prefill_graphs,
        joined=joined,
        group=group,
    )
    if prompts.refused:
        log.warning("attention_library_unsupported", shapes=prompts.refused)
    if prompts.uncaptured:
        log.warning("prefill_without_graphs", why=prompts.uncaptured)
    bounds = StepBounds(
        chunk_tokens,
        engine.prefill_step_ms / 1e3,
        engine.prefill_age_cap_ms / 1e3,
        prompts.alignment,
        engine.prefill_alone_step_ms_on(model.device.type) / 1e3,
    )
    cost = PrefillFit(half_context(model.config), busy_rows(model.config, model.device.type))
    if prompts.timed_passes is not None:
        cost.begin(*prompts.timed_passes)
        log.info(
            "prefill_throughput",
            **{f"ms_{rows}_rows": round(took * 1e3, 2) for rows, took in prompts.timed_passes},
        )
    scheduler = PrefillScheduler(
        model.pools, bounds, max_sequences=engine.prefill_queue, cost=cost, prefixes=prefix_cache
    )
    stream = stream or compute_stream(*(rank.device for rank in model.ranks))
    return PrefillSteps(prompts, scheduler, stream, before_step=before_step, group=group)
