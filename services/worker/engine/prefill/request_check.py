"""What a Prefill call asks for, checked: its prompt as a sequence, its ticket against both."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from baton.engine.prefix_cache.cache import PrefixCache
from baton.engine.sequence import Sequence
from baton.errors import BatonError, ErrorKind
from baton.v1.decode_pb2 import Ticket, TicketBody
from baton.v1.prefill_pb2 import PrefillRequest
from services.worker.engine.decode.request_parameters import check_token_ids, limits_of, sampling_of
from services.worker.engine.startup.model_loader import LoadedModel


class Intake:
    """Of one engine's prefill side."""

    def __init__(self, model: LoadedModel, prefixes: PrefixCache | None, *, names_agree: bool) -> None:
        """`names_agree`: our names of blocks are also decode's, since all were told one secret."""
        self._model = model
        self._prefixes = prefixes
        self._names_agree = names_agree

    def sequence_of(self, request: PrefillRequest) -> Sequence:
        """Raises BatonError INVALID."""
        vocab_size = self._model.config.vocab_size
        check_token_ids(request.token_ids, vocab_size)
        limits = limits_of(request.limits, vocab_size, least_tokens=0)
        length = len(request.token_ids)
        if not 1 <= request.prompt_length <= length:
            raise BatonError(ErrorKind.INVALID, "prompt_length lies within token_ids")
        if request.prompt_length + limits.max_tokens > self._model.max_context_tokens:
            limit = self._model.max_context_tokens
            raise BatonError(ErrorKind.INVALID, f"the request exceeds the context of {limit} tokens")
        sampling = sampling_of(request.sampling, vocab_size, self._model.max_logprobs)
        sequence = Sequence(tuple(request.token_ids), request.prompt_length, sampling, limits)
        sequence.prompt_logprobs = request.prompt_logprobs
        if self._prefixes is not None:
            self._prefixes.name(sequence, request.tenant)
        ticketed = request.HasField("ticket") or request.ticket_follows
        if not sequence.draws and (ticketed or sequence.first_number):
            raise BatonError(ErrorKind.INVALID, "a request for no tokens has no ticket and no output")
        if request.HasField("ticket") and request.ticket_follows:
            raise BatonError(ErrorKind.INVALID, "a ticket that is here does not follow")
        return sequence

    def ticket_of(self, request: PrefillRequest, sequence: Sequence) -> TicketBody:
        """Of its ticket. Raises BatonError: INVALID, or CONFLICT where that is not for this sequence."""
        body = _body_of(request.ticket)
        length = len(request.token_ids)
        counts = self._model.pools.counts_for(length)
        if (
            body.attempt != request.attempt
            or body.token_count != length
            or tuple(body.block_counts) != counts
        ):
            raise BatonError(ErrorKind.CONFLICT, "the ticket is for another attempt")
        if body.fingerprint != self._model.fingerprint:
            raise BatonError(ErrorKind.CONFLICT, "the ticket's worker has another model or cache layout")
        if any(body.resident_counts):
            self._check_held(body, sequence)
        return body

    def _check_held(self, body: TicketBody, sequence: Sequence) -> None:
        """Raises CONFLICT where what decode holds already is not the beginning of this prompt. Decode asks
        again at the commit, and where our names are not its own it alone does."""
        groups, held = self._model.layout.groups, body.resident_counts[0]
        if (
            list(body.resident_counts) != [held] * len(groups)
            or held > sequence.length // groups[0].block_tokens
        ):
            raise BatonError(ErrorKind.CONFLICT, "the ticket calls more held than full blocks of the prompt")
        comparable = self._names_agree and self._prefixes is not None
        if comparable and sequence.hashes[held - 1] != body.resident_hash:
            raise BatonError(ErrorKind.CONFLICT, "the blocks that decode holds are not of these tokens")


def _body_of(ticket: Ticket) -> TicketBody:
    try:
        return TicketBody.FromString(ticket.body)
    except DecodeError as error:
        raise BatonError(ErrorKind.INVALID, "the ticket cannot be read") from error
