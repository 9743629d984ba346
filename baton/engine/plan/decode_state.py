"""The state of the slots and of launched decode steps, as the planner sees it. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Sized
from dataclasses import dataclass, field

from baton.engine.shared_memory.mailbox import Feature
from baton.engine.shared_memory.step_shape import StepShape
from baton.engine.speculation.policy import DraftPolicy

# What steps with the quicker of the two samplers can do; those with the other do everything.
SIMPLE = Feature.GREEDY | Feature.TEMPERATURE | Feature.DRAFTS


@dataclass(slots=True, eq=False)
class DecodeState:
    """State of the decode steps. The loop that launches them writes it when it posts, observes and launches;
    the planner reads it. `batches`: numbers of rows that a step can be launched with, ascending;
    `mixed_batches`: the same of one that shares the launch of prompts, empty where none can; `draft_batches`:
    of one with drafts, likewise; `policy`: chooses among these; None: steps have rows for all drafts that
    there may be."""

    shape: StepShape
    batches: tuple[int, ...]
    mixed_batches: tuple[int, ...] = ()
    draft_batches: tuple[int, ...] = ()
    policy: DraftPolicy | None = None
    # At the end of the last step that was seen to end: slots active and the features that they use, mailbox
    # entries applied, launches ended, and whether another one would advance a slot.
    active: int = 0
    features: int = 0
    applied: int = 0
    ended: int = 0
    moves: bool = False
    # Whether a step that is launched with none queued finds room in the output ring, or is the first that
    # finds none, which is launched once to be counted.
    room: bool = True
    # Median seconds of the latest steps; 0 before any.
    typical_s: float = 0.0
    # Mailbox entries posted, launches, and how many these were when the last one shared that of prompts.
    posted: int = 0
    launched: int = 0
    mixed_at: int = 0
    # (number of the entry, features) of admissions that no step is known to have applied.
    admissions: deque[tuple[int, int]] = field(default_factory=deque)
    # Sequences that will be admitted soon: a view that the owner of the slots keeps.
    arriving: Sized = ()

    @property
    def queued(self) -> int:
        """Steps launched and not ended."""
        return self.launched - self.ended

    @property
    def has_effect(self) -> bool:
        """True where another step would have an effect. After one that advanced no slot none does until an
        entry is posted (an admission, more blocks, an end) or a mask has reached the device."""
        return self.posted > self.applied or self.moves

    def saw(self, *, active: int, features: int, applied: int, ended: int, moves: bool) -> None:
        """Records what the last step that has ended left."""
        self.active, self.features, self.moves = active, features, moves
        self.applied, self.ended = applied, ended
        # Steps that warmed up or captured graphs were not launched by a plan.
        self.launched = max(self.launched, ended)
        while self.admissions and self.admissions[0][0] <= applied:
            self.admissions.popleft()
