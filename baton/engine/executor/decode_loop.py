"""The decode step: every active slot advances by one token, and nothing is asked of the host.

A step applies the mailbox, runs the model over the active rows, samples, checks stops, advances,
and writes the output ring. Two implementations use the same arrays, rings and order: `reference_loop` on any
device, `graph_loop` on a GPU. Their common interface is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from baton.device.stream import ComputeStream
from baton.engine.decode.slot_state import SlotState, SlotWrite
from baton.engine.decode.slots import Grant
from baton.engine.memory.blocks import BlockTables
from baton.engine.plan.decode_rows import batches_up_to
from baton.engine.plan.decode_state import DecodeState
from baton.engine.plan.step_plan import DecodeRows
from baton.engine.sequence import Limits, SamplingParams
from baton.engine.shared_memory.logprob_records import Logprobs
from baton.engine.shared_memory.mailbox import ENTRY, Entry, EntryKind, Feature, Mailbox
from baton.engine.shared_memory.mask_board import SlotMask
from baton.engine.shared_memory.output_ring import RingWriter
from baton.engine.shared_memory.slot_positions import SlotPositions
from baton.perf_model.step_costs import StepCosts
from baton.request_fields.table import SAMPLING_NUMBERS

if TYPE_CHECKING:
    # Its module brings Triton, which a CPU worker needs not.
    from baton.engine.forward.layer_program import JoinedRows

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
        positions: SlotPositions,
        mixed: Sequence[JoinedRows] = (),
    ) -> None:
        """`mixed`: rows that a pass over prompts can run, too, by batch."""
        self._state = state
        self.mixed = {rows.rows: rows for rows in mixed}
        """Rows that `launch_mixed` may return, by batch: a pass over prompts must be made for them."""
        self.steps = DecodeState(state.shape, tuple(batches_up_to(state.shape.rows)), tuple(self.mixed))
        """Slots and launched steps, for the planner."""
        self._mailbox = mailbox
        self.shape = state.shape
        self.ring = ring
        """The output ring; it counts the steps that ran, and those that found it full."""
        self.measured_costs = StepCosts()
        """Costs of decode steps as measured at the start; zeros where they were not."""
        self.positions = positions
        """Position of each slot's sequence when the last step ended."""

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
    ) -> Entry:
        """The mailbox entry that will admit a prefilled sequence to its slot: `complete` adds its last token,
        and `admit` posts it. The slot's tables are written now, which may be done while its KV is still
        computed or transferred; an entry that is never posted has no effect.

        `token_ids` have KV: the prompt, `prompt_length` long, and what earlier attempts emitted. `masked`:
        each token after the last one waits for its mask (`write_masks`).
        """
        self._state.apply(SlotWrite(grant.slot, blocks=grant.blocks, logit_bias=sampling.logit_bias))
        entry = _entry(EntryKind.ADMIT, grant.slot, grant.generation, self.ring.steps)
        entry["position"] = len(token_ids)
        entry["end"], entry["capacity"] = end, grant.capacity
        entry["stop_ids"] = _NO_STOP
        entry["stop_ids"][0, : len(limits.stop_token_ids)] = limits.stop_token_ids
        stops_from = prompt_length + limits.min_tokens
        entry["stops_from"] = stops_from
        entry["features"] = _features(sampling, held_stops=stops_from > len(token_ids) + 1, masked=masked)
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
        self._state.apply(SlotWrite(slot, counted=counted, last_logprobs=last_logprobs))
        admission["last_token"] = last_token

    def admit(self, admission: Entry) -> None:
        """Posts the admission: the sequence decodes from the next step on. All its KV must be in its
        blocks."""
        admission["from_step"] = self.ring.steps
        self._post(admission)

    def extend(
        self, slot: int, generation: int, more: BlockTables, held: tuple[int, ...], capacity: int
    ) -> None:
        """Gives a slot blocks behind the `held` it has by cache group; they hold `capacity` tokens in all."""
        self._state.apply(SlotWrite(slot, blocks=more, first_blocks=held))
        entry = _entry(EntryKind.EXTEND, slot, generation, self.ring.steps)
        entry["capacity"] = capacity
        self._post(entry)

    def write_masks(self, masks: Sequence[SlotMask]) -> None:
        """Gives the tokens that masked slots may draw at a position of their sequences; at most one mask a
        slot. Once for each token, after the one before it has been drawn. Does not wait for the device.
        """
        self._state.sampler.masks.write(masks)

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

    @property
    def posted(self) -> int:
        """The number of the last entry that was posted, for `applied`."""
        return self._mailbox.posted

    def applied(self, number: int) -> bool:
        """Returns whether that mailbox entry has been applied and every step that began before has ended."""
        return self._mailbox.posted - self._mailbox.pending >= number

    def furthest_tags(self) -> npt.NDArray[np.int64]:
        """The words of `positions` with the furthest positions that the steps which were launched may take
        their sequences to: each by up to `shape.rows_per_slot` tokens."""
        self.observe()  # first: a step that ends meanwhile counts twice, and none is left out
        return self.positions.tags + self.steps.queued * self.shape.rows_per_slot

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

    @property
    def expected_step_s(self) -> float:
        """Predicted seconds of the step that runs, or of the next one; 0 before any was timed."""
        return 0.0

    @property
    def nap_s(self) -> float:
        """Seconds after which a loop that has work, but could not begin a step, should be polled again."""
        return _NAP_S

    def device_hung(self) -> bool:
        """Returns whether a device has pending steps and makes no progress (`DeviceWatchdog`); to be called
        once a turn. Steps that the host computes itself cannot hang unnoticed."""
        return False

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """True where a step would do something, given room in the ring."""

    @property
    @abstractmethod
    def tokens_decoded(self) -> int:
        """Since the loop was made."""

    @abstractmethod
    def observe(self) -> None:
        """Brings `steps` up to date: what has ended, and what is left to do."""

    @abstractmethod
    def launch(self, rows: DecodeRows, between_layers: Callable[[], None] | None = None) -> None:
        """Runs or enqueues one step. `between_layers`: see `StepExecutor.launch`."""

    def launch_mixed(self, rows: DecodeRows) -> JoinedRows | None:
        """Has the next step run as part of a prefill step, which the caller launches next on `stream` with
        the rows that are returned: weights are read once for both. None where steps cannot be part of
        others: then it has been launched by itself."""
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


def _features(sampling: SamplingParams, *, held_stops: bool, masked: bool) -> Feature:
    features = Feature.GREEDY if sampling.temperature == 0 else Feature.TEMPERATURE
    for feature, used in (
        (Feature.FILTERS, sampling.filters),
        (Feature.BIAS, bool(sampling.logit_bias)),
        (Feature.PENALTIES, sampling.penalizes),
        (Feature.MIN_TOKENS, held_stops),
        (Feature.LOGPROBS, sampling.logprobs is not None),
        (Feature.MASKED, masked),
    ):
        if used:
            features |= feature
    return features
