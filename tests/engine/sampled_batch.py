"""Slots with any requests, and given logits for their rows: the full sampler's kernels beside their truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.device.shared_memory import SharedMemory
from baton.engine.decode.graph_sampler import GraphSampler
from baton.engine.decode.slot_state import SlotState
from baton.engine.decode.slots import Grant
from baton.engine.executor.decode_loop import DecodeLoop
from baton.engine.kernels.gpu.step import step_kernels as kernels
from baton.engine.plan.step_plan import DecodeRows
from baton.engine.sequence import Limits, SamplingParams
from baton.engine.shared_memory.layout import SharedRings
from baton.engine.shared_memory.logprob_records import LogprobRecords, Logprobs, logprob_bytes
from bench.engine_driver import admit
from tests.engine.token_filters import filtered_by

GENERATION = 3
_ENDLESS = Limits(1000)


@dataclass(frozen=True)
class Request:
    """`mask`: token ids that may be drawn, or None; `late`: the mask there is for another position."""

    params: SamplingParams
    limits: Limits = _ENDLESS
    prompt: tuple[int, ...] = (1, 2, 3)
    output: tuple[int, ...] = (4,)
    mask: tuple[int, ...] | None = None
    late: bool = False

    @property
    def position(self) -> int:
        """Position of the token to be sampled."""
        return len(self.prompt) + len(self.output)


class _Admitting(DecodeLoop):
    has_work = False
    tokens_decoded = 0

    def observe(self) -> None: ...

    def launch(self, rows: DecodeRows, between_layers: Callable[[], None] | None = None) -> None: ...


def mask_bits(tokens: tuple[int, ...], vocab: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    bits = np.zeros(-(-vocab // 32), dtype=np.uint32)
    for token in tokens:
        bits[token // 32] |= np.uint32(1 << token % 32)
    return bits


class SampledBatch:
    """Request i has slot i. `order`: the slots of a batch's rows."""

    def __init__(
        self,
        requests: list[Request],
        vocab: int,
        *,
        chunk: int = 8192,
        device: str = "cpu",
        top: int = 20,
        head: int = 0,
        rows: int | None = None,
    ) -> None:
        """`rows`: of the batch, by default one for each request."""
        self.requests = requests
        slots = len(requests)
        self.state = SlotState(slots, (1,), vocab, torch.device(device))
        self._rings = SharedRings(slots, top)
        memory = SharedMemory.create("sampled-batch", self._rings.size)
        mailbox = self._rings.mailbox(memory)
        progress = self._rings.progress(memory)
        loop = _Admitting(self.state, mailbox, self._rings.writer(memory), progress)
        for slot, request in enumerate(requests):
            admit(
                loop,
                Grant(slot, GENERATION, ((0,),), 100),
                token_ids=(*request.prompt, *request.output[:-1]),
                prompt_length=len(request.prompt),
                last_token=request.output[-1],
                last_logprobs=None if request.params.logprobs is None else Logprobs(0.0),
                end=len(request.prompt) + request.limits.max_tokens,
                sampling=request.params,
                limits=request.limits,
                masked=request.mask is not None,
            )
            if request.mask is not None:
                position = request.position + request.late
                loop.write_masks([(slot, GENERATION, position, mask_bits(request.mask, vocab))])
        if device != "cpu":
            torch.cuda.synchronize()
        for entry in mailbox.take(0, slots):
            self.state.admit(entry)
        self.sampler = GraphSampler(self.state, rows or slots, vocab, chunk)
        self.control = torch.zeros(kernels.CONTROL_WORDS, dtype=torch.int64, device=device)
        self.control[kernels.HEAD.value] = head
        self.clocks = torch.zeros(
            kernels.CLOCK_LINES.value, kernels.CLOCK_WIDTH.value, dtype=torch.int64, device=device
        )
        self.reported = torch.zeros(self._rings.records_place[1], dtype=torch.int32, device=device)
        self.place = torch.zeros(rows or slots, dtype=torch.int32, device=device)

    def ready(self, order: list[int]) -> list[int]:
        """The rows that are not held."""
        return [row for row, slot in enumerate(order) if not self.requests[slot].late]

    def expected(self, logits: Tensor, order: list[int]) -> tuple[list[int], list[Logprobs | None]]:
        """Tokens and logprobs of the rows that are not held; leaves the state alone."""
        device = logits.device
        rows = self.ready(order)
        slots = torch.tensor([order[row] for row in rows], device=device)
        sampler = self.state.sampler
        positions = self.state.position[slots].long() + 1
        tokens = sampler.draw(logits[rows], slots, positions, self.state.stop_ids)
        batch = sampler.report(logits[rows], tokens, slots)
        reported: list[Logprobs | None] = [None] * len(rows)
        if batch is not None:
            for row, one in zip(batch.rows.tolist(), batch.all(), strict=True):
                reported[row] = one
        return tokens.tolist(), reported

    def drawn(
        self, logits: Tensor, order: list[int], drafts: tuple[list[int], list[int]] | None = None
    ) -> list[int]:
        """All rows' tokens by the kernels; those of held rows mean nothing. `drafts`: token and depth of each
        row."""

        def ints(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=logits.device)

        slots, drawn, position = ints(order), ints([-7] * len(order)), self.state.position[order]
        several = None if drafts is None else (ints(drafts[0]), ints(drafts[1]))
        if several is not None:
            position = position + several[1]
        self.control[kernels.ROWS.value] = len(order)
        self.rows = slots, position.contiguous(), self.place[: len(order)]
        ring = self._rings.ring_words, self._rings.max_logprobs
        self.sampler.draw(drawn, logits, self.rows, self.control, self.clocks, several)
        self.sampler.report(drawn, logits, (slots, self.rows[2]), self.control, self.reported, ring)
        return drawn.tolist()

    def logprobs(self, position: int) -> Logprobs | None:
        """The logprobs in the ring's record of a position."""
        words, top = self._rings.ring_words, self._rings.max_logprobs
        memory = SharedMemory.create("reported", logprob_bytes(words, top))
        memory.bytes[:] = self.reported.cpu().numpy().view(np.uint8)
        return LogprobRecords(memory, 0, words, top).read(position)

    def filtered(self, logits: Tensor, order: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """[rows, V]: logits edited, and those by temperature, before a draw; and which tokens are left."""
        slots = torch.tensor(order, device=logits.device)
        sampler = self.state.sampler
        edits = sampler.edits(
            slots, sampler.features[slots], self.state.position[slots].long() + 1, self.state.stop_ids
        )
        edited = edits.applied(logits).double()
        sampling = sampler.sampling.at(slots)
        scaled = edited / sampling.temperature.double()[:, None]
        left = filtered_by(edited, sampling) > -torch.inf
        return edited, scaled, left

    def kept(self, edited: Tensor, scaled: Tensor) -> Tensor:
        """The tokens that the kernels' thresholds keep."""
        space, rows = self.sampler.space, edited.shape[0]
        cuts, floors = space.cuts[:rows, None], space.floors[:rows, None]
        return (edited >= cuts) & (scaled >= floors) & (edited > -torch.inf)
