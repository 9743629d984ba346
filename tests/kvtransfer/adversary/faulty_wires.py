"""Wires between a sender and any transport that apply each transfer's trial.

They stand where the transport's own completions are: whatever they swap, repeat or hold back looks to both
ends as if the transport had done it.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast

from baton.base.errors import BatonError
from baton.device.streams.stream import Event
from kvtransfer.link.interfaces import Connector, DeviceSenderWire, SenderWire
from kvtransfer.protocol.frames import (
    Commit,
    Credit,
    Metadata,
    Piece,
    ReceiverFrame,
    SenderControl,
    StopAck,
    Withdraw,
    WithdrawReason,
)
from tests.kvtransfer.adversary.trials import Fault, Trial
from tests.kvtransfer.support.wrapped import WrappedConnector


class FaultyWire:
    """Passes frames on, except for the faults of their transfer's trial."""

    on_device = False
    shares_clock = False

    def __init__(self, wire: SenderWire, trials: Callable[[int], Trial | None], dice: random.Random) -> None:
        self._wire = wire
        self._trials = trials
        self._dice = dice
        self._held: list[tuple[Piece, bytes]] = []  # overtaken by others
        self._kept: dict[int, tuple[Piece, bytes]] = {}  # overtaken by its own commit
        self._first: dict[int, tuple[Piece, bytes]] = {}  # to be repeated
        self._late: deque[tuple[int, ReceiverFrame]] = deque()
        self._again: deque[ReceiverFrame] = deque()
        self._calls = 0

    def put(self, piece: Piece, payload: memoryview) -> None:
        trial = self._trials(piece.transfer)
        data = bytes(payload)
        if trial is None:
            self._pass(piece, data)
            return
        trial.pieces += 1
        if trial.pieces < trial.strikes_at:
            self._pass(piece, data)
            return
        match trial.fault:
            case Fault.FLIPPED_BIT if trial.struck():
                self._pass(piece, _flipped(data, self._dice))
            case Fault.MISPLACED_PIECE if trial.struck():
                self._pass(_misplaced(piece, self._dice), data)
            case Fault.FOREIGN_PIECE if (other := self._other(piece.transfer)) and trial.struck():
                self._pass(dataclasses.replace(piece, transfer=other), data)
            case Fault.REORDERED_PIECES:
                self._hold(piece, data)
                trial.struck()
            case Fault.EARLY_COMMIT if piece.transfer not in self._kept:
                self._kept[piece.transfer] = piece, data
            case Fault.REPEATED_PIECE if piece.transfer not in self._first:
                self._first[piece.transfer] = piece, data
                self._pass(piece, data)
            case Fault.REPEATED_PIECE if trial.struck():
                first, earlier = self._first[piece.transfer]
                self._pass(dataclasses.replace(first, staging=piece.staging), earlier)
            case Fault.STOLEN_INDEX if trial.struck():
                self._pass(dataclasses.replace(piece, staging=piece.staging + 1000), data)
            case Fault.BROKEN_LINK if trial.struck():
                self._pass(piece, data)
                self._wire.close()
            case Fault.STRAY_FRAMES if trial.struck():
                self._stray(piece.transfer)
                self._pass(piece, data)
            case _:
                self._pass(piece, data)

    def send(self, frame: SenderControl) -> None:
        trial = self._trials(frame.transfer)
        self._let_go()
        self._wire.send(frame)
        if (
            trial is not None
            and trial.fault is Fault.REPEATED_COMMIT
            and isinstance(frame, Metadata | Commit)
        ):
            trial.struck()
            self._wire.send(frame)
        if (kept := self._kept.pop(frame.transfer, None)) is not None:
            if trial is not None and isinstance(frame, Commit):
                trial.struck()
            self._wire.put(kept[0], memoryview(kept[1]))

    def receive(self) -> ReceiverFrame | None:
        self._calls += 1
        if self._again:
            return self._again.popleft()
        if self._late and self._late[0][0] <= self._calls:
            return self._late.popleft()[1]
        while (frame := self._wire.receive()) is not None:
            trial = self._about(frame)
            if trial is None:
                return frame
            if trial.fault is Fault.LATE_ANSWER and trial.struck():
                self._late.append((self._calls + self._dice.randint(2, 12), frame))
                continue
            if trial.struck():
                self._again.append(frame)
            return frame
        self._let_go()  # held pieces are sent when nothing overtakes them
        return None

    def failure(self) -> BatonError | None:
        return None if self._late or self._again else self._wire.failure()

    def close(self) -> None:
        self._wire.close()

    def _about(self, frame: ReceiverFrame) -> Trial | None:
        """The trial to which an answer's fault belongs, if any."""
        if isinstance(frame, Credit):
            trial = self._trials(0)  # a trial that repeats a credit
            return trial if trial is not None and trial.fault is Fault.REPEATED_CREDIT else None
        trial = self._trials(frame.transfer)
        wanted = trial is not None and trial.fault in (Fault.LATE_ANSWER, Fault.REPEATED_ANSWER)
        return trial if wanted else None

    def _other(self, transfer: int) -> int | None:
        other = transfer - 1
        return other if self._trials(other) is not None else None

    def _stray(self, transfer: int) -> None:
        unknown = transfer + (1 << 40)
        self._wire.send(StopAck(unknown))
        self._wire.send(Withdraw(unknown, WithdrawReason.ABORTED))
        self._wire.send(Commit(unknown, b"\xff" * 9))

    def _pass(self, piece: Piece, data: bytes) -> None:
        self._wire.put(piece, memoryview(data))
        self._let_go()

    def _hold(self, piece: Piece, data: bytes) -> None:
        """This one waits; those that waited go before it or with it, as the dice fall."""
        if self._dice.random() < 0.5:
            self._let_go()
        self._held.append((piece, data))

    def _let_go(self) -> None:
        held, self._held = self._held, []
        self._dice.shuffle(held)
        for piece, data in held:
            self._wire.put(piece, memoryview(data))


class FaultyConnector(WrappedConnector):
    """A transport's connector, whose links apply trials."""

    def __init__(self, inner: Connector, trials: Callable[[int], Trial | None], seed: int) -> None:
        dice = random.Random(seed)

        def faulty(wire: SenderWire) -> SenderWire:
            return CountingWire(wire, trials) if wire.on_device else FaultyWire(wire, trials, dice)

        super().__init__(inner, faulty)


def _flipped(data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << dice.randrange(8)]) + data[at + 1 :]


def _misplaced(piece: Piece, dice: random.Random) -> Piece:
    name = dice.choice(["group", "ordinal", "offset", "checksum"])
    return dataclasses.replace(piece, **{name: getattr(piece, name) ^ 1 << dice.randrange(16)})


class CountingWire:
    """A wire between devices: only how far each transfer is, is noted."""

    on_device = True
    shares_clock = False

    def __init__(self, wire: SenderWire, trials: Callable[[int], Trial | None]) -> None:
        self._wire = cast(DeviceSenderWire, wire)
        self._trials = trials
        self.put, self.send, self.receive = self._wire.put, self._wire.send, self._wire.receive
        self.failure, self.close = self._wire.failure, self._wire.close
        self.announce, self.keep_warm = self._wire.announce, self._wire.keep_warm

    def busy_poll(self) -> bool:
        return self._wire.busy_poll()

    def read(self, piece: Piece, blocks: Sequence[int], after: Event | None) -> Event | None:
        trial = self._trials(piece.transfer)
        if trial is not None:
            trial.pieces += len(blocks)
        return self._wire.read(piece, blocks, after)
