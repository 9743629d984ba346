"""The state of launched prefill steps that have not ended, as the planner sees it. Torch-free."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from baton.engine.plan.step_plan import StepPlan


@dataclass(slots=True, eq=False)
class PrefillState:
    """State of the prefill steps. The executor writes it, the planner reads it. `in_turn`: steps are
    serialised with this worker's decode steps, in the order of their launches. `one_graph`: a step of up to
    the scheduler's `graph_rows` rows is one graph with a decode step in it, too.

    `under_way`: steps launched and not ended, the oldest first; `ends_at`: when all should have ended,
    infinite where they wait for decode steps.
    """

    in_turn: bool = False
    one_graph: bool = True
    under_way: deque[StepPlan] = field(default_factory=deque)
    ends_at: float = 0.0
