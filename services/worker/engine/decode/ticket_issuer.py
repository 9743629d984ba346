"""Reserves slots and blocks and issues the tickets that stand for them.

Leading blocks that are in the prefix cache already are shared by reference and not sent. Nothing writes to
them: the receiver expects no pieces for them, and a decode step writes behind the prompt's full blocks only.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.base.errors import BatonError, ErrorKind, FailureCause
from baton.engine.decode.slots import Grant
from baton.v1 import types_pb2
from baton.v1.decode_pb2 import ReserveRequest, TicketBody
from baton.v1.engine_pb2 import ReservedEvent
from baton.v1.types_pb2 import WorkerIdentity
from kvtransfer.protocol.addresses import IPC, Endpoint
from kvtransfer.protocol.ticket import TicketSigner
from services.common.engine.attempt_key import AttemptKey
from services.worker.engine.common.request_parameters import max_draft_tokens_of, prediction_of
from services.worker.engine.decode.reservation import Reservation
from services.worker.engine.decode.reserved_slots import ReservedSlots
from services.worker.engine.decode.ticket_table import TicketEntry
from services.worker.engine.startup.model_loader import LoadedModel

MAX_TTL_S = 3600.0


@dataclass(slots=True, eq=False)
class TicketIssuer:
    """Answers the Reserve calls of one engine.

    `endpoints`: where other workers send blocks; tickets for this worker's own prefill have none.
    `block_bytes`: bytes of a block on the wire, by cache group. `reserve_output_tokens`: output tokens that
    blocks are reserved for at first; None: by the lengths of recent outputs. `certificates`: those that the
    endpoints with TLS present now, in PEM; None: they have none.
    """

    model: LoadedModel
    reserved: ReservedSlots
    identity: WorkerIdentity
    signer: TicketSigner
    endpoints: tuple[Endpoint, ...]
    block_bytes: Sequence[int]
    reserve_output_tokens: int | None
    certificates: Callable[[], Sequence[str]] | None = None

    def reserve(self, request: ReserveRequest) -> ReservedEvent:
        """Reserves a slot and blocks and signs the ticket; idempotent for one attempt. Lower attempts of the
        request end.

        Raises BatonError: CONFLICT for an attempt that has ended or is superseded and for a sequence that can
        never fit here, OVERLOADED where there are no slots or blocks now, INVALID for one that fits nowhere.
        """
        key = AttemptKey.of(request.attempt)
        entry = self.reserved.tickets.check(key)
        if entry is None:
            for superseded in self.reserved.tickets.superseded(key):
                self.reserved.cancel(superseded.key)
            entry = self._issue(key, request)
        reservation = entry.reservation
        slot, generation = reservation.key
        kv_bytes = 0 if reservation.own_prefill else self._bytes_to_send(reservation)
        return ReservedEvent(ticket=reservation.ticket, slot=slot, generation=generation, kv_bytes=kv_bytes)

    def _bytes_to_send(self, reservation: Reservation) -> int:
        counts = self.model.pools.counts_for(reservation.token_count)
        return sum(
            (count - reservation.resident_blocks) * size
            for count, size in zip(counts, self.block_bytes, strict=True)
        )

    def _issue(self, key: AttemptKey, request: ReserveRequest) -> TicketEntry[Reservation]:
        end = self._end_of(request)
        prediction = prediction_of(request.prediction_token_ids, self.model.config.vocab_size)
        max_draft_tokens = max_draft_tokens_of(request)
        if self.reserved.allocation.waiting:
            message = "running sequences wait for KV blocks"
            raise BatonError(ErrorKind.OVERLOADED, message, cause=FailureCause.BLOCKS)
        own_prefill = request.own_prefill or self.reserved.receiver is None
        hashes = () if own_prefill else self._usable_hashes(request)
        grant, resident = self._allocate(self._initial_tokens(request.token_count, end), hashes)
        body = TicketBody(
            attempt=request.attempt,
            issuer=self.identity,
            endpoints=() if own_prefill else self._endpoint_messages(),
            transfer_id=self._new_transfer_id(),
            block_counts=self.model.pools.counts_for(request.token_count),
            token_count=request.token_count,
            fingerprint=self.model.fingerprint,
            resident_counts=[resident] * len(grant.blocks) if resident else (),
            resident_hash=hashes[resident - 1] if resident else b"",
        )
        reservation = Reservation(
            attempt=request.attempt,
            ticket=self.signer.sign(body),
            grant=grant,
            token_count=request.token_count,
            end=end,
            tenant=request.tenant,
            block_hashes=hashes[:resident],
            resident_blocks=resident,
            masked=request.HasField("grammar"),
            own_prefill=own_prefill,
            tpot_s=request.tpot_slo_s if request.tpot_slo_s > 0 else None,
            prediction=prediction,
            max_draft_tokens=max_draft_tokens,
        )
        entry = self.reserved.add(key, body.transfer_id, reservation, min(request.ttl_ms / 1e3, MAX_TTL_S))
        if self.reserved.receiver is not None and not own_prefill:
            counts, resident_counts = list(body.block_counts), list(body.resident_counts)
            self.reserved.receiver.transfers.expect(body.transfer_id, counts, resident_counts)
        return entry

    def _endpoint_messages(self) -> list[types_pb2.Endpoint]:
        endpoints = self.endpoints
        if self.certificates is not None:
            now = tuple(self.certificates())
            endpoints = tuple(
                one if one.transport == IPC else replace(one, certificates=now) for one in endpoints
            )
        return [endpoint.message() for endpoint in endpoints]

    def _new_transfer_id(self) -> int:
        """Draws 64 random bits, so that a peer cannot guess the transfer of another. Not 0, which marks
        frames that are about no transfer."""
        while not (drawn := secrets.randbits(64)) or self.reserved.tickets.find_transfer(drawn) is not None:
            pass
        return drawn

    def _usable_hashes(self, request: ReserveRequest) -> tuple[bytes, ...]:
        """Hashes of the full blocks that prefill computes: no decode step writes to these."""
        if self.reserved.prefix_cache is None:
            return ()
        full = request.token_count // self.model.layout.groups[0].block_tokens
        return tuple(request.block_hashes[:full])

    def _end_of(self, request: ReserveRequest) -> int:
        prompt_length = request.token_count - request.first_number
        end = prompt_length + request.max_tokens
        if prompt_length < 1 or end <= request.token_count:
            raise BatonError(ErrorKind.INVALID, "a reservation needs a prompt and room for one more token")
        limit = self.model.max_context_tokens
        if end > limit:
            raise BatonError(ErrorKind.CONFLICT, f"{end} tokens exceed the context of {limit}")
        if not self.model.pools.fits_ever(end - 1):
            raise BatonError(ErrorKind.CONFLICT, f"{end} tokens exceed this worker's whole KV cache")
        return end

    def _initial_tokens(self, token_count: int, end: int) -> int:
        """Tokens to allocate blocks for now. The last token ends the sequence and has no KV."""
        output = self.reserve_output_tokens or self.reserved.allocation.output_lengths.most
        return end - 1 if output is None else min(end - 1, token_count + output)

    def _allocate(self, tokens: int, hashes: Sequence[bytes]) -> tuple[Grant, int]:
        """A slot with blocks for `tokens` tokens, and how many of them are cached blocks of the first
        `hashes`. Raises BatonError(OVERLOADED)."""
        slot, generation = self.reserved.slots.grant()
        try:
            if self.reserved.prefix_cache is not None and hashes:
                blocks, resident = self.reserved.prefix_cache.allocate(hashes, tokens)
            else:
                blocks, resident = self.model.pools.allocate(tokens), 0
        except BatonError:
            self.reserved.slots.release(slot, generation)
            raise
        return Grant(slot, generation, blocks, tokens), resident
