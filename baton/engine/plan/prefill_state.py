"""The state of launched prefill steps that have not ended, as the planner sees it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class PrefillState:
    """Written by the executor; the planner reads it. `in_turn`: steps are serialised with this worker's
    decode steps, in the order of their launches. `one_graph`: a step of up to the scheduler's `graph_rows`
    rows is one graph with a decode step in it, too.

    `under_way`: steps launched and not ended; `last_mixed`: the one launched last shares a decode step's
    launch; `first_s`: predicted seconds of the oldest; `ends_at`: when all should have ended, infinite where
    they wait for decode steps.
    """

    in_turn: bool = False
    one_graph: bool = True
    under_way: int = 0
    last_mixed: bool = False
    first_s: float = 0.0
    ends_at: float = 0.0
