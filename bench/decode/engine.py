"""A decode loop over random weights and KV, with its front in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from baton.engine.decode.lookahead_fill import LookaheadFill
from baton.engine.decode.slot_state import SlotState
from baton.engine.speculation.lookahead_table import LookaheadTable, Output
from baton.model_spec.split import splits
from bench.case import BLOCK_TOKENS, MOST_READ_BYTES_S, DecodeCase, EngineSize
from bench.decode.clocks import ClockReader, Lines, clock_source
from bench.decode.front import Front
from bench.engine_driver import admit, decode_step, places_of, random_model, randomize, whole_layout
from bench.markov_text import chain, cycle_of, encode

if TYPE_CHECKING:
    from baton.engine.decode.slots import Grant
    from baton.engine.model.modules import Model
    from baton.engine.parallel.rank_exchange import DeviceGroup
    from services.worker.engine.startup.model_loader import LoadedModel

Key = tuple[int, int]
DEADLINE_S = 120.0
_TENANT = "bench"
# Tokens of an output that a lookahead table learns, where a history holds as many.
_LEARNED_TOKENS = 400
# A turn that had nothing to do.
_IDLE_S = 0.0001


class DecodeEngine:
    """Model, slots, loop and front. `close` ends the front; all calls come from one thread."""

    def __init__(
        self,
        case: DecodeCase,
        size: EngineSize,
        front: Callable[[int, int, int], Front],
        *,
        device: str = "cuda",
        interpreted: bool = False,
        mixes: bool = False,
        group: Callable[[Sequence[Model], int], DeviceGroup] | None = None,
    ) -> None:
        """`front` creates the reader of the ring from its memory's descriptor, the slots and their rows.
        `mixes`: whether steps may be part of prefill steps.

        `interpreted`: on a CPU, run the graphs' kernels in Triton's interpreter instead of the plain loop.
        `group`: makes what several devices exchange through; None: as GPUs do.
        """
        from baton.device.shared_memory import SharedMemory
        from baton.engine.decode.slots import SlotPool
        from baton.engine.executor.decode_factory import decode_loop
        from baton.engine.shared_memory.layout import SharedRings

        if device != "cpu":
            from bench.decode.timing import read_bytes_s
        if size.rows_per_slot > 1:
            from bench.oracle import Oracle, count_up
        looks_up = size.chance is not None
        change: dict[str, Any] = {"change": count_up} if size.accepts else {}
        if size.chance is not None:
            change = {"change": partial(encode, chance=size.chance)}
        shape, count = (case.model, case.precision, size.tokens + 1, BLOCK_TOKENS), case.tensor_parallel
        ranks = [
            random_model(*shape, place, split=split, **change)
            for place, split in zip(places_of(device, count), splits(count), strict=True)
        ]
        self.decoder = ranks[0]
        self.model = _model(ranks, case, size)
        self.size = size
        self.read_bytes_s = MOST_READ_BYTES_S if device == "cpu" else read_bytes_s()
        self.slots = SlotPool(size.slots)
        self._rings = SharedRings(size.slots, rows_per_slot=size.rows_per_slot)
        self._memory = SharedMemory.create("bench-decode", self._rings.size)
        widths = tuple(group.blocks_for(size.tokens) for group in self.model.layout.groups)
        vocab, rows = self.model.config.vocab_size, size.rows_per_slot
        lookup_tokens = size.tokens if looks_up and rows > 1 else 0
        place = self.decoder.device
        table = _full_table(size, vocab, place) if size.lookahead_mb and lookup_tokens else None
        state = SlotState(size.slots, widths, vocab, place, rows, lookup_tokens, table)
        self.oracle = Oracle(state, vocab) if rows > 1 and not looks_up else None
        self.loop = decode_loop(
            self.model.ranks,
            self.model.cache,
            state,
            self._rings,
            self._memory,
            exact=case.numerics == "exact",
            interpreted=interpreted,
            mixes=mixes,
            propose=self.oracle,
            group=group and group(ranks, size.slots),
        )
        # Not before: a start measures how fast the cache is read, by copying some of it to another place,
        # where codes become scales.
        for cache in self.model.cache.ranks:
            randomize(cache)
        self.draft_batches, self.loop.steps.draft_batches = self.loop.steps.draft_batches, ()
        """Numbers of rows that steps with drafts may have; steps have none unless a run sets them."""
        self.learner = Learner(state, case.ends) if case.ends else None
        # What the sequences that run hold, until the front has read their last word.
        self.holds: dict[Key, Grant] = {}
        self.front = front(self._memory.fd, size.slots, size.rows_per_slot)

    @property
    def ended_steps(self) -> int:
        """Replays that ran or found the ring full."""
        return self.loop.ring.steps + self.loop.ring.full_steps

    def close(self) -> dict[str, Any]:
        """Ends the front; returns its report."""
        return self.front.close()

    def clocks(self) -> ClockReader | None:
        """A reader of every step from now on; None where the loop has no clocks."""
        source = clock_source(self.loop)
        return None if source is None else ClockReader(source, self.ended_steps)

    def admit(self, case: DecodeCase, index: int, output: int) -> Key:
        """Admits one sequence of `context` tokens that ends after `output` more."""
        from baton.engine.decode.slots import Grant
        from baton.engine.sequence import Limits, SamplingParams

        slot, generation = self.slots.grant()
        end = case.context + output
        grant = Grant(slot, generation, self.model.pools.allocate(end - 1), end - 1)
        self.holds[slot, generation] = grant
        sampling = SamplingParams(seed=index, **case.sampled)
        prompt, last_token = self._text(case, index)
        admit(
            self.loop,
            grant,
            token_ids=prompt,
            prompt_length=case.context,
            last_token=last_token,
            last_logprobs=first_logprobs() if sampling.logprobs is not None else None,
            end=end,
            sampling=sampling,
            limits=Limits(output),
            tenant=_TENANT,
        )
        return slot, generation

    def _text(self, case: DecodeCase, index: int) -> tuple[list[int], int]:
        """The prompt of a sequence, and its first token."""
        if case.chance is not None:
            ids = cycle_of(self.model.config.hidden_size)
            *prompt, last = chain(case.chance, case.context + 1, index, ids)
            return prompt, last
        vocab = self.model.config.vocab_size
        return [token % vocab for token in range(case.context)], index * 977 % vocab

    def decode(self, case: DecodeCase, output: int, tokens: int) -> None:
        """Admits the case's batch, each sequence with an output of `output` tokens, and turns until they have
        decoded `tokens` each on average."""
        wanted = self.loop.tokens_decoded + case.batch * tokens
        for index in range(case.batch):
            self.admit(case, index, output)
        self.turn_until(lambda: self.loop.tokens_decoded >= wanted)

    def advance(self, between_layers: Callable[[], None] | None = None) -> bool:
        """Frees ended sequences and enqueues a step if possible; returns False if there was nothing to do.
        `between_layers`: see `StepExecutor.launch`."""
        for key in self.front.ended():
            grant = self.holds.pop(key)
            self.model.pools.release(grant.blocks)
            self.slots.release(*key)
        if self.learner is not None:
            self.learner.turn()
        return decode_step(self.loop, between_layers)

    def turn(self) -> bool:
        """`advance`, and a short sleep if there was nothing to do."""
        if self.advance():
            return True
        time.sleep(_IDLE_S)
        return False

    def turn_until(self, done: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        """Turns until a condition holds. Raises TimeoutError, and ExchangeTimeoutError where one of several
        devices has waited for another in vain."""
        deadline, several = time.monotonic() + deadline_s, len(self.model.ranks) > 1
        while not done():
            self.turn()
            if several and self.loop.device_hung():
                raise TimeoutError("the devices make no progress")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done after {deadline_s} s")

    def empty(self) -> None:
        """Cancels all sequences, and waits until every slot is free."""
        for key in self.holds:
            self.loop.cancel(*key)
        self.turn_until(lambda: not self.holds)
        self.drain()

    def drain(self) -> None:
        """Waits until the GPU is idle, without enqueuing."""
        if self.decoder.device.type == "cuda":
            import torch

            for rank in self.model.ranks:
                torch.cuda.synchronize(rank.device)

    def first_token(self, case: DecodeCase) -> None:
        """Runs a sequence to its first token, so that all that a first step loads is there."""
        before = self.loop.tokens_decoded
        self.admit(case, 0, 4)
        self.turn_until(lambda: self.loop.tokens_decoded > before)
        self.empty()

    def lines_of(self, reader: ClockReader | None) -> Lines | None:
        return None if reader is None else reader.finish(self.ended_steps)


def first_logprobs() -> Any:
    """The first logprobs of a sequence that requests them."""
    from baton.engine.shared_memory.logprob_records import Logprobs

    return Logprobs(-1.0, tuple((token, -1.0 - token) for token in range(5)))


def _full_table(size: EngineSize, vocab: int, device: Any) -> LookaheadTable:
    """A lookahead table whose cells are in use, by keys that no text has."""
    table = LookaheadTable(size.slots, size.lookahead_mb * 10**6, vocab, device)
    table.cells.random_()
    return table


def _model(ranks: Sequence[Model], case: DecodeCase, size: EngineSize) -> LoadedModel:
    """The model that these are the parts of, with an empty cache."""
    from baton.engine.memory.block_pools import BlockPools
    from baton.engine.memory.kv_cache import KVCache
    from baton.engine.memory.split_cache import SplitKVCache
    from baton.engine.shared_memory.logprob_records import MAX_LOGPROBS
    from services.common.config.worker import EngineConfig
    from services.worker.engine.startup.model_loader import LoadedModel

    decoder = ranks[0]
    blocks = [size.blocks()] * len(decoder.layout.groups)
    caches = [KVCache(rank.layout, blocks, rank.device) for rank in ranks]
    whole = whole_layout(decoder)
    return LoadedModel(
        config=decoder.config,
        ranks=tuple(ranks),
        cache=caches[0] if len(caches) == 1 else SplitKVCache(whole, caches),
        pools=BlockPools(whole, blocks),
        slots=size.slots,
        max_context_tokens=size.tokens + 1,
        max_logprobs=MAX_LOGPROBS,
        device=decoder.device,
        fingerprint=b"",
        exact=case.numerics == "exact",
        checkpoint=b"",
        tokenizer=b"",
        weight_format="",
        chunk_tokens=EngineConfig().chunk_tokens_on(decoder.device.type),
    )


class Learner:
    """Learns the texts of slots, in turn, into a table of its own: the steps' would else propose them."""

    def __init__(
        self, state: SlotState, outputs_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`outputs_s`: outputs a second. Raises ValueError for slots without histories or a table."""
        if state.history is None or state.lookahead is None:
            raise ValueError("a lookahead table learns from histories, and there are none")
        self._slots, self._gap_s, self._clock = state.shape.slots, 1 / outputs_s, clock
        size, device = state.lookahead.device_bytes, state.records.device
        vocab = state.sampler.counts.in_output.shape[1]
        self._table = LookaheadTable(self._slots, size, vocab, device)
        for slot in range(self._slots):
            self._table.begin(slot, "", 0)
        self._fill = LookaheadFill(self._table, state.history)
        self._output_tokens = min(_LEARNED_TOKENS, state.history.length - 1)
        self._next = clock()
        self.learned = 0

    def turn(self) -> None:
        """Begins to learn an output where one is due."""
        now = self._clock()
        if now < self._next:
            return
        self._next = max(self._next + self._gap_s, now - self._gap_s)
        slot, end = self.learned % self._slots, 1 + self._output_tokens
        self._fill.learn(Output(slot, 0, end, self.learned % (1 << 16)))
        self.learned += 1


class StepLines:
    """Start and end of each step, by the GPU's clock, or the host's where that computes. Constructed while
    nothing runs; `turned` is called by the loop's thread."""

    def __init__(self, engine: DecodeEngine) -> None:
        self._engine = engine
        self._reader = engine.clocks()
        self._first = self._seen = engine.ended_steps
        self._tokens = engine.loop.tokens_decoded
        self._own: list[tuple[int, int, int, int]] = []

    @property
    def clock(self) -> str:
        return "host" if self._reader is None else "gpu"

    def turned(self, begun_ns: int) -> None:
        """Records the end of a turn of the loop that began at that time."""
        ended = self._engine.ended_steps
        if self._reader is not None:
            self._reader.look(ended)
        elif ended > self._seen:
            tokens = self._engine.loop.tokens_decoded
            self._own.append((begun_ns, 0, time.monotonic_ns(), tokens - self._tokens))
            self._seen, self._tokens = ended, tokens

    def of(self, first: int, steps: int) -> Lines:
        """The lines of `steps` steps after `first` had ended; no step may be running."""
        lines = self._engine.lines_of(self._reader)
        found = np.array(self._own, np.int64).reshape(-1, 4) if lines is None else lines
        return found[first - self._first :][:steps]
