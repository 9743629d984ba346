"""Launches plans, of whichever kind of step, and takes care that what a plan takes is recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from baton.engine.executor.decode_loop import DecodeLoop
from baton.engine.executor.prefill_steps import PrefillSteps
from baton.engine.executor.step_handle import DecodeHandle, StepHandle
from baton.engine.plan.step_plan import StepPlan
from baton.engine.plan.step_planner import StepPlanner


class StepExecutor:
    """The one place where steps of an engine are launched. On a CPU both steps of a mixed plan run one after
    the other, with the same results."""

    def __init__(
        self,
        planner: StepPlanner,
        prompts: PrefillSteps,
        decode: DecodeLoop | None = None,
        launching: AbstractContextManager[object] | None = None,
    ) -> None:
        """`decode`: None where no plan has a decode step. `launching`: held while a step is launched; None:
        nothing is."""
        self.planner = planner
        self.prompts = prompts
        self.decode = decode
        self._launching = launching or nullcontext()
        self.last_plan: StepPlan | None = None
        """The plan that was launched last."""
        self.speculative_steps = 0
        """Decode steps that were launched with rows for drafts."""

    def launch(self, plan: StepPlan, between_layers: Callable[[], None] | None = None) -> StepHandle:
        """Launches a step. `between_layers` is called between the layers of a decode step that the host
        computes itself, for work that cannot wait for its end and touches no active slot; a GPU's blocks no
        caller and ignores it. Raises ValueError where the engine has no decode steps and the plan has."""
        with self._launching:
            handle = self._launch(plan, between_layers)
        self.last_plan = plan
        self.speculative_steps += plan.decode is not None and plan.decode.drafts
        self.planner.launched(plan, self.planner.clock())
        return handle

    def step_prompts(self) -> StepHandle | None:
        """Plans and launches a prefill step; None where none is due."""
        now = self.planner.clock()
        self._observe_decode()
        self.planner.observe(now)
        plan = self.planner.plan_prompts(now)
        return None if plan is None else self.launch(plan)

    def step_decode(self, between_layers: Callable[[], None] | None = None) -> StepHandle | None:
        """Plans and launches a decode step by itself; None where there is nothing to do or no room."""
        self._observe_decode()
        plan = self.planner.plan_decode()
        return None if plan is None else self.launch(plan, between_layers)

    def _observe_decode(self) -> None:
        if self.decode is not None:
            self.decode.observe()

    def _launch(self, plan: StepPlan, between_layers: Callable[[], None] | None) -> StepHandle:
        if plan.decode is None:
            return self.prompts.launch(plan)
        if self.decode is None:
            raise ValueError(f"no decode steps run here: {plan}")
        if plan.chunks:
            # The decode step comes first: what it enqueues itself must be before the stream is activated.
            return self.prompts.launch(plan, self.decode.launch_mixed(plan.decode))
        self.decode.launch(plan.decode, between_layers)
        return DecodeHandle(plan, self.decode.steps, self.decode.steps.launched)
