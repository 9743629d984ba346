"""The decode side of an engine: tickets, the receiving end of handoffs, decode steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from baton.base.prefill_defaults import MOST_PREFILL_SHARE
from baton.engine.decode.slots import SlotPool
from baton.engine.executor.decode_loop import DecodeLoop
from baton.engine.memory.host_blocks import HostBlocks
from baton.engine.prefix_cache.cache import PrefixCache
from baton.engine.shared_memory.mask_board import MaskBoard
from baton.perf_model.decode_fit import DecodeFit
from baton.perf_model.step_costs import StepCosts
from baton.v1.engine_pb2 import EngineEvent
from baton.v1.types_pb2 import WorkerIdentity
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.protocol.ticket import TicketSigner
from kvtransfer.receiver.receiver import Receiver
from services.worker.engine.decode.block_allocation import BlockAllocation
from services.worker.engine.decode.canary import DecodeCanary
from services.worker.engine.decode.handoff_receiver import HandoffReceiver
from services.worker.engine.decode.prepared_sequences import SequencePreparer
from services.worker.engine.decode.reserved_slots import ReservedBlockSink, ReservedSlots
from services.worker.engine.decode.ticket_issuer import TicketIssuer
from services.worker.engine.startup.model_loader import LoadedModel

# Masks of a guided sequence follow one another at intervals of steps, far shorter than this.
_MASKS_FOLLOW_S = 0.1


class DecodeSide:
    """Constructs the decode side of one engine and gives access to its parts."""

    def __init__(
        self,
        model: LoadedModel,
        loop: DecodeLoop,
        slots: SlotPool,
        sink: ReservedBlockSink,
        *,
        identity: WorkerIdentity,
        signer: TicketSigner,
        emit: Callable[[EngineEvent], None],
        host: HostBlocks,
        reserve_output_tokens: int | None,
        prefix_cache: PrefixCache | None,
        receiver: Receiver | None = None,
        endpoints: tuple[Endpoint, ...] = (),
        certificates: Callable[[], Sequence[str]] | None = None,
        masks: MaskBoard | None = None,
    ) -> None:
        """`host`: room for sequences that are swapped out. `receiver`, which writes into
        `sink`, and its `endpoints`: None and empty where no other worker sends blocks to this one.
        `certificates`: of the endpoints, see TicketIssuer. `masks`: where grammar masks arrive; None:
        never."""
        self._masks = masks
        self._mask_taken_s = -math.inf
        self.loop = loop
        self.slots = slots
        self.sink = sink
        self.tickets = sink.tickets
        self.receiver = receiver
        self.endpoints = endpoints
        self.prefix_cache = prefix_cache
        self.allocation = BlockAllocation(model.pools, loop, host)
        self.reserved = ReservedSlots(
            self.tickets, loop, slots, model.pools, self.allocation, receiver, prefix_cache, emit
        )
        self.canary = DecodeCanary(model, loop, slots)
        block_bytes = sink.wire.block_bytes
        self.issuer = TicketIssuer(
            model,
            self.reserved,
            identity,
            signer,
            endpoints,
            block_bytes,
            reserve_output_tokens,
            certificates,
        )
        # Predicts what steps take, from those measured.
        self.fit = DecodeFit(loop.measured_costs)
        # Context tokens of a sequence on average, when costs were asked for last while any ran. The measured
        # steps may have had more or fewer sequences than run at that time.
        self._context_tokens = 0.0
        preparer = SequencePreparer(model, loop, prefix_cache if receiver is not None else None)
        self.handoffs = HandoffReceiver(self.reserved, preparer, signer, block_bytes)

    def take_masks(self) -> bool:
        """Gives the slots the grammar masks that have arrived; False where there were none."""
        if self._masks is None:
            return False
        taken = [mask for mask in self._masks.take() if mask[0] < self.slots.total]
        if taken:
            self._mask_taken_s = time.monotonic()
            self.loop.write_masks(taken)
        return bool(taken)

    @property
    def masks_expected(self) -> bool:
        """True if masks have arrived lately: the next ones, which no wakeup announces, have to reach the
        device before the step that runs samples."""
        return time.monotonic() - self._mask_taken_s < _MASKS_FOLLOW_S

    def costs(self, waiting_share: float) -> StepCosts:
        """Returns the costs of steps, by the last second's and those of the calls before. `waiting_share`: of
        the time that the clock has measured, by which prefill steps made steps later or longer; where that is
        nearly all of it, steps say nothing."""
        recent, rates = self.loop.times.recent(), self.loop.draft_rates
        if running := self.allocation.running:
            self._context_tokens = self.allocation.context_tokens / running
        if recent.steps and recent.mean_ms > 0 and waiting_share < MOST_PREFILL_SHARE:
            sequences = recent.tokens / recent.steps / self.loop.progress.mean_tokens_a_step()
            seconds = recent.mean_ms / 1e3 * (1 - waiting_share)
            rows = sequences * (1.0 if rates is None else rates.rows_a_sequence)
            self.fit.observe(sequences, sequences * self._context_tokens, seconds, rows)
        return self.loop.reported_costs(self.fit.costs, self._context_tokens)

    def step_s(self) -> float:
        """Predicted seconds of a step by itself, by the costs that were asked for last; 0 before."""
        return self.fit.costs.decode_s(self.allocation.running, self.allocation.context_tokens)
