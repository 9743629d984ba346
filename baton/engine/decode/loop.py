"""The decode step: every active slot advances by one token, and nothing is asked of the host.

A step applies the mailbox, runs the model over the active rows, samples, checks stops, advances,
and writes the output ring. Two back ends do it with the same arrays, rings and order: `torch_decode`
anywhere, `graph_decode` on a GPU. What the host says to either is here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from baton.engine.decode.slot_state import SlotState
from baton.engine.decode.slots import Grant
from baton.engine.memory.blocks import BlockTables
from baton.engine.rings.logprob_records import Logprobs
from baton.engine.rings.mailbox import ENTRY, Entry, EntryKind, Feature, Mailbox
from baton.engine.rings.output_ring import RingWriter
from baton.engine.sequence import Limits, SamplingParams

_NO_STOP = -1
# The longest that a loop with work should be left alone before it is asked for its next step.
_NAP_S = 0.001


class DecodeLoop(ABC):
    """The host's verbs (`admit`, `grow`, `hold`, `move`, `cancel`) and the `step` they take effect in."""

    def __init__(
        self,
        state: SlotState,
        mailbox: Mailbox,
        ring: RingWriter,
        before_step: Callable[[float], None] | None = None,
    ) -> None:
        """`before_step` is called with `expected_step_s` before a step that the host computes itself, which
        blocks its caller."""
        self._state = state
        self._mailbox = mailbox
        self._ring = ring
        self._before_step = before_step

    @property
    def ring(self) -> RingWriter:
        """Its counters say how many steps ran, and how many could not."""
        return self._ring

    def admission(
        self,
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
    ) -> Entry:
        """`begin_admission` and `complete`, where all is known."""
        entry = self.begin_admission(
            grant, token_ids=token_ids, prompt_length=prompt_length, end=end, sampling=sampling,
            limits=limits, masked=masked,
        )  # fmt: skip
        self.complete(
            entry, token_ids=token_ids, prompt_length=prompt_length, sampling=sampling, last_token=last_token,
            last_logprobs=last_logprobs,
        )  # fmt: skip
        return entry

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
        """What gives a prefilled sequence its slot, once it has its last token (`complete`) and is told
        (`admit`). The slot's tables are written now: while its KV is computed or on its way this may be done,
        and left at that.

        `token_ids` have KV: the prompt, `prompt_length` long, and what earlier attempts emitted. `masked`:
        each token after the last one waits for its mask (`write_mask`).
        """
        self._state.set_block_table(grant.slot, grant.blocks)
        if sampling.logit_bias:
            self._state.sampler.set_bias(grant.slot, sampling.logit_bias)
        entry = _entry(EntryKind.ADMIT, grant.slot, grant.generation, self._ring.steps)
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
        """`last_token` is the one behind `token_ids`, without KV; all else as it was said before. The
        slot's first word in the ring repeats it with `last_logprobs`, without which a request for logprobs is
        refused (ValueError)."""
        if (last_logprobs is None) != (sampling.logprobs is None):
            raise ValueError("the last token comes with logprobs exactly where they are asked for")
        slot = int(admission["slot"][0])
        if sampling.penalizes:
            output = [*token_ids[prompt_length:], last_token]
            self._state.sampler.set_counts(slot, token_ids[:prompt_length], output)
        if last_logprobs is not None:
            self._state.sampler.set_last_logprobs(slot, last_logprobs)
        admission["last_token"] = last_token

    def admit(self, admission: Entry) -> None:
        """From the next step on the sequence decodes: all its KV is in its blocks."""
        admission["from_step"] = self._ring.steps
        self._post(admission)

    def grow(
        self, slot: int, generation: int, more: BlockTables, held: tuple[int, ...], capacity: int
    ) -> None:
        """Gives a slot blocks behind the `held` it has by cache group; they hold `capacity` tokens in all."""
        self._state.extend_block_table(slot, more, held)
        entry = _entry(EntryKind.GROW, slot, generation, self._ring.steps)
        entry["capacity"] = capacity
        self._post(entry)

    def write_mask(self, slot: int, generation: int, position: int, bits: npt.NDArray[np.uint32]) -> None:
        """Says which tokens a masked slot may draw at `position` of its sequence: token t is bit t % 32 of
        word t // 32. Once for each token, after the one before it has come; nothing waits for it here.
        """
        self._state.sampler.masks.write(slot, generation, position, bits)

    def hold(self, slot: int, generation: int) -> int:
        """Stops a slot where it is, until it grows; the number by which `applied` knows when it stands."""
        self._post(_entry(EntryKind.GROW, slot, generation, self._ring.steps))
        return self._mailbox.posted

    @property
    def posted(self) -> int:
        """The number of the last entry that was posted, by which `applied` knows it."""
        return self._mailbox.posted

    def applied(self, number: int) -> bool:
        """Whether the steps have heard of that entry, and none that had not still runs."""
        return self._mailbox.posted - self._mailbox.pending >= number

    def move(self, slot: int, generation: int) -> None:
        """`cancel` of a sequence that is to go on elsewhere; the ring says so."""
        self._post(_entry(EntryKind.MOVE, slot, generation, self._ring.steps))

    def cancel(self, slot: int, generation: int) -> None:
        """Ends a slot from the next step on; the ring tells its finish, this one or an earlier."""
        self._post(_entry(EntryKind.CANCEL, slot, generation, self._ring.steps))

    def _post(self, entry: Entry) -> None:
        self._mailbox.post(entry)

    @property
    def expected_step_s(self) -> float:
        """Predicted seconds of the step that runs, or of the next one; 0 before any was timed."""
        return 0.0

    @property
    def nap_s(self) -> float:
        """Seconds after which a loop that has work, but could not begin a step, should be asked again."""
        return _NAP_S

    def device_hung(self) -> bool:
        """Whether a device has pending steps and makes no progress (`DeviceWatchdog`); to be asked once a
        turn. Steps that the host computes itself cannot hang behind its back."""
        return False

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether a step would do something, given room in the ring."""

    @property
    @abstractmethod
    def tokens_decoded(self) -> int:
        """Since the loop was made."""

    @abstractmethod
    def step(self, between_layers: Callable[[], None] | None = None) -> bool:
        """Runs one step or enqueues one; False where there was nothing to do or no room in the output ring.

        `between_layers` is called between the layers of a step that the host computes itself, for work that
        cannot wait for its end and touches no active slot. A step on a GPU blocks no caller and ignores it.
        """


def _entry(kind: EntryKind, slot: int, generation: int, from_step: int) -> Entry:
    entry: Entry = np.zeros(1, dtype=ENTRY)
    entry["kind"], entry["slot"], entry["generation"], entry["from_step"] = kind, slot, generation, from_step
    return entry


def _write_sampling(entry: Entry, sampling: SamplingParams) -> None:
    for field in (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ):
        entry[field] = getattr(sampling, field)
    entry["seed"] = np.uint64(sampling.seed).astype(np.int64)
    entry["logprobs"] = sampling.logprobs or 0


def _features(sampling: SamplingParams, *, held_stops: bool, masked: bool) -> Feature:
    features = Feature.GREEDY if sampling.temperature == 0 else Feature.TEMPERATURE
    if sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0):
        features |= Feature.FILTERS
    for feature, used in (
        (Feature.BIAS, bool(sampling.logit_bias)),
        (Feature.PENALTIES, sampling.penalizes),
        (Feature.MIN_TOKENS, held_stops),
        (Feature.LOGPROBS, sampling.logprobs is not None),
        (Feature.MASKED, masked),
    ):
        if used:
            features |= feature
    return features
