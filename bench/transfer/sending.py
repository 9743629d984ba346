"""The sender that `bench.transfer` measures and drives itself."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.base.process_tuning import keep_freed_memory, sharpen_timers
from baton.v1.decode_pb2 import Ticket, TicketBody
from baton.v1.transfer_pb2 import CommitRecord
from baton.v1.types_pb2 import WorkerIdentity
from bench.transfer.ends import (
    FINGERPRINT,
    PIECES_A_POLL,
    PIECES_A_POLL_ON_GPU,
    TRANSFER,
    TRANSFER_S,
    WAIT_S,
    Blocks,
    block_bytes_on,
    nccl_links_for,
)
from kvtransfer.link.settings import LinkSettings
from kvtransfer.protocol.link_auth import LinkAuth
from kvtransfer.sender.events import Acknowledged, Failed, SenderEvent
from kvtransfer.sender.sender import Sender
from kvtransfer.sender.transfer import Transfer
from kvtransfer.transports.registry import make_connectors

if TYPE_CHECKING:
    from bench.transfer.devices import GpuBlocks, HeldStep

# How long before a step's end its blocks are pushed, as by prefill.
_AHEAD_S = 0.001
_IDENTITY = WorkerIdentity(name="bench", incarnation=b"b" * 16, rank=0, rank_count=1)

Condition = Callable[[list[SenderEvent]], bool]


class SendingEnd:
    """A sender that drives one transfer at a time to its end, or several together."""

    def __init__(
        self,
        blocks: int,
        fingerprint: bytes = FINGERPRINT,
        device: str = "cpu",
        transport: str = "auto",
        block_bytes: int | None = None,
    ) -> None:
        keep_freed_memory()
        sharpen_timers()
        self._woken = threading.Event()
        self._poll_s = WAIT_S
        self._block_bytes = block_bytes or block_bytes_on(device)
        auth = LinkAuth("")
        connectors = make_connectors("auto", self._woken.set, auth=auth)
        if device == "cpu":
            source: Blocks | GpuBlocks = Blocks(blocks, self._block_bytes)
        else:
            from bench.transfer.devices import gpu_blocks

            source, self._poll_s = gpu_blocks(blocks, device, self._block_bytes), 0.0
            nccl = nccl_links_for(transport, source.blocks)
            which = transport if nccl is not None else "auto"
            connectors = make_connectors(which, self._woken.set, source.blocks, nccl, auth)
        self.blocks = source
        self._count = blocks
        self._sender = Sender(
            settings=LinkSettings(_IDENTITY, fingerprint, [self._block_bytes], TRANSFER.peer_timeout_s),
            source=source, wake=self._woken.set,
            connectors=connectors,
        )  # fmt: skip
        self._pieces = PIECES_A_POLL if device == "cpu" else PIECES_A_POLL_ON_GPU

    def begin(self, ticket: Ticket, body: TicketBody) -> Transfer:
        """Begins a transfer as when a prompt's prefill begins: opens the link if needed and sends early
        metadata, but no block."""
        transfer = self._begin(ticket, body)
        self._until(lambda events: any(link.window_pieces for link in self._sender.links))
        return transfer

    def send(self, ticket: Ticket, body: TicketBody, first: int) -> Transfer:
        """Pushes and commits a whole transfer, whose first block is the pool's `first`; `answered`
        drives it."""
        transfer = self._begin(ticket, body)
        transfer.push(0, 0, self._places(transfer, first))
        _commit(transfer)
        return transfer

    def answered(self, wait_s: float) -> list[int]:
        """Polls; the transfers that were acknowledged. Waits at most `wait_s` where there is nothing to do.
        BatonError where one failed."""
        if not self._poll_s:
            wait_s = 0.0
        if wait_s:
            self._woken.wait(min(wait_s, self._poll_s))
        return [event.transfer.transfer_id for event in self._turn() if isinstance(event, Acknowledged)]

    def digest(self, first: int) -> str:
        """The digest of all bytes that a transfer with this `first` block sends, in order."""
        found = hashlib.sha256()
        for ordinal in range(self._count):
            found.update(self.blocks.read(0, self._place(ordinal, first), 0, self._block_bytes))
        return found.hexdigest()

    def _place(self, ordinal: int, first: int) -> int:
        return self.blocks.place((ordinal + first) % self._count)

    def _places(self, transfer: Transfer, first: int = 0) -> list[int]:
        """Pushes all blocks of a transfer whose first is the pool's block `first`."""
        return [self._place(ordinal, first) for ordinal in range(transfer.body.block_counts[0])]

    def commit(self, transfer: Transfer) -> tuple[float, float]:
        """Times at which the first block was pushed and the commit was acknowledged, by the monotonic clock
        in s."""
        places = self._places(transfer)
        begun = time.monotonic()
        transfer.push(0, 0, places)
        return begun, self._acknowledged(transfer)

    def commit_ahead(self, transfer: Transfer, step: HeldStep) -> tuple[float, float]:
        """Pushes blocks before the step that computes them ends, as prefill does. When the step ended, and
        when the commit sent then was acknowledged."""
        transfer.push(0, 0, self._places(transfer), step.begin())
        until = time.monotonic() + _AHEAD_S
        while time.monotonic() < until:
            self._turn()
        return step.end(), self._acknowledged(transfer)

    def _acknowledged(self, transfer: Transfer) -> float:
        """Commits a transfer; when the acknowledgement was received."""
        _commit(transfer)
        self._until(lambda events: any(isinstance(event, Acknowledged) for event in events))
        return time.monotonic()

    def poll(self) -> None:
        """Polls until frames that wait were sent."""
        self._sender.poll(self._pieces)

    @property
    def transport(self) -> str:
        """The transport of the open link."""
        return self._sender.links[0].transport

    def close(self) -> None:
        self._sender.close()

    def _begin(self, ticket: Ticket, body: TicketBody) -> Transfer:
        transfer = self._sender.begin(ticket, body)
        transfer.send_metadata(CommitRecord(attempt=body.attempt, token_ids=[1], prompt_length=1))
        return transfer

    def _until(self, holds: Condition) -> None:
        """Drives a transfer to its acknowledgement. BatonError where it fails, TimeoutError."""
        deadline = time.monotonic() + TRANSFER_S
        while True:
            if holds(self._turn()):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"a transfer took longer than {TRANSFER_S:g} s")
            if self._poll_s:
                self._woken.wait(self._poll_s)

    def _turn(self) -> list[SenderEvent]:
        self._woken.clear()
        events = self._sender.poll(self._pieces)
        for event in events:
            if isinstance(event, Failed):
                raise event.error
        return events


def _commit(transfer: Transfer) -> None:
    transfer.commit(CommitRecord(first_token_id=1))
