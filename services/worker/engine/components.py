"""The components of an engine's two sides, as `assembly` wires them."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.decode.loop import DecodeLoop
from baton.engine.decode.slots import SlotPool
from baton.engine.prefill.loop import PrefillLoop
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.sender.sender import Sender
from services.worker.engine.decode.block_allocation import BlockAllocation
from services.worker.engine.decode.block_sink import ReservedBlockSink
from services.worker.engine.decode.handoff_receiver import HandoffReceiver
from services.worker.engine.decode.reservation import Reservation
from services.worker.engine.decode.reserved_slots import ReservedSlots
from services.worker.engine.decode.ticket_issuer import TicketIssuer
from services.worker.engine.decode.ticket_table import TicketTable
from services.worker.engine.prefill.jobs import PrefillJobs
from services.worker.engine.prefill.step_pipeline import PrefillPipeline
from services.worker.engine.step_clock import StepClock


@dataclass(frozen=True, slots=True)
class DecodeComponents:
    """The decode side: tickets, the receiving end of handoffs, decode steps. `receiver` is None where no
    other worker sends blocks to this one."""

    loop: DecodeLoop
    clock: StepClock
    slots: SlotPool
    tickets: TicketTable[Reservation]
    sink: ReservedBlockSink
    allocation: BlockAllocation
    receiver: Receiver | None
    endpoints: tuple[Endpoint, ...]
    reserved: ReservedSlots
    issuer: TicketIssuer
    handoffs: HandoffReceiver


@dataclass(frozen=True, slots=True)
class PrefillComponents:
    """The prefill side: prompts, the sending end of handoffs, prefill steps."""

    loop: PrefillLoop
    clock: StepClock
    sender: Sender
    jobs: PrefillJobs
    pipeline: PrefillPipeline
