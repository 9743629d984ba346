"""A decode loop over random weights and KV, with its front in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.decode.case import BLOCK_TOKENS, MOST_READ_BYTES_S, SAMPLINGS, Case, EngineSize
from bench.decode.clocks import ClockReader, Lines
from bench.decode.front import Front
from bench.engine_driver import admit, decode_step
from bench.random_model import random_model, randomize

if TYPE_CHECKING:
    from baton.engine.decode.slots import Grant
    from services.worker.engine.startup.model_loader import LoadedModel

Key = tuple[int, int]
DEADLINE_S = 120.0
# A turn that had nothing to do.
_IDLE_S = 0.0001


@dataclass(slots=True)
class Started:
    """Seconds: to create the weights, from there to the graphs, from there to the first token."""

    weights_s: float
    graphs_s: float
    first_token_s: float = 0.0


class DecodeEngine:
    """Model, slots, loop and front. `close` ends the front; all calls come from one thread."""

    def __init__(
        self,
        case: Case,
        size: EngineSize,
        front: Callable[[int, int], Front],
        *,
        device: str = "cuda",
        interpreted: bool = False,
        mixes: bool = False,
    ) -> None:
        """`front` creates the reader of the ring from its memory's descriptor and the number of slots.
        `mixes`: whether steps may be part of prefill steps.

        `interpreted`: on a CPU, run the graphs' kernels in Triton's interpreter instead of the plain loop.
        """
        from baton.device.shared_memory import SharedMemory
        from baton.engine.decode.slot_state import SlotState
        from baton.engine.decode.slots import SlotPool
        from baton.engine.executor.decode_factory import decode_loop
        from baton.engine.shared_memory.layout import SharedRings

        if device != "cpu":
            from bench.read_bandwidth import read_bytes_s
        begun = time.perf_counter()
        self.decoder = random_model(case.model, case.precision, size.tokens + 1, BLOCK_TOKENS, device)
        weights = time.perf_counter()
        self.weight_bytes = _allocated(device)
        self.model = _model(self.decoder, case, size)
        self.size = size
        self.read_bytes_s = MOST_READ_BYTES_S if device == "cpu" else read_bytes_s()
        self.slots = SlotPool(size.slots)
        self._rings = SharedRings(size.slots)
        self._memory = SharedMemory.create("bench-decode", self._rings.size)
        widths = tuple(group.blocks_for(size.tokens) for group in self.model.layout.groups)
        state = SlotState(size.slots, widths, self.model.config.vocab_size, self.decoder.device)
        self.loop = decode_loop(
            self.decoder,
            self.model.cache,
            state,
            self._rings,
            self._memory,
            exact=case.numerics == "exact",
            interpreted=interpreted,
            mixes=mixes,
        )
        self.started = Started(weights - begun, time.perf_counter() - weights)
        self._weights_ready = weights
        # What the sequences that run hold, until the front has read their last word.
        self.holds: dict[Key, Grant] = {}
        self.front = front(self._memory.fd, size.slots)

    @property
    def ended_steps(self) -> int:
        """Whether every replay either ran or found the ring full."""
        return self.loop.ring.steps + self.loop.ring.full_steps

    def close(self) -> dict[str, Any]:
        """Ends the front; returns its report."""
        return self.front.close()

    def clocks(self) -> ClockReader | None:
        """A reader of every step from now on; None where the loop has no clocks."""
        from bench.decode.gpu_clocks import clock_source

        source = clock_source(self.loop)
        return None if source is None else ClockReader(source, self.ended_steps)

    def admit(self, case: Case, index: int, output: int) -> Key:
        """Admits one sequence of `context` tokens that ends after `output` more."""
        from baton.engine.decode.slots import Grant
        from baton.engine.sequence import Limits, SamplingParams

        slot, generation = self.slots.grant()
        end = case.context + output
        grant = Grant(slot, generation, self.model.pools.allocate(end - 1), end - 1)
        self.holds[slot, generation] = grant
        sampling = SamplingParams(seed=index, **SAMPLINGS[case.sampling])
        admit(
            self.loop,
            grant,
            token_ids=self._prompt(case.context),
            prompt_length=case.context,
            last_token=(index * 977) % self.model.config.vocab_size,
            last_logprobs=first_logprobs() if sampling.logprobs is not None else None,
            end=end,
            sampling=sampling,
            limits=Limits(output),
        )
        return slot, generation

    def _prompt(self, tokens: int) -> list[int]:
        vocab = self.model.config.vocab_size
        return [token % vocab for token in range(tokens)]

    def advance(self, between_layers: Callable[[], None] | None = None) -> bool:
        """Frees ended sequences and enqueues a step if possible; returns False if there was nothing to do.
        `between_layers`: see `StepExecutor.launch`."""
        for key in self.front.ended():
            grant = self.holds.pop(key)
            self.model.pools.release(grant.blocks)
            self.slots.release(*key)
        return decode_step(self.loop, between_layers)

    def turn(self) -> bool:
        """`advance`, and a short sleep if there was nothing to do."""
        if self.advance():
            return True
        time.sleep(_IDLE_S)
        return False

    def turn_until(self, done: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        """Turns until a condition holds. Raises TimeoutError."""
        deadline = time.monotonic() + deadline_s
        while not done():
            self.turn()
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

            torch.cuda.synchronize()

    def first_token(self, case: Case) -> None:
        """Records in `started` when the first token was in the ring."""
        before = self.loop.tokens_decoded
        self.admit(case, 0, 4)
        self.turn_until(lambda: self.loop.tokens_decoded > before)
        self.started.first_token_s = time.perf_counter() - self._weights_ready
        self.empty()

    def lines_of(self, reader: ClockReader | None) -> Lines | None:
        return None if reader is None else reader.finish(self.ended_steps)


def first_logprobs() -> Any:
    """The first logprobs of a sequence that requests them."""
    from baton.engine.shared_memory.logprob_records import Logprobs

    return Logprobs(-1.0, tuple((token, -1.0 - token) for token in range(5)))


def _allocated(device: str) -> int:
    import torch

    return torch.cuda.memory_allocated() if torch.device(device).type == "cuda" else 0


def _model(decoder: Any, case: Case, size: EngineSize) -> LoadedModel:
    """The decoder with a cache of random values."""
    from baton.engine.memory.block_pools import BlockPools
    from baton.engine.memory.kv_cache import KVCache
    from baton.engine.shared_memory.logprob_records import MAX_LOGPROBS
    from services.worker.engine.startup.model_loader import LoadedModel

    blocks = [size.blocks()] * len(decoder.layout.groups)
    cache = KVCache(decoder.layout, blocks, decoder.device)
    randomize(cache)
    return LoadedModel(
        config=decoder.config,
        decoder=decoder,
        cache=cache,
        pools=BlockPools(decoder.layout, blocks),
        slots=size.slots,
        max_context_tokens=size.tokens + 1,
        max_logprobs=MAX_LOGPROBS,
        device=decoder.device,
        fingerprint=b"",
        exact=case.numerics == "exact",
        checkpoint=b"",
        tokenizer=b"",
        weight_format="",
    )
