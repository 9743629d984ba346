"""Plans the next launch: chunks of prompts, a decode step, or both together. Torch-free.

    observe ─▶ plan ─▶ (executor) launch ─▶ launched

`plan` changes nothing: asked twice it says the same. What a plan takes (rows of prompts, credits of pacing)
is recorded when it was launched, and what prompts need before they can be planned (blocks, cached prefixes)
they are given when it is observed that a step is due.

Prefill steps are launched ahead, so that the device does not wait for the host: the next one shortly before
the last should end. Where they are serialised with decode steps, and some sequence is decoded, the next is
launched when the one before has ended: the decode step that runs then is what the device does meanwhile. A
decode step may also share the launch of a prefill step. Then the next prefill step may run right behind it,
where the sequences that are decoded have time for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from baton.engine.plan.decode_rows import next_rows, rows_to_mix
from baton.engine.plan.decode_state import DecodeState
from baton.engine.plan.pacing import PrefillPacing
from baton.engine.plan.prefill_scheduler import PrefillScheduler
from baton.engine.plan.prefill_state import PrefillState
from baton.engine.plan.step_plan import Chunk, DecodeRows, StepPlan, decode_alone

# Prefill steps launched and not ended: one runs, one is queued.
_AHEAD = 2
# Time before the expected end of the last step at which the next one is launched, in seconds and as a share:
# predictions have errors of some percent. Not earlier, since prompts that arrive meanwhile wait for both. A
# device starts on the first kernels while the rest are still being launched.
_LEAD_S, _LEAD_SHARE = 0.002, 0.1
# The loop may turn again as late as it last did; a longer turn than this counts as an exception.
_LONGEST_TURN_S = 0.01


class StepPlanner:
    """Plans the steps of one engine."""

    def __init__(
        self,
        prompts: PrefillScheduler,
        prefill: PrefillState,
        decode: DecodeState,
        pacing: PrefillPacing | None = None,
        decode_step_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pacing` None: no step waits for a limit. `decode_step_s`
        returns the predicted seconds of a decode step by itself, 0 before any was measured. `clock`: that of
        every `now`."""
        self.prompts = prompts
        self.decode = decode
        self.pacing = pacing or PrefillPacing()
        self.clock = clock
        self._prefill = prefill
        self._decode_step_s = decode_step_s
        # When it was last observed whether a prefill step is due, or one was launched, and how long the turn
        # before took.
        self._looked_at = self._turn_s = 0.0
        # Of the prefill step launched last: whether prompts with blocks were left over, and whether those who
        # decode have time for another such step right behind it.
        self._more_waits = self._may_follow = False

    def look(self, now: float, steps: int, *, decoding: bool) -> None:
        """Updates the pacing: `steps` decode steps have ended so far, and `decoding` says whether any
        sequence is decoded. To be called once per loop iteration."""
        self.pacing.look(now, steps, decoding=decoding)
        self.prompts.beside_decode, self.prompts.tpot_limit_s = decoding, self.pacing.limit_s()

    def observe(self, now: float) -> None:
        """Gives prompts their blocks where a prefill step is due. To be called before `plan`, or once per
        loop iteration, after the states of steps were brought up to date."""
        self._turn_s, self._looked_at = min(now - self._looked_at, _LONGEST_TURN_S), now
        if self._may_begin(now):
            self.prompts.allocate_blocks(now)

    def plan(self, now: float) -> StepPlan | None:
        """The next launch; None where there is nothing to do, or no step is due. Prompts come first."""
        return self.plan_prompts(now) or self.plan_decode()

    def plan_prompts(self, now: float) -> StepPlan | None:
        """The next prefill step, with a decode step in it where both together take no longer than apart."""
        if not self._may_begin(now):
            return None
        rows = rows_to_mix(self.decode)
        chunks = self.prompts.plan(now, 0 if rows is None else rows.batch)
        if not chunks:
            return None
        taken = sum(chunk.count for chunk in chunks)
        if rows is not None and not self._joins(taken, rows.batch):
            rows = None
        return self._step(chunks, rows, more_waits=self.prompts.waiting_rows > taken)

    def plan_decode(self) -> StepPlan | None:
        """The next decode step by itself."""
        if self.follows:
            return None
        rows = next_rows(self.decode, behind_prefill=self._prefill.in_turn and bool(self._prefill.under_way))
        if rows is None:
            return None
        posted = self.decode.posted > self.decode.applied
        return decode_alone(rows, "entries were posted" if posted else "slots advance")

    def launched(self, plan: StepPlan, now: float) -> None:
        """Records that a plan was launched."""
        if plan.chunks:
            self._looked_at = now
            self.prompts.launched(plan.chunks, now)
            self._more_waits = plan.more_waits
            self._may_follow = self.pacing.begun(now, plan.expected_s, behind=plan.follows)

    @property
    def follows(self) -> bool:
        """True where the next prefill step is to run right behind the last one, in which a decode step is:
        with no other decode step between them."""
        prefill, decode = self._prefill, self.decode
        if not (self._may_follow and prefill.under_way and prefill.under_way[-1].is_mixed):
            return False
        return self._more_waits and decode.launched == decode.mixed_at and self.prompts.waits

    def _may_begin(self, now: float) -> bool:
        """Returns whether a prefill step is due, and pacing allows it. One is due at once where none runs,
        else shortly before that one ends."""
        prefill, follows = self._prefill, self.follows
        if not (follows or self.pacing.may_begin(now)):
            return False
        if not prefill.under_way:
            return True
        if prefill.in_turn and self.prompts.beside_decode and not follows:
            return False
        if len(prefill.under_way) >= _AHEAD:
            return False
        lead_s = max(_LEAD_S, _LEAD_SHARE * self.prompts.predicted_s(prefill.under_way[0]))
        return now + self._turn_s >= prefill.ends_at - lead_s

    def _joins(self, rows: int, others: int) -> bool:
        """Returns whether a decode step is to be part of a step of `rows` rows of prompts: products of both
        take no longer than apart, and both are one graph, unless the prompts by themselves are none
        either."""
        prompts = self.prompts
        one_graph = rows + others <= prompts.graph_rows and self._prefill.one_graph
        return (one_graph or rows > prompts.graph_rows) and prompts.row_times.joins(rows, others)

    def _step(self, chunks: tuple[Chunk, ...], rows: DecodeRows | None, *, more_waits: bool) -> StepPlan:
        decode_s = 0.0 if rows is None else self._decode_step_s()
        if self.follows:
            reason = "prompts wait, behind a step of both"
        elif self._prefill.under_way:
            reason = "the last step is about to end"
        else:
            reason = "prompts wait"
        plan = StepPlan(chunks, rows, reason, decode_s=decode_s, follows=self.follows, more_waits=more_waits)
        return replace(plan, expected_s=self.prompts.predicted_s(plan))
