"""What an engine process is made of: the loop turns these, `audit` counts them."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.decode.loop import DecodeLoop
from baton.engine.decode.slots import SlotPool
from baton.engine.prefix_cache.cache import PrefixCache
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.sender.sender import Sender
from services.worker.engine.decode.reservations import DecodeSide
from services.worker.engine.prefill.requests import PrefillSide
from services.worker.engine.startup.model_loader import LoadedModel
from services.worker.engine.step_clock import StepClock


@dataclass(slots=True)
class Parts:
    """`receiver` is None where no worker sends blocks to this one, `prefixes` where none are kept."""

    model: LoadedModel
    slots: SlotPool
    prefill: PrefillSide
    decode: DecodeSide
    decode_loop: DecodeLoop
    sender: Sender
    receiver: Receiver | None
    prefill_clock: StepClock
    decode_clock: StepClock
    prefixes: PrefixCache | None = None
