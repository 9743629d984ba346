"""Validates commit records against their reservations and prepares sequences for their slots.

    prepare    early, while the prompt is computed: everything but the first token
    complete   with the first token, when the commit arrives or shortly before

An invalid record is refused when its sequence is admitted; a prepared sequence is not admitted yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.base.errors import BatonError, ErrorKind
from baton.engine.executor.decode_loop import DecodeLoop
from baton.engine.prefix_cache.cache import PrefixCache
from baton.engine.sequence import Limits
from baton.v1.transfer_pb2 import CommitRecord
from services.worker.engine.common.request_parameters import (
    check_token_ids,
    first_logprobs_of,
    limits_of,
    sampling_of,
)
from services.worker.engine.decode.reservation import PreparedSequence, Reservation
from services.worker.engine.startup.model_loader import LoadedModel


@dataclass(frozen=True, slots=True)
class SequencePreparer:
    """Prepares sequences of one engine to be admitted to their slots. `prefix_cache`: None where no blocks
    arrive over links, or none are cached."""

    model: LoadedModel
    loop: DecodeLoop
    prefix_cache: PrefixCache | None

    def prepare(self, reservation: Reservation, record: CommitRecord) -> None:
        """Prepares a sequence without its first token. Raises BatonError as `complete` does."""
        reservation.prepared = self._prepared(reservation, record)

    def complete(self, reservation: Reservation, record: CommitRecord) -> PreparedSequence:
        """Completes the prepared sequence, once. Raises BatonError: CONFLICT where the record is not that of
        the reservation, INVALID where a value is out of range."""
        prepared = reservation.prepared or self._prepared(reservation, record)
        if not prepared.complete:
            self._complete(prepared, record)
            reservation.prepared = prepared
        return prepared

    def _complete(self, prepared: PreparedSequence, record: CommitRecord) -> None:
        vocab_size = self.model.config.vocab_size
        if record.first_token_id >= vocab_size:
            raise BatonError(ErrorKind.INVALID, "the first token is outside the vocabulary")
        self.loop.complete(
            prepared.entry,
            token_ids=record.token_ids,
            prompt_length=record.prompt_length,
            sampling=prepared.sampling,
            last_token=record.first_token_id,
            last_logprobs=first_logprobs_of(record, prepared.sampling, vocab_size),
        )
        prepared.complete = True

    def _prepared(self, reservation: Reservation, record: CommitRecord) -> PreparedSequence:
        vocab_size = self.model.config.vocab_size
        sampling = sampling_of(record.sampling, vocab_size, self.model.max_logprobs)
        limits = limits_of(record.limits, vocab_size)
        self._check_record(record, reservation, limits)
        block_hashes = self._check_resident(record, reservation)
        entry = self.loop.begin_admission(
            reservation.grant,
            token_ids=record.token_ids,
            prompt_length=record.prompt_length,
            end=reservation.end,
            sampling=sampling,
            limits=limits,
            masked=reservation.masked,
            prediction=reservation.prediction,
            most_drafts=reservation.max_draft_tokens,
            tenant=reservation.tenant,
        )
        reservation.prediction = ()  # the slot's history has it
        return PreparedSequence(entry, sampling, block_hashes)

    def _check_record(self, record: CommitRecord, reservation: Reservation, limits: Limits) -> None:
        end = record.prompt_length + limits.max_tokens
        if record.attempt != reservation.attempt or len(record.token_ids) != reservation.token_count:
            raise BatonError(ErrorKind.CONFLICT, "the commit is not of the attempt that was reserved")
        if end != reservation.end or len(record.token_ids) + 1 >= end:
            raise BatonError(ErrorKind.CONFLICT, "the commit's limits are not those reserved")
        if not 1 <= record.prompt_length <= len(record.token_ids):
            raise BatonError(ErrorKind.INVALID, "prompt_length must lie within token_ids")
        check_token_ids(record.token_ids, self.model.config.vocab_size)

    def _check_resident(self, record: CommitRecord, reservation: Reservation) -> tuple[bytes, ...]:
        """Hashes the prompt's blocks. Raises BatonError(CONFLICT) where the resident blocks, which were not
        sent, are of other tokens or another tenant: the hashes in the reservation came from the router."""
        if self.prefix_cache is None or reservation.own_prefill:
            return ()  # own prefill has cached its blocks itself
        hashes = self.prefix_cache.hashes_of(record.token_ids, reservation.tenant)
        if hashes[: reservation.resident_blocks] != reservation.block_hashes:
            raise BatonError(ErrorKind.CONFLICT, "the resident blocks are not of these tokens")
        return hashes
