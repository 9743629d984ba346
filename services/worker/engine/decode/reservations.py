"""What an engine process does as the receiving end of handoffs: reserve, receive, admit, free.

    Reserve ─▶ ticket (slot, blocks) ─▶ pieces scattered ─▶ commit ─▶ admitted ─▶ ended
                    │ cancel, expiry, a higher attempt: freed at once, since only our own scatter
                    ▼ writes these blocks and it asks for the ticket first
                  freed

Owner of every slot and block that a ticket stands for, until `_free`. The leading blocks may be shared:
those that the router named and that are here are taken over by reference, and are not sent. Nobody writes
them, neither a scatter, since their pieces are not expected, nor a step, since all are full.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence

from baton.engine.decode.loop import DecodeLoop
from baton.engine.decode.slots import Grant, SlotPool
from baton.engine.memory.blocks import BlockTables
from baton.engine.memory.host_blocks import HostBlocks
from baton.engine.prefix_cache.cache import PrefixCache
from baton.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import ReserveRequest, Ticket, TicketBody, TicketState
from baton.v1.engine_pb2 import EngineEvent, ReservedEvent, TicketEndedEvent
from baton.v1.transfer_pb2 import CommitRecord
from baton.v1.types_pb2 import WorkerIdentity
from baton.v1.worker_pb2 import SlotState
from kvtransfer.protocol.addresses import Endpoint
from kvtransfer.protocol.ticket import TicketSigner
from kvtransfer.receiver.events import (
    CommitPending,
    Committed,
    MetadataReceived,
    ReceiverEvent,
    TransferStarted,
    Withdrawn,
)
from kvtransfer.receiver.receiver import Receiver
from services.worker.engine.decode.admission import Admissions
from services.worker.engine.decode.block_growth import Growth
from services.worker.engine.decode.reservation import Admission, Key, Reservation
from services.worker.engine.decode.ticket_book import AttemptKey, CommitOutcome, TicketBook, TicketEntry
from services.worker.engine.startup.kv_wire_format import WireBlocks
from services.worker.engine.startup.model_loader import LoadedModel

MAX_TTL_S = 3600.0
# How long one poll looks at what lands: beside steps, which wait meanwhile, and where there are none. A piece
# is announced a millisecond before its bytes set out.
_LANDING_BESIDE_STEPS_S, _LANDING_S = 0.0002, 0.002


class DecodeSide:
    """Tickets, slots and admissions of one engine. All calls come from the engine's loop."""

    def __init__(
        self,
        model: LoadedModel,
        loop: DecodeLoop,
        slots: SlotPool,
        identity: WorkerIdentity,
        signer: TicketSigner,
        emit: Callable[[EngineEvent], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        host: HostBlocks,
        reserve_output_tokens: int | None,
        prefixes: PrefixCache | None = None,
        wire: WireBlocks | None = None,
    ) -> None:
        """`prefixes`: where full blocks are kept for sequences that begin alike; `wire`: how blocks come,
        unless as they are."""
        self._model = model
        self.wire = wire or WireBlocks(model.cache, model.fingerprint)
        self._loop = loop
        self._slots = slots
        self._identity = identity
        self._signer = signer
        self._emit = emit
        self._book: TicketBook[Reservation] = TicketBook(clock=clock)
        self._by_slot: dict[Key, TicketEntry[Reservation]] = {}
        self._reserve_output_tokens = reserve_output_tokens
        self._prefixes = prefixes
        self._admissions = Admissions(model, loop)
        self.growth = Growth(model.pools, loop, host, self._move)
        self._receiver: Receiver | None = None
        self._endpoints: tuple[Endpoint, ...] = ()
        # Called before a reservation's blocks are freed: whoever still writes them locally must stop.
        self.before_free: Callable[[AttemptKey], None] = lambda key: None
        self.handoffs_committed = 0
        self.handoffs_local = 0
        # Of committed handoffs: blocks that were here and so were not sent, of all cache groups together.
        self.blocks_resident = 0
        self.bytes_resident = 0
        self.dropped_unknown = 0

    def receive_with(self, receiver: Receiver, endpoints: tuple[Endpoint, ...]) -> None:
        """From now on tickets name `endpoints`; without a receiver they are for this worker's own prefill."""
        self._receiver = receiver
        self._endpoints = endpoints
        self._admissions.prefixes = self._prefixes

    @property
    def tickets(self) -> TicketBook[Reservation]:
        return self._book

    def owned_blocks(self) -> list[BlockTables]:
        """The block tables that live tickets hold."""
        return [entry.grant.grant.blocks for entry in self._by_slot.values()]

    def slot_states(self) -> list[SlotState.ValueType]:
        """Of every slot, in their order."""
        states = [SlotState.SLOT_STATE_FREE] * self._slots.total
        for (slot, _), entry in self._by_slot.items():
            states[slot] = SlotState.SLOT_STATE_RESERVED if entry.awaited else SlotState.SLOT_STATE_ACTIVE
        return states

    def reserve(self, request: ReserveRequest) -> ReservedEvent:
        """Promises a slot and blocks. Raises BatonError: CONFLICT, OVERLOADED or INVALID."""
        key = AttemptKey.of(request.attempt)
        entry = self._book.check(key)
        if entry is None:
            for stale in self._book.superseded(key):
                self.cancel(stale.key)
            entry = self._new_ticket(key, request)
        held = entry.grant
        return ReservedEvent(
            ticket=held.ticket,
            slot=held.grant.slot,
            generation=held.grant.generation,
            kv_bytes=0 if self._receiver is None else self._kv_bytes(held),
        )

    def _kv_bytes(self, reservation: Reservation) -> int:
        """What is to be sent."""
        counts = [count - reservation.held for count in self._model.pools.counts_for(reservation.token_count)]
        return sum(map(int.__mul__, counts, self.wire.block_bytes))

    def _new_ticket(self, key: AttemptKey, request: ReserveRequest) -> TicketEntry[Reservation]:
        end = self._end_of(request)
        if self.growth.waiting:
            raise BatonError(ErrorKind.OVERLOADED, "running sequences wait for KV blocks")
        names = self._names_told(request)
        grant, held = self._grant(self._tokens_at_first(request.token_count, end), names)
        transfer_id = self._new_transfer_id()
        body = TicketBody(
            attempt=request.attempt,
            issuer=self._identity,
            endpoints=[endpoint.message() for endpoint in self._endpoints],
            transfer_id=transfer_id,
            block_counts=self._model.pools.counts_for(request.token_count),
            token_count=request.token_count,
            fingerprint=self._model.fingerprint,
            resident_counts=[held] * len(grant.blocks) if held else (),
            resident_hash=names[held - 1] if held else b"",
        )
        ticket = self._signer.sign(body)
        reservation = Reservation(request.attempt, ticket, grant, request.token_count, end)
        reservation.tenant, reservation.names, reservation.held = request.tenant, names[:held], held
        ttl_s = min(request.ttl_ms / 1e3, MAX_TTL_S)
        entry = self._book.reserve(key, transfer_id, reservation, ttl_s)
        self._by_slot[reservation.key] = entry
        if self._receiver is not None:
            self._receiver.transfers.expect(transfer_id, list(body.block_counts), list(body.resident_counts))
        return entry

    def _new_transfer_id(self) -> int:
        """Random, since whoever guessed it could speak of a transfer that is not its own; not 0, which frames
        about no transfer have."""
        while not (drawn := secrets.randbits(64)) or self._book.find_transfer(drawn) is not None:
            pass
        return drawn

    def _names_told(self, request: ReserveRequest) -> tuple[bytes, ...]:
        """Names of blocks that prefill fills, so that no step writes in them. A prefill of our own finds for
        itself what is here."""
        if self._prefixes is None or self._receiver is None:
            return ()
        full = request.token_count // self._model.layout.groups[0].block_tokens
        return tuple(request.block_hashes[:full])

    def _end_of(self, request: ReserveRequest) -> int:
        prompt_length = request.token_count - request.first_number
        end = prompt_length + request.max_tokens
        if prompt_length < 1 or end <= request.token_count:
            raise BatonError(ErrorKind.INVALID, "a reservation needs a prompt and room for one more token")
        if end > self._model.max_context_tokens:
            limit = self._model.max_context_tokens
            raise BatonError(ErrorKind.INVALID, f"{end} tokens exceed the context of {limit}")
        if not self._model.pools.fits_ever(end - 1):
            raise BatonError(ErrorKind.INVALID, f"{end} tokens exceed this worker's whole KV cache")
        return end

    def _tokens_at_first(self, token_count: int, end: int) -> int:
        """How many tokens' blocks are taken now; the last token ends the sequence, and has no KV."""
        output = self._reserve_output_tokens or self.growth.lengths.most
        return end - 1 if output is None else min(end - 1, token_count + output)

    def _grant(self, tokens: int, names: Sequence[bytes]) -> tuple[Grant, int]:
        """A slot with blocks for `tokens`, and how many of the first bear the first of `names`."""
        slot, generation = self._slots.grant()
        try:
            if self._prefixes is not None and names:
                blocks, held = self._prefixes.take_over(names, tokens)
            else:
                blocks, held = self._model.pools.allocate(tokens), 0
        except BatonError:
            self._slots.release(slot, generation)
            raise
        return Grant(slot, generation, blocks, tokens), held

    def cancel(self, key: AttemptKey) -> None:
        """Stops an attempt wherever it is and leaves a tombstone; idempotent."""
        entry = self._book.find(key)
        if entry is None:
            self._book.cancel(key)
        elif entry.awaited:
            self._end_unused(entry)
        else:
            self._cancel_slot(entry.grant)

    def _cancel_slot(self, reservation: Reservation) -> None:
        if not reservation.leaving:
            reservation.leaving = True
            self._loop.cancel(*reservation.key)

    def _move(self, reservation: Reservation) -> None:
        reservation.leaving = True
        self._loop.move(*reservation.key)

    def expire(self) -> None:
        """Ends tickets and sequences whose deadline has passed, by this worker's clock alone."""
        for entry in self._book.expired():
            self.cancel(entry.key)

    def slot_ended(self, slot: int, generation: int, emitted: Sequence[int] = ()) -> None:
        """The front has read the slot's last word: nothing of it is in flight any more. `emitted`: its
        output here, whose KV may be of use to a prompt that begins with it."""
        entry = self._by_slot.get((slot, generation))
        if entry is None:
            self.dropped_unknown += 1
            return
        self._free(entry, emitted)

    def state_of(self, key: AttemptKey) -> TicketState.ValueType:
        return self._book.state(key)

    def land(self, max_pieces: int) -> None:
        """The part of `poll` that no step minds: pieces go where no slot looks yet."""
        if self._receiver is not None:
            self._receiver.progress(max_pieces)

    def poll(self, max_pieces: int) -> bool:
        """Bounded link work; True where there was some. While a device moves pieces it is looked at again and
        again, for a while, or until somebody is admitted: a turn of the loop takes longer than what there is
        to wait for."""
        if self._receiver is None:
            return False
        patience = _LANDING_BESIDE_STEPS_S if self._loop.has_work else _LANDING_S
        until, committed = time.monotonic() + patience, self.handoffs_committed
        worked = self._take_events(self._receiver.poll(max_pieces))
        while self._receiver.moving and self.handoffs_committed == committed and time.monotonic() < until:
            worked |= self._take_events(self._receiver.poll(max_pieces))
        return worked

    def _take_events(self, events: Sequence[ReceiverEvent]) -> bool:
        for event in events:
            match event:
                case TransferStarted(transfer_id):
                    self._book.receiving(transfer_id)
                case MetadataReceived(transfer_id, record):
                    self._describe(transfer_id, record)
                case CommitPending(transfer_id, record):
                    self._prepare(transfer_id, record)
                case Committed(transfer_id, record):
                    self._commit(transfer_id, record)
                case Withdrawn(transfer_id):
                    self.withdrawn(transfer_id)
        return bool(events)

    def _describe(self, transfer_id: int, record: CommitRecord) -> None:
        """While its prompt is computed; what is wrong with a record its commit says."""
        entry = self._book.find_transfer(transfer_id)
        if entry is not None:
            with contextlib.suppress(BatonError):
                self._admissions.describe(entry.grant, record)

    def _prepare(self, transfer_id: int, record: CommitRecord) -> None:
        """While its last bytes come; the same."""
        entry = self._book.find_transfer(transfer_id)
        if entry is not None:
            with contextlib.suppress(BatonError):
                self._admissions.complete(entry.grant, record)

    def _commit(self, transfer_id: int, record: CommitRecord) -> None:
        assert self._receiver is not None
        try:
            reservation, admission = self._admit(transfer_id, record)
        except BatonError as error:
            self._receiver.transfers.refuse(transfer_id, error)
            entry = self._book.find_transfer(transfer_id)
            if entry is not None and entry.awaited:
                self._end_unused(entry)
        else:
            self._receiver.transfers.acknowledge(transfer_id)  # prefill waits for this word
            self._admitted(reservation, admission, record)

    def commit(self, transfer_id: int, record: CommitRecord) -> None:
        """Admits a sequence whose KV is all here. Raises BatonError where the record is not the ticket's.

        That the ticket in the record is ours and for this transfer has been checked before.
        """
        self._admitted(*self._admit(transfer_id, record), record)

    def _admit(self, transfer_id: int, record: CommitRecord) -> tuple[Reservation, Admission]:
        """It will decode; for `_admitted`."""
        entry = self._book.find_transfer(transfer_id)
        if entry is None:
            raise BatonError(ErrorKind.CONFLICT, "the ticket has ended")
        reservation = entry.grant
        admission = self._admissions.complete(reservation, record)
        outcome = self._book.commit(transfer_id)
        if outcome is not CommitOutcome.ACCEPTED:
            raise BatonError(ErrorKind.CONFLICT, f"the ticket cannot be spent: {outcome.name.lower()}")
        self._loop.admit(admission.entry)
        self._book.activate(transfer_id)
        return reservation, admission

    def _admitted(self, reservation: Reservation, admission: Admission, record: CommitRecord) -> None:
        """What can wait until prefill has heard."""
        reservation.admission = None
        reservation.token_ids = tuple(record.token_ids)
        self._keep(reservation, admission.names)
        self.growth.watch(reservation)
        self.handoffs_committed += 1

    def commit_local(self, transfer_id: int, record: CommitRecord) -> None:
        """`commit` by this worker's own prefill: the blocks change owner, no bytes move."""
        body = self._signer.verify(Ticket(body=record.ticket_body, signature=record.ticket_signature))
        if body.transfer_id != transfer_id:
            raise BatonError(ErrorKind.FORBIDDEN, "the ticket was given for another transfer")
        self._book.receiving(transfer_id)
        self.commit(transfer_id, record)
        self.handoffs_local += 1

    def _keep(self, reservation: Reservation, names: tuple[bytes, ...]) -> None:
        """What was verified bears its names from now on: others may take it over while this one runs."""
        if self._prefixes is not None and names:
            reservation.names = names
            self._prefixes.keep(names, reservation.blocks)
        self.blocks_resident += reservation.held * len(self.wire.block_bytes)
        self.bytes_resident += reservation.held * sum(self.wire.block_bytes)

    def withdrawn(self, transfer_id: int) -> None:
        """The first token ended the request, or prefill gave up: the ticket is not needed."""
        entry = self._book.find_transfer(transfer_id)
        if entry is not None and entry.awaited:
            self._end_unused(entry)

    def _end_unused(self, entry: TicketEntry[Reservation]) -> None:
        if self._receiver is not None:
            self._receiver.transfers.forget(entry.transfer_id)
        reservation = entry.grant
        self._free(entry)
        ended = TicketEndedEvent(
            attempt=reservation.attempt, slot=reservation.grant.slot, generation=reservation.grant.generation
        )
        self._emit(EngineEvent(ticket_ended=ended))

    def _free(self, entry: TicketEntry[Reservation], emitted: Sequence[int] = ()) -> None:
        reservation = entry.grant
        key = reservation.key
        self.growth.forget(key, len(emitted) or None)
        self._book.end(entry.transfer_id)
        self.before_free(entry.key)
        del self._by_slot[key]
        if self._prefixes is not None and emitted:  # the last token has no KV
            tokens = (*reservation.token_ids, *emitted[:-1])
            names = self._prefixes.names_of(tokens, reservation.tenant, known=reservation.names)
            self._prefixes.keep(names, reservation.blocks)
        self._model.pools.release(reservation.blocks)
        self._slots.release(*key)

    def scatter(self, transfer_id: int, group: int, ordinal: int, offset: int, data: memoryview) -> None:
        """kvtransfer's sink: verified bytes into the block that the ticket reserved for them."""
        self.wire.write(group, self.place(transfer_id, group, ordinal), offset, data)

    def place(self, transfer_id: int, group: int, ordinal: int) -> int:
        """That block."""
        entry = self._book.find_transfer(transfer_id)
        if entry is None:
            raise BatonError(ErrorKind.CONFLICT, "the ticket of this transfer has ended")
        return entry.grant.grant.blocks[group][ordinal]

    def blocks_of(self, transfer_id: int, key: AttemptKey, token_count: int) -> BlockTables:
        """The reserved blocks of a local handoff that hold its `token_count` prefilled tokens."""
        entry = self._book.find_transfer(transfer_id)
        if entry is None or entry.key != key or not entry.awaited:
            raise BatonError(ErrorKind.CONFLICT, "the ticket has ended")
        counts = self._model.pools.counts_for(token_count)
        return tuple(blocks[:count] for blocks, count in zip(entry.grant.grant.blocks, counts, strict=True))

    def lend(self, transfer_id: int, prefix: BlockTables, token_count: int) -> BlockTables:
        """Takes cached blocks, one reference of each, in place of a reservation's first; `blocks_of` anew."""
        entry = self._book.find_transfer(transfer_id)
        assert entry is not None, "a ticket ends after the prefill that borrows of it"
        self._model.pools.release(entry.grant.replace_first(prefix))
        return self.blocks_of(transfer_id, entry.key, token_count)
