"""What an engine process is made of: the loop turns these, `audit` counts them."""

from __future__ import annotations

from dataclasses import dataclass

from baton.engine.decode import DecodeLoop
from baton.engine.prefix_cache import PrefixCache
from baton.engine.slots import SlotPool
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from services.worker.decode_side import DecodeSide
from services.worker.loaded_model import LoadedModel
from services.worker.prefill_side import PrefillSide
from services.worker.step_clock import StepClock


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
