"""The decode step: every active slot advances by one token, and nothing is asked of the host.

A step applies the mailbox, runs the model over the active rows, samples, checks stops, advances,
and writes the output ring. Two implementations use the same arrays, rings and order: `reference_loop` on any
device, `graph_loop` on a GPU. Their common interface is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from baton.device.streams.stream import ComputeStream, Event
from baton.engine.decode.slot_state import SlotState, SlotWrite
from baton.engine.decode.slots import Grant
from baton.engine.forward.joined_rows import JoinedRows
from baton.engine.memory.blocks import BlockTables
from baton.engine.plan.decode_rows import batches_up_to
from baton.engine.plan.decode_state import DecodeState
from baton.engine.plan.step_plan import DecodeRows
from baton.engine.sequence import Limits, SamplingParams
from baton.engine.shared_memory.logprob_records import Logprobs
from baton.engine.shared_memory.mailbox import ENTRY, Entry, EntryKind, Feature, Mailbox
from baton.engine.shared_memory.mask_board import SlotMask
from baton.engine.shared_memory.output_ring import RingWriter
from baton.engine.shared_memory.slot_progress import SlotProgress
from baton.engine.speculation.draft_rates import DraftRates
from baton.engine.speculation.expected_costs import costs_by_sequences
from baton.engine.speculation.lookahead_table import LookaheadTable, Output
from baton.engine.speculation.policy import DraftPolicy
from baton.engine.speculation.ranked_drafts import Slots
from baton.engine.speculation.size_times import SizeTimes, StepSize
from baton.engine.step_times import StepTimes
from baton.perf_model.step_costs import StepCosts
from baton.request_fields.table import SAMPLING_NUMBERS

_NO_STOP = -1
# The longest time after which a loop with work should be polled for its next step.
_NAP_S = 0.001


class DecodeLoop(ABC):
    """Posts changes of slots to the mailbox (`admit`, `extend`, `stall`, `preempt`, `cancel`), and runs the
    steps that apply them."""

    def __init__(
        self,
        state: SlotState,
        mailbox: Mailbox,
        ring: RingWriter,
        progress: SlotProgress,
        mixed: Sequence[JoinedRows] = (),
        draft_batches: Sequence[int] = (),
        *,
        adaptive: bool = False,
    ) -> None:
        """`mixed`: rows that a pass over prompts can run, too, by batch. `draft_batches`: numbers of rows of
        steps with drafts; empty: no step has any. `adaptive`: `DraftPolicy` chooses among them."""
        self.state = state
        self.mixed = {rows.rows: rows for rows in mixed}
        """Rows that `launch_mixed` may return, by batch: a pass over prompts must be made for them."""
        self.steps = DecodeState(
            state.shape, tuple(batches_up_to(state.shape.slots)), tuple(self.mixed), tuple(draft_batches)
        )
        """Slots and launched steps, for the planner."""
        self._mailbox = mailbox
        self.shape = state.shape
        self.ring = ring
        """The output ring; it counts the steps that ran, and those that found it full."""
        self.times = StepTimes()
        """Durations of the steps that have ended."""
        self.measured_costs = StepCosts()
        """Costs of decode steps as measured at the start; zeros where they were not."""
        self.progress = progress
        """Progress of each slot's sequence when the last step ended."""
        self.draft_rates = DraftRates(progress, self.shape) if draft_batches else None
        """Success rates of recent drafts; None where no step has any."""
        self.size_times = SizeTimes()
        """Seconds of steps by their rows and sequences, for the policy."""
        if adaptive and self.draft_rates is not None:
            slots, sizes = self.shape.slots, self.steps.draft_batches
            self.steps.policy = DraftPolicy(self.draft_rates, self.size_times, slots, sizes)
        # The most drafts of each slot, as the device has them; None: no limit but the steps'.
        self._budgets: Slots | None = None
        # Kinds of the launched steps that have not been seen to end, where drafts are counted; None: one
        # that shared the launch of prompts.
        self._kinds: deque[DecodeRows | None] = deque()

    def begin_admission(
        self,
        grant: Grant,
        *,
        token_ids: Sequence[int],
        prompt_length: int,
        end: int,
        sampling: SamplingParams,
        limits: Limits,
        masked: bool = False,
        prediction: Sequence[int] = (),
        most_drafts: int | None = None,
        tenant: str | None = None,
    ) -> Entry:
        """The mailbox entry that will admit a prefilled sequence to its slot: `complete` adds its last token,
        and `admit` posts it. The slot's tables are written now, which may be done while its KV is still
        computed or transferred; an entry that is never posted has no effect.

        `token_ids` have KV: the prompt, `prompt_length` long, and what earlier attempts emitted. `masked`:
        each token after the last one waits for its mask (`write_masks`). `prediction`: tokens in which drafts
        are looked up beside the sequence's own; `most_drafts`: that one step may verify; None: as many as
        steps can. `tenant`: with a lookahead table, drafts are looked up in this tenant's earlier outputs,
        too, and the table learns this one; None: neither.
        """
        steps_can = 0 if masked else self.shape.rows_per_slot - 1
        most_drafts = steps_can if most_drafts is None else min(most_drafts, steps_can)
        text = (token_ids, prediction) if most_drafts else None
        if self.state.lookahead is not None:
            if (reading := self.take_reading(grant.slot)) is not None:
                reading.synchronize()
            self.state.lookahead.begin(grant.slot, tenant if most_drafts else None, len(token_ids))
        self.state.apply(
            SlotWrite(grant.slot, blocks=grant.blocks, logit_bias=sampling.logit_bias, text=text)
        )
        entry = _entry(EntryKind.ADMIT, grant.slot, grant.generation, self.ring.steps)
        entry["position"] = len(token_ids)
        entry["end"], entry["capacity"] = end, grant.capacity
        entry["most_drafts"] = most_drafts
        entry["stop_ids"] = _NO_STOP
        entry["stop_ids"][0, : len(limits.stop_token_ids)] = limits.stop_token_ids
        stops_from = prompt_length + limits.min_tokens
        entry["stops_from"] = stops_from
        held_stops = stops_from > len(token_ids) + 1
        entry["features"] = _features(sampling, held_stops=held_stops, masked=masked, drafts=most_drafts > 0)
        _write_sampling(entry, sampling)
        return entry

    def complete(
        self,
        admission: Entry,
        *,
        token_ids: Sequence[int],
        prompt_length: int,
        sampling: SamplingParams,
        last_token: int,
        last_logprobs: Logprobs | None = None,
    ) -> None:
        """Adds `last_token`, the one behind `token_ids`, which has no KV; the other arguments are those of
        `begin_admission`. The slot's first word in the ring repeats it with `last_logprobs`. Raises
        ValueError where a request for logprobs has none."""
        if (last_logprobs is None) != (sampling.logprobs is None):
            raise ValueError("the last token comes with logprobs exactly where they are asked for")
        counted = None
        if sampling.penalizes:
            counted = token_ids[:prompt_length], [*token_ids[prompt_length:], last_token]
        slot = int(admission["slot"][0])
        appended = None if not int(admission["most_drafts"][0]) else (len(token_ids), last_token)
        self.state.apply(SlotWrite(slot, counted=counted, last_logprobs=last_logprobs, appended=appended))
        admission["last_token"] = last_token

    def admit(self, admission: Entry) -> None:
        """Posts the admission: the sequence decodes from the next step on. All its KV must be in its
        blocks."""
        admission["from_step"] = self.ring.steps
        self._post(admission)

    @property
    def lookahead(self) -> LookaheadTable | None:
        """The table of earlier outputs; None where there is none."""
        return self.state.lookahead

    def learn(self, slot: int, generation: int) -> None:
        """Makes the lookahead table, if there is one, learn the output of a sequence that has ended, before
        its slot is given to another."""
        table, position = self.state.lookahead, self.progress.position(slot, generation)
        if table is None or position is None:
            return
        if (output := table.take_output(slot, position + 1)) is not None:
            self._learn(output)

    def _learn(self, output: Output) -> None:
        """Begins to fill the table with an output."""
        assert self.state.lookahead is not None
        assert self.state.history is not None
        self.state.lookahead.learn(self.state.history, output)

    def take_reading(self, slot: int) -> Event | None:
        """The end of what was begun to learn of a slot, and may still read its history; None where nothing
        was, or it has ended."""
        return None

    def extend(
        self, slot: int, generation: int, more: BlockTables, held: tuple[int, ...], capacity: int
    ) -> None:
        """Gives a slot blocks behind the `held` it has by cache group; they hold `capacity` tokens in all."""
        self.state.apply(SlotWrite(slot, blocks=more, first_blocks=held))
        entry = _entry(EntryKind.EXTEND, slot, generation, self.ring.steps)
        entry["capacity"] = capacity
        self._post(entry)

    def write_masks(self, masks: Sequence[SlotMask]) -> None:
        """Gives the tokens that masked slots may draw at a position of their sequences; at most one mask a
        slot. Once for each token, after the one before it has been drawn. Does not wait for the device.
        """
        self.state.sampler.masks.write(masks)

    def stall(self, slot: int, generation: int) -> int:
        """Stops a slot from advancing until it is extended; returns the entry's number, for `applied`."""
        self._post(_entry(EntryKind.EXTEND, slot, generation, self.ring.steps))
        return self._mailbox.posted

    @property
    def stream(self) -> ComputeStream | None:
        """The stream of the steps. Prefill steps of the same worker run on it, too, in turn with decode
        steps: both at once take longer than one after the other (docs/scheduling.md). None where each step
        ends before `launch` returns."""
        return None

    def applied(self, number: int) -> bool:
        """Returns whether that mailbox entry has been applied and every step that began before has ended."""
        return self._mailbox.posted - self._mailbox.pending >= number

    def furthest_tags(self, more_steps: int = 0) -> npt.NDArray[np.int64]:
        """Returns the tags of `progress` at the positions that the launched steps, and `more_steps` more,
        should take their sequences to: each step by one token, or by as many as the sequence's steps gave out
        on average."""
        self.observe()  # first: a step that ends meanwhile counts twice, and none is left out
        steps = self.steps.queued + more_steps
        drafts = self.shape.rows_per_slot > 1
        return self.progress.tags + steps * (self.progress.tokens_a_step() if drafts else 1)

    def preempt(self, slot: int, generation: int) -> None:
        """Ends a slot whose sequence continues on another worker; the ring reports `Finish.PREEMPTED`."""
        self._post(_entry(EntryKind.PREEMPT, slot, generation, self.ring.steps))

    def cancel(self, slot: int, generation: int) -> None:
        """Ends a slot from the next step on; the ring reports this finish, or an earlier one."""
        self._post(_entry(EntryKind.CANCEL, slot, generation, self.ring.steps))

    def _post(self, entry: Entry) -> None:
        self._mailbox.post(entry)
        self.steps.posted = self._mailbox.posted
        if int(entry["kind"][0]) == EntryKind.ADMIT:
            self.steps.admissions.append((self._mailbox.posted, int(entry["features"][0])))

    def limit_tpot(self, slot: int, tpot_s: float | None) -> None:
        """Says what time per output token the request in a slot asks for, None: none. Steps with drafts are
        chosen by it, where a policy chooses them."""
        if self.steps.policy is not None:
            self.steps.policy.limit(slot, tpot_s)

    @property
    def tokens_a_step(self) -> float:
        """Tokens that a step gives a sequence: of the sequences that decode, or did last, the lower quartile,
        so that what is predicted holds for most; 1 where no step has drafts."""
        return 1.0 if self.draft_rates is None else self.draft_rates.tokens_a_step

    def reported_costs(self, costs: StepCosts, context_tokens: float) -> StepCosts:
        """Returns `costs` of steps by rows, with what sequences of `context_tokens` each have of them. Where
        a policy chooses rows, they are by the rows that it would choose for each number of sequences."""
        rates, policy = self.draft_rates, self.steps.policy
        if rates is None:
            return costs
        if policy is None:
            rows = rates.rows_a_sequence
            return replace(costs, tokens_a_step=rates.tokens_a_step, rows_a_sequence=rows)
        batches, slots = self.steps.batches, self.shape.slots
        return costs_by_sequences(
            costs,
            lambda sequences: policy.expected(sequences, batches[bisect_left(batches, sequences)]),
            [*(1 << n for n in range((slots - 1).bit_length())), slots],
            ran=rates.ran,
            tokens_a_step=rates.tokens_a_step,
            context_tokens=context_tokens,
        )

    def _count_launch(self, rows: DecodeRows | None) -> None:
        """Records that a step was launched, by itself or, None, with prompts."""
        self.steps.launched += 1
        if self.draft_rates is not None:
            self._kinds.append(rows)
            if self.steps.policy is not None:
                self.steps.policy.launched(drafts=rows is not None and rows.drafts)
                self._give_budgets(self.steps.policy.budgets)

    def _give_budgets(self, budgets: Slots) -> None:
        """Says how many drafts each slot may have: steps that are queued already may see it, which no token
        depends on."""
        if budgets is not self._budgets and self.state.drafts is not None:
            self._budgets = budgets
            self.state.drafts.limit(budgets)

    def _count_ended(self, steps: int, seconds: float) -> None:
        """Records that `steps` launched steps have ended, of `seconds` each."""
        if self.draft_rates is None:
            return
        kinds = [self._kinds.popleft() for _ in range(min(steps, len(self._kinds)))]
        alone = [kind for kind in kinds if kind is not None]
        if not alone:
            self.draft_rates.observe(0, drafts=False)
            return
        batch, drafts = min(kind.batch for kind in alone), any(kind.drafts for kind in alone)
        sequences = self.draft_rates.observe(batch, drafts=drafts, budgets=self._budgets)
        if sequences and len(set(kinds)) == 1:
            self.size_times.observe(StepSize(batch, sequences, drafts), seconds)

    @property
    def expected_step_s(self) -> float:
        """Predicted seconds of the step that runs, or of the next one; 0 before any was timed."""
        return self.times.expected_s

    @property
    def nap_s(self) -> float:
        """Seconds after which a loop that has work, but could not begin a step, should be polled again."""
        return _NAP_S

    def device_hung(self) -> bool:
        """Returns whether a device has pending steps and makes no progress (`DeviceWatchdog`); to be called
        once per iteration. Steps that the host computes itself cannot hang unnoticed."""
        return False

    @property
    def has_work(self) -> bool:
        """True where a step would do something, given room in the ring."""
        self.observe()
        return bool(self._mailbox.pending) or self.steps.active > 0

    @property
    @abstractmethod
    def tokens_decoded(self) -> int:
        """Number of tokens decoded since the loop was made."""

    @abstractmethod
    def observe(self) -> None:
        """Brings `steps` up to date: what has ended, and what is left to do."""

    @abstractmethod
    def launch(self, rows: DecodeRows, between_layers: Callable[[], None] | None = None) -> None:
        """Runs or enqueues one step. `between_layers`: see `StepExecutor.launch`."""

    def launch_mixed(self, rows: DecodeRows) -> JoinedRows | None:
        """Makes the next step part of a prefill step, which the caller launches next on `stream` with the
        rows that are returned: weights are read once for both. None where steps cannot be part of others:
        then it has been launched by itself."""
        self.launch(rows)
        return None


def _entry(kind: EntryKind, slot: int, generation: int, from_step: int) -> Entry:
    entry: Entry = np.zeros(1, dtype=ENTRY)
    entry["kind"], entry["slot"], entry["generation"], entry["from_step"] = kind, slot, generation, from_step
    return entry


def _write_sampling(entry: Entry, sampling: SamplingParams) -> None:
    for field in SAMPLING_NUMBERS:
        entry[field.name] = getattr(sampling, field.name)
    entry["seed"] = np.uint64(sampling.seed).astype(np.int64)
    entry["logprobs"] = sampling.logprobs or 0


def _features(sampling: SamplingParams, *, held_stops: bool, masked: bool, drafts: bool) -> Feature:
    features = Feature.GREEDY if sampling.temperature == 0 else Feature.TEMPERATURE
    for feature, used in (
        (Feature.FILTERS, sampling.filters),
        (Feature.BIAS, bool(sampling.logit_bias)),
        (Feature.PENALTIES, sampling.penalizes),
        (Feature.MIN_TOKENS, held_stops),
        (Feature.LOGPROBS, sampling.logprobs is not None),
        (Feature.MASKED, masked),
        (Feature.DRAFTS, drafts),
    ):
        if used:
            features |= feature
    return features
