"""Engines of several devices whose exchange fails when a signal says so.

    NEVER   the second device's steps are launched no more: its part of a sum never comes
    LATE    the second device sleeps for longer than the deadline before its next step

Without a GPU the ranks are a CPU's: their steps run in Triton's interpreter and exchange by the kernels
themselves, compiled for the host under a clock of their own. There the second rank comes too late to the
first sum of the next step, or never.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch

# Real-time signals: when Triton first compiles a kernel, LLVM takes over the handlers of SIGUSR1 and SIGUSR2.
NEVER, LATE = signal.SIGRTMIN, signal.SIGRTMAX
# Longer than the deadline of 2 s, and a quarter of it more, at up to 2 GHz.
_CYCLES = 7_000_000_000
# Steps on GPUs are at least so far apart, so that a small model's streams last.
_STEP_S = 0.005
# A step in the interpreter may take so long on a busy machine.
_INTERPRETED_STEP_S = 30.0


def install() -> None:
    """Called by `own_engine` before an engine is built."""
    if torch.cuda.is_available():
        _on_gpus()
    else:
        _on_a_cpu()


def _on_gpus() -> None:
    from baton.engine.executor.graph_decode_loop import GraphDecodeLoop
    from baton.engine.parallel.rank_exchange import ExchangeGroup, Launch
    from tests.support.gpu_sleep import sleep_on_stream

    received = set[int]()

    def on_signal(number: int, frame: object) -> None:
        received.add(number)
        os.write(2, f"engine {os.getpid()} received signal {number}: its exchange will fail\n".encode())

    for number in (NEVER, LATE):
        signal.signal(number, on_signal)
    launch_step, launch_ranks = GraphDecodeLoop.launch, ExchangeGroup.launch

    def launch(loop: GraphDecodeLoop, *arguments: Any) -> None:
        time.sleep(_STEP_S)
        if LATE in received and loop.followers:
            received.discard(LATE)
            with torch.cuda.stream(loop.followers[0].queue.stream):
                sleep_on_stream(_CYCLES)
        launch_step(loop, *arguments)

    def launch_some(group: ExchangeGroup, steps: Sequence[Launch]) -> None:
        if NEVER in received:
            steps[0]()
        else:
            launch_ranks(group, steps)

    GraphDecodeLoop.launch = launch  # type: ignore[method-assign, assignment]
    ExchangeGroup.launch = launch_some  # type: ignore[method-assign, assignment]


def _on_a_cpu() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from baton.engine.decode.slot_state import SlotState
    from baton.engine.model.modules import Model
    from services.common.config.worker import WorkerConfig
    from services.worker.engine import assembly as module
    from services.worker.engine.startup import prefill_setup as setup_module
    from services.worker.engine.startup.model_loader import LoadedModel
    from tests.engine.parallel.host.turn_group import HostGroup
    from tests.support.triton_interpreter import make_launches_cheap

    assembly: Any = module
    prefill_setup: Any = setup_module
    decode_loop, prompt_pass = assembly.decode_loop, prefill_setup.prompt_pass
    prefill_steps = assembly.prefill_steps

    def fails_when_told(group: HostGroup) -> HostGroup:
        def on_signal(number: int, frame: object) -> None:
            group.late, group.never = (1, 1), number == NEVER

        for number in (NEVER, LATE):
            signal.signal(number, on_signal)
        return group

    def group_of_prompts(config: WorkerConfig, model: LoadedModel, shape: Any, *, mixes: bool) -> Any:
        if len(model.ranks) == 1 or config.role != "prefill":
            return None
        from baton.engine.kernels.product_rows import product_rows
        from baton.engine.prefill.group_pass import GroupPass

        make_launches_cheap()
        for name in ("warm", "measure_products", "measure_step_times"):
            setattr(GroupPass, name, lambda made: None)
        return fails_when_told(HostGroup(model.ranks, shape.rows, product_rows(model.chunk_tokens)))

    def steps_of_prompts(*arguments: Any, **options: Any) -> Any:
        if options["group"] is not None:
            beat = options["before_step"]
            options["before_step"] = lambda expected_s: beat(max(expected_s, _INTERPRETED_STEP_S))
        return prefill_steps(*arguments, **options)

    def prompts(*arguments: Any, **options: Any) -> Any:
        by_kernels = {"interpreted": True, "graphs": False} if options["group"] is not None else {}
        return prompt_pass(*arguments, **options | by_kernels)

    def make(ranks: Sequence[Model], cache: Any, state: SlotState, *arguments: Any, **options: Any) -> Any:
        if len(ranks) == 1 or not options["serves"]:
            return decode_loop(ranks, cache, state, *arguments, **options)
        make_launches_cheap()
        group, beat = fails_when_told(HostGroup(ranks, state.shape.rows)), options["before_step"]
        options |= {"interpreted": True, "group": group}
        loop = decode_loop(ranks, cache, state, *arguments, **options)
        launch = loop.launch

        def launch_slowly(*given: Any) -> None:
            beat(_INTERPRETED_STEP_S)
            launch(*given)

        loop.launch = launch_slowly
        return loop

    assembly.decode_loop, assembly.device_group = make, group_of_prompts
    assembly.prefill_steps, prefill_setup.prompt_pass = steps_of_prompts, prompts
