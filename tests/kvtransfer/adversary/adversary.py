"""Transfers with every known fault, by seed, over any transport, and the accounting of all of them.

Some senders and one receiver, driven in turns by one thread; a few transfers are under way at any time.
Each has a `Trial`: its size, its one fault, and where the fault strikes. Blocks name their owner, are reused
at once on both sides, and are compared when a transfer is admitted, when its admitted life ends, and while
they are free. What a transfer's fault forbids (an admission, mostly) is checked when it happens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import numpy as np

from baton.base.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket, TicketBody
from baton.v1.transfer_pb2 import CommitRecord
from baton.v1.types_pb2 import Attempt, WorkerIdentity
from kvtransfer.link.settings import LinkSettings, WindowSettings
from kvtransfer.protocol.frames import WithdrawReason
from kvtransfer.protocol.ticket import TicketSigner
from kvtransfer.receiver.events import Committed, ReceiverEvent, Withdrawn
from kvtransfer.receiver.receiver import Receiver
from kvtransfer.sender.events import Acknowledged, Failed, SenderEvent
from kvtransfer.sender.sender import Sender
from tests.kvtransfer.adversary.fabrics import PIECE_BYTES, WINDOW, Fabric
from tests.kvtransfer.adversary.faulty_wires import FaultyConnector
from tests.kvtransfer.adversary.trials import AT_ONCE, FATAL, Counts, Fault, Trial
from tests.kvtransfer.support.owned_blocks import Sink, Source
from tests.kvtransfer.support.peers import FINGERPRINT, SECRET, identity

_ODD_BYTES = (6000, 333)
_WHOLE_WORDS = (6000, 336)
TIMEOUT_S = 1.0
_BLOCKS = 200
_STALLED_S = 10.0
# A mismatched sender is refused, unless its receiver restarts or is slow meanwhile.
_OPENING_FAILED = (ErrorKind.CONFLICT, ErrorKind.UNAVAILABLE, ErrorKind.DEADLINE)


class Adversary:
    """Runs trials of the given faults; `counts` counts what took effect."""

    def __init__(
        self,
        fabric: Fabric,
        seed: int,
        faults: Sequence[Fault],
        senders: int = 3,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`timeout_s`: of a link that is opened, and of its peer."""
        self.counts = Counts()
        self._timeout = timeout_s
        self._block_bytes = _ODD_BYTES if fabric.rig is None else _WHOLE_WORDS
        array = np.empty if fabric.rig is None else fabric.rig.array
        self.source = Source(self._block_bytes, _BLOCKS, array)
        self.sink = Sink(self._block_bytes, _BLOCKS, array)
        fabric.take(self.source, self.sink)
        self._fabric = fabric
        self._dice = random.Random(seed)
        self._faults = faults
        self._dealer = random.Random(seed)
        self._deck: list[Fault] = []
        self._signer = TicketSigner(SECRET)
        self._connector = fabric.tap(lambda plain: FaultyConnector(plain, self._trial_of, seed))
        self._trials: dict[int, Trial] = {}  # by transfer id, under way or admitted
        self._old: list[tuple[Ticket, TicketBody]] = []  # of transfers that have ended
        self._incarnations = [1] * senders
        self._receiver_incarnation = 0
        self._receiver = self._make_receiver()
        self._senders = [self._make_sender(index) for index in range(senders)]
        self._stranger = self._make_sender(senders, b"another layout".ljust(32))
        self._doubled_credit: Trial | None = None
        self._begun = 0

    # -- running ----------------------------------------------------------------------------------

    def run(self, transfers: int, width: int = 8) -> None:
        """Runs `count` trials, at most `width` at once; returns when all have ended and all resources
        are free."""
        moved = time.monotonic()
        while self._begun < transfers or not self._at_rest():
            before = self._progress()
            while self._begun < transfers and len(self._trials) < width:
                self._begin()
            self._step()
            idle = self._progress() == before
            if not idle:
                moved = time.monotonic()
            patience = max(_STALLED_S, 3 * self._timeout)
            assert time.monotonic() < moved + patience, f"stalled: {list(self._trials.values())}"
            self._fabric.rest(idle)

    def close(self) -> None:
        for sender in (*self._senders, self._stranger):
            sender.close()
        self._end_receiver()
        self._fabric.close()

    def _progress(self) -> tuple[object, ...]:
        counters = self._receiver.counters
        shipped = [sender.counters.bytes_shipped for sender in self._senders]
        ended = sum(self.counts.ends.values())
        return self._begun, ended, counters.bytes_received, counters.dropped_unknown, *shipped

    def _at_rest(self) -> bool:
        """Every transfer has ended, and every credit, pin and block is free."""
        if self._trials or self.source.pins or len(self._receiver.transfers):
            return False
        for sender in (*self._senders, self._stranger):
            for link in sender.links:
                if link.free_pieces != link.window_pieces or link.credited_pieces or link.live_transfers:
                    return False
        for link in self._receiver.links:
            if link.credited_pieces != link.window_pieces or link.quarantined_pieces or link.live_transfers:
                return False
        return self.sink.all_free() and self.source.all_free()

    def _step(self) -> None:
        for trial in list(self._trials.values()):
            self._advance(trial)
        for sender in (*self._senders, self._stranger):
            if self._dice.random() < 0.9:
                for sent in sender.poll(self._dice.randint(1, 8)):
                    self._sent(sent)
        if self._dice.random() < 0.9:
            for received in self._receiver.poll(self._dice.randint(1, 24)):
                self._received(received)

    # -- beginnings -------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._begun += 1
        dice = self._dice
        counts = (dice.choice([0, 1, 1, 2, 3, 12]), dice.choice([0, 1, 2, 5]))
        held = (min(counts[0], dice.choice([0, 0, 1, 12])), min(counts[1], dice.choice([0, 0, 1])))
        pieces = (counts[0] - held[0]) * -(-self._block_bytes[0] // PIECE_BYTES) + counts[1] - held[1]
        fault = self._draw()
        if pieces < 3 and fault is not Fault.NONE:
            counts, held, pieces = (3, 3), (1, 1), 14
        # A repeated or reordered piece needs another behind it.
        strikes_at = dice.randint(1, pieces - 1) if pieces > 1 else 1
        trial = Trial(self._begun, fault, counts, held, strikes_at, dice.randrange(len(self._senders)))
        trial.answer_in = dice.choice([0, 0, 0, 1, 5])
        trial.life = dice.randint(0, 30)
        self.counts.drawn[fault] += 1
        sender = self._senders[trial.sender]
        ticket, body = self._ticket(trial)
        if fault is Fault.WRONG_LAYOUT:
            sender = self._stranger
        try:
            trial.transfer = sender.begin(ticket, body)
            if self._dice.random() < 0.5:
                trial.transfer.send_metadata(self._record(trial))
        except BatonError as error:
            if fault is not Fault.REPLAYED_TICKET:
                self.counts.forbidden.append(f"no transfer could be begun: {error}")
            self.counts.struck[fault] += 1
            self.counts.ends["refused at once"] += 1
            return
        if fault is not Fault.REPLAYED_TICKET:
            self.sink.reserve(trial.number, counts, held)
            self._receiver.transfers.expect(trial.number, counts, held)
        else:
            trial.received = "never"
            trial.number, trial.counts = body.transfer_id, (body.block_counts[0], body.block_counts[1])
        if trial.fault in AT_ONCE:
            trial.struck()
        left_out = trial.transfer.resident_counts
        trial.unpushed = [(group, n) for group in (0, 1) for n in range(left_out[group], trial.counts[group])]
        dice.shuffle(trial.unpushed)
        self._trials[trial.number] = trial

    def _draw(self) -> Fault:
        """Draws a fault from a shuffled deck, so that each comes as often as it is in it, whatever the
        threads' timing."""
        if not self._deck:
            self._deck = list(self._faults)
            self._dealer.shuffle(self._deck)
        return self._deck.pop()

    def _ticket(self, trial: Trial) -> tuple[Ticket, TicketBody]:
        """The ticket to send with, and the body that the sender takes for its own."""
        body = self._body(trial.number, trial)
        ticket = self._signer.sign(body)
        match trial.fault:
            case Fault.WRONG_HELD:
                group, most = (0, trial.counts[0]) if trial.counts[0] else (1, trial.counts[1])
                body.resident_counts[group] = (trial.held[group] + self._dice.randint(1, most)) % (most + 1)
            case Fault.FORGED_TICKET:
                ticket.signature = self._dice.randbytes(32)
            case Fault.STOLEN_TICKET:
                ticket = self._signer.sign(self._body(trial.number + (1 << 20), trial))
            case Fault.OLD_TICKET:
                old = self._body(trial.number, trial)
                old.issuer.incarnation = b"\xfe" * 16
                ticket = self._signer.sign(old)
            case Fault.OLD_INCARNATION:
                body.issuer.incarnation = b"\xfe" * 16
                ticket = self._signer.sign(body)
            case Fault.REPLAYED_TICKET if self._old:
                ticket, body = self._dice.choice(self._old)
                if body.transfer_id in self._trials:  # replayed twice, and still under way
                    ticket, body = self._old.pop(0)
                    trial.fault = Fault.NONE if body.transfer_id in self._trials else trial.fault
            case Fault.REPLAYED_TICKET:
                trial.fault = Fault.NONE
        if trial.fault is Fault.NONE and body.transfer_id != trial.number:
            body = self._body(trial.number, trial)
            ticket = self._signer.sign(body)
        return ticket, body

    def _body(self, number: int, trial: Trial) -> TicketBody:
        return TicketBody(
            attempt=Attempt(request_id=number.to_bytes(16, "little"), number=1),
            issuer=identity("receiver", self._receiver_incarnation),
            endpoints=[endpoint.message() for endpoint in self._endpoints],
            transfer_id=number,
            block_counts=trial.counts,
            resident_counts=trial.held,
            token_count=1,
            fingerprint=FINGERPRINT,
        )

    def _record(self, trial: Trial) -> CommitRecord:
        assert trial.transfer is not None
        token_ids = [trial.number % 50021, *range(trial.number % 97), trial.number % 1009]
        return CommitRecord(
            attempt=trial.transfer.body.attempt, token_ids=token_ids, prompt_length=1,
            first_token_id=trial.number % 31337,
        )  # fmt: skip

    # -- the life of a trial ----------------------------------------------------------------------

    def _advance(self, trial: Trial) -> None:
        if trial.received == "committed":
            self._age(trial)
            return
        if trial.sent is None:
            self._push(trial)
        if trial.pieces >= trial.strikes_at and not trial.hit:
            self._strike(trial)
        if trial.sent is not None and trial.received is None and self._dice.random() < 0.2:
            self._forget(trial)  # its router learns it from the sender, and returns the ticket
        self._close_if_over(trial)

    def _push(self, trial: Trial) -> None:
        transfer = trial.transfer
        assert transfer is not None
        for _ in range(self._dice.choice([0, 1, 2, 8])):
            if not trial.unpushed:
                break
            group, ordinal = trial.unpushed.pop()
            if trial.fault is Fault.SHORT_PUSH and not trial.unpushed:
                trial.struck()  # the last one never comes
                break
            if not self.source.room([1, 1]):
                trial.unpushed.append((group, ordinal))
                break
            owner = trial.number if trial.received != "never" else trial.number + (1 << 24)
            transfer.push(group, ordinal, [self.source.write(owner, group, ordinal)])
        if not trial.unpushed and transfer.active and transfer.record is None:
            transfer.commit(self._record(trial))

    def _strike(self, trial: Trial) -> None:
        """Faults at the ends, in the middle of a transfer."""
        match trial.fault:
            case Fault.RECEIVER_FORGETS if trial.received is None:
                trial.struck()
                self._forget(trial)
            case Fault.SENDER_WITHDRAWS | Fault.BOTH_CANCEL if trial.sent is None:
                trial.struck()
                assert trial.transfer is not None
                trial.transfer.withdraw(WithdrawReason.ABORTED)
                trial.sent = "withdrawn"
                if trial.fault is Fault.BOTH_CANCEL and trial.received is None:
                    self._forget(trial)
            case Fault.SENDER_RESTARTS:
                trial.struck()
                self._restart_sender(trial.sender)
            case Fault.RECEIVER_RESTARTS:
                trial.struck()
                self._restart_receiver()
            case Fault.REPEATED_CREDIT:
                self._doubled_credit = trial

    def _age(self, trial: Trial) -> None:
        """An admitted transfer: its answer comes when it comes; its blocks are its own until its end."""
        if trial.answer_in > 0:
            trial.answer_in -= 1
            return
        if trial.answer_in == 0:
            trial.answer_in = -1
            self._receiver.transfers.acknowledge(trial.number)
        trial.life -= 1
        if trial.life < 0 and trial.sent is not None:
            self.sink.check(trial.number, self.sink.places[trial.number])
            self.sink.release(trial.number)
            self._over(trial)

    def _forget(self, trial: Trial) -> None:
        self._receiver.transfers.forget(trial.number)
        self._release(trial, "forgotten")

    def _release(self, trial: Trial, how: str) -> None:
        """Frees its blocks for the next transfer."""
        self.sink.release(trial.number)
        trial.received = how

    def _close_if_over(self, trial: Trial) -> None:
        if trial.sent is not None and trial.received not in (None, "committed"):
            self._over(trial)

    def _over(self, trial: Trial) -> None:
        assert trial.transfer is not None
        del self._trials[trial.number]
        self.counts.ends[f"{trial.received}, {trial.sent}"] += 1
        if trial.hit:
            self.counts.struck[trial.fault] += 1
            self.counts.noticed[trial.fault, trial.reason or trial.received or ""] += 1
        admitted = trial.received in ("committed", "never") or trial.answer_in < 0
        if trial.sent == "acknowledged" and not admitted:
            self.counts.forbidden.append(f"acknowledged and not admitted: {trial}")
        if trial.fault not in (Fault.REPLAYED_TICKET, Fault.FORGED_TICKET, Fault.STOLEN_TICKET):
            self._old.append((self._signer.sign(trial.transfer.body), trial.transfer.body))
            del self._old[:-20]

    # -- events -----------------------------------------------------------------------------------

    def _sent(self, event: SenderEvent) -> None:
        trial = self._trials.get(event.transfer.transfer_id)
        if trial is None or trial.transfer is not event.transfer:
            self.counts.forbidden.append(f"a second end: {event}")
        elif trial.sent is not None:
            self.counts.forbidden.append(f"two ends: {trial}")
        else:
            trial.sent = "acknowledged" if isinstance(event, Acknowledged) else "failed"
            if isinstance(event, Failed) and trial.fault is Fault.WRONG_LAYOUT:
                assert event.error.kind in _OPENING_FAILED, event.error

    def _received(self, event: ReceiverEvent) -> None:
        trial = self._trials.get(event.transfer_id)
        if trial is None or trial.received is not None:
            self.counts.forbidden.append(f"{event} for {trial}")
        elif isinstance(event, Withdrawn):
            self._release(trial, "withdrawn")
            trial.reason = event.reason.name
        elif isinstance(event, Committed):
            self._admit(trial, event.record)

    def _admit(self, trial: Trial, record: CommitRecord) -> None:
        self.sink.writable.discard(trial.number)
        if trial.fault in FATAL and trial.hit:
            self.counts.forbidden.append(f"admitted: {trial}")
        sent = self._record(trial)
        same = (list(record.token_ids), record.first_token_id) == (list(sent.token_ids), sent.first_token_id)
        self.counts.wrong_records += not same
        self.sink.check(trial.number, self.sink.places[trial.number])
        if trial.fault is Fault.FORGOTTEN_AT_COMMIT:
            trial.struck()
            self._forget(trial)
        elif trial.fault is Fault.REFUSED_COMMIT:
            trial.struck()
            self._receiver.transfers.refuse(trial.number, BatonError(ErrorKind.CONFLICT, "spent"))
            self._release(trial, "refused")
        else:
            trial.received = "committed"

    def _trial_of(self, transfer: int) -> Trial | None:
        if transfer == 0:
            trial, self._doubled_credit = self._doubled_credit, None
            return trial
        return self._trials.get(transfer)

    # -- ends -------------------------------------------------------------------------------------

    def _make_receiver(self) -> Receiver:
        self._receiver_incarnation = self._receiver_incarnation % 250 + 1
        receiver = Receiver(
            settings=self._settings(identity("receiver", self._receiver_incarnation), FINGERPRINT),
            window=WindowSettings(PIECE_BYTES, WINDOW), signer=self._signer,
            sink=self.sink, wake=self._fabric.woken.set, clock=self._fabric.clock, device=self._fabric.device,
        )  # fmt: skip
        self._endpoints = self._fabric.attach(receiver)
        return receiver

    def _make_sender(self, index: int, fingerprint: bytes = FINGERPRINT) -> Sender:
        incarnation = self._incarnations[index] if index < len(self._incarnations) else 1
        return Sender(
            settings=self._settings(identity(f"sender-{index}", incarnation), fingerprint),
            source=self.source, wake=self._fabric.woken.set, clock=self._fabric.clock,
            connectors=[self._connector],
        )  # fmt: skip

    def _settings(self, identity: WorkerIdentity, fingerprint: bytes) -> LinkSettings:
        return LinkSettings(identity, fingerprint, self._block_bytes, self._timeout)

    def _restart_sender(self, index: int) -> None:
        """Restarts a sender at any point; its transfers are no longer driven."""
        self._senders[index].close()
        for trial in self._trials.values():
            if trial.sender == index and trial.fault is not Fault.WRONG_LAYOUT and trial.sent is None:
                trial.sent = "died"
        self._incarnations[index] = self._incarnations[index] % 250 + 1
        self._senders[index] = self._make_sender(index)

    def _restart_receiver(self) -> None:
        """Everything it expected or had admitted is gone with it."""
        self._end_receiver()
        for trial in self._trials.values():
            if trial.received is None or trial.received == "committed":
                self._release(trial, "died")
        self._receiver = self._make_receiver()

    def _end_receiver(self) -> None:
        self._receiver.close()
        counters = self._receiver.counters
        self.counts.checksum_failures += counters.checksum_failures
        self.counts.links_broken += counters.links_broken
        self.counts.links_fenced += counters.links_fenced
