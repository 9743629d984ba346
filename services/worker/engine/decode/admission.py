"""What a commit's record asks for, checked against what was reserved, and made ready for its slot.

    describe   while the prompt is computed: all but its first token
    complete   with the first token, before the last byte is here or behind it

What is wrong with a record is said when it is completed; a sequence that is ready is not admitted yet.
"""

from __future__ import annotations

from baton.engine.decode.loop import DecodeLoop
from baton.engine.prefix_cache.cache import PrefixCache
from baton.engine.sequence import Limits
from baton.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import CommitRecord
from services.worker.engine.decode.request_parameters import (
    check_token_ids,
    first_logprobs_of,
    limits_of,
    sampling_of,
)
from services.worker.engine.decode.reservation import Admission, Reservation
from services.worker.engine.startup.model_loader import LoadedModel


class Admissions:
    """Of one engine's decode side. `prefixes`: where blocks that come over links are named, if they are."""

    def __init__(self, model: LoadedModel, loop: DecodeLoop) -> None:
        self.prefixes: PrefixCache | None = None
        self._model = model
        self._loop = loop

    def describe(self, reservation: Reservation, record: CommitRecord) -> None:
        """Of a record that came ahead; `BatonError` as `complete`."""
        reservation.admission = self._admission(reservation, record)

    def complete(self, reservation: Reservation, record: CommitRecord) -> Admission:
        """With the first token, once. Raises BatonError where the record is not the ticket's."""
        admission = reservation.admission or self._admission(reservation, record)
        if reservation.complete:
            return admission
        vocab_size = self._model.config.vocab_size
        if record.first_token_id >= vocab_size:
            raise BatonError(ErrorKind.INVALID, "the first token is out of the vocabulary")
        self._loop.complete(
            admission.entry,
            token_ids=record.token_ids,
            prompt_length=record.prompt_length,
            sampling=admission.sampling,
            last_token=record.first_token_id,
            last_logprobs=first_logprobs_of(record, admission.sampling, vocab_size),
        )
        reservation.admission, reservation.complete = admission, True
        return admission

    def _admission(self, reservation: Reservation, record: CommitRecord) -> Admission:
        """All but the first token; raises the same."""
        vocab_size = self._model.config.vocab_size
        sampling = sampling_of(record.sampling, vocab_size, self._model.max_logprobs)
        limits = limits_of(record.limits, vocab_size)
        self._check_record(record, reservation, limits)
        names = self._names_of(record, reservation)
        entry = self._loop.begin_admission(
            reservation.grant,
            token_ids=record.token_ids,
            prompt_length=record.prompt_length,
            end=reservation.end,
            sampling=sampling,
            limits=limits,
        )
        return Admission(entry, sampling, names)

    def _check_record(self, record: CommitRecord, reservation: Reservation, limits: Limits) -> None:
        end = record.prompt_length + limits.max_tokens
        if record.attempt != reservation.attempt or len(record.token_ids) != reservation.token_count:
            raise BatonError(ErrorKind.CONFLICT, "the commit is not of the attempt that was reserved")
        if end != reservation.end or len(record.token_ids) + 1 >= end:
            raise BatonError(ErrorKind.CONFLICT, "the commit's limits are not those reserved")
        if not 1 <= record.prompt_length <= len(record.token_ids):
            raise BatonError(ErrorKind.INVALID, "prompt_length lies within token_ids")
        check_token_ids(record.token_ids, self._model.config.vocab_size)

    def _names_of(self, record: CommitRecord, reservation: Reservation) -> tuple[bytes, ...]:
        """The prompt's blocks as we name them ourselves. Raises CONFLICT where those that were not sent are
        of other tokens or another tenant, whatever router and prefill made of it."""
        if self.prefixes is None:
            return ()
        names = self.prefixes.names_of(record.token_ids, reservation.tenant)
        if names[: reservation.held] != reservation.names:
            raise BatonError(ErrorKind.CONFLICT, "the blocks that were held are not of these tokens")
        return names
