"""Both steps of an engine in this process, with a reader that only empties the ring."""

from __future__ import annotations

import torch

from baton.device.shared_memory import SharedMemory
from baton.engine.decode import DecodeLoop
from baton.engine.prefill import PrefillLoop
from baton.engine.prefill_scheduler import PrefillScheduler
from baton.engine.sequence import Limits, SamplingParams, Sequence
from baton.engine.shared_rings import SharedRings
from baton.engine.slot_state import SlotState
from baton.engine.slots import Grant, SlotPool
from services.worker.loaded_model import LoadedModel


class BareEngine:
    """`prefill_one` fills a slot, `step` advances all of them."""

    def __init__(self, model: LoadedModel, slots: int) -> None:
        rings = SharedRings(slots)
        memory = SharedMemory.create("bare-engine", rings.size)
        widths = tuple(group.blocks_for(model.max_context_tokens) for group in model.layout.groups)
        state = SlotState(slots, widths, model.config.vocab_size, torch.device(model.device))
        self._model = model
        self._reader = rings.reader(memory)
        self._slots = SlotPool(slots)
        self._decode = DecodeLoop(
            model.decoder, model.cache, state, rings.mailbox(memory), rings.writer(memory)
        )
        scheduler = PrefillScheduler(model.pools, chunk_tokens=1 << 20, max_sequences=slots)
        self._prefill = PrefillLoop(model.decoder, model.cache, scheduler)

    def prefill_one(self, prompt: int, max_tokens: int) -> None:
        """Prefills a greedy prompt of `prompt` tokens and admits it."""
        sequence = Sequence(tuple(range(prompt)), prompt, SamplingParams(), Limits(max_tokens))
        slot, generation = self._slots.grant()
        sequence.blocks, sequence.borrowed = self._model.pools.allocate(sequence.end - 1), True
        self._prefill.scheduler.add(sequence)
        (result,) = self._prefill.step()
        self._prefill.scheduler.remove(sequence)
        assert result.token is not None
        self._decode.admit(
            Grant(slot, generation, sequence.blocks, sequence.end - 1),
            token_ids=sequence.token_ids,
            prompt_length=prompt,
            last_token=result.token,
            end=sequence.end,
            sampling=sequence.sampling,
            limits=sequence.limits,
        )

    def step(self) -> None:
        self._decode.step()
        self._reader.read()
