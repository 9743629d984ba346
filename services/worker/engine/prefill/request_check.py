"""Validates Prefill requests: the prompt and its parameters, and its ticket against both."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from baton.base.errors import BatonError, ErrorKind
from baton.engine.prefix_cache.cache import PrefixCache
from baton.engine.sequence import Sequence
from baton.engine.shared_memory.mask_board import Mask, mask_words
from baton.v1.decode_pb2 import Ticket, TicketBody
from baton.v1.prefill_pb2 import PrefillRequest
from services.worker.engine.common.request_parameters import check_token_ids, limits_of, sampling_of
from services.worker.engine.startup.model_loader import LoadedModel


@dataclass(frozen=True, slots=True)
class RequestCheck:
    """The checks of one engine's prefill side. Nothing that a peer sends is trusted.

    `shared_prefix_secret`: whether decode workers hash blocks with the same secret, so that hashes can be
    compared.
    """

    model: LoadedModel
    prefix_cache: PrefixCache | None
    shared_prefix_secret: bool

    def sequence_of(self, request: PrefillRequest, first_token_mask: bytes = b"") -> Sequence:
        """The request's prompt as a sequence. Raises BatonError: INVALID, CONFLICT where it
        exceeds a limit of this worker."""
        vocab_size, limit = self.model.config.vocab_size, self.model.max_context_tokens
        check_token_ids(request.token_ids, vocab_size)
        limits = limits_of(request.limits, vocab_size, least_tokens=0)
        if not 1 <= request.prompt_length <= len(request.token_ids):
            raise BatonError(ErrorKind.INVALID, "prompt_length must lie within token_ids")
        if request.prompt_length + limits.max_tokens > limit:
            raise BatonError(ErrorKind.CONFLICT, f"the request exceeds the context of {limit} tokens")
        sampling = sampling_of(request.sampling, vocab_size, self.model.max_logprobs)
        sequence = Sequence(tuple(request.token_ids), request.prompt_length, sampling, limits)
        sequence.prompt_logprobs = request.prompt_logprobs
        if request.first_token_in_s > 0:
            sequence.first_token_in_s = request.first_token_in_s
        if request.HasField("grammar"):
            sequence.mask = _mask_of(first_token_mask, vocab_size)
        if self.prefix_cache is not None:
            sequence.hashes = self.prefix_cache.hashes_of(sequence.token_ids, request.tenant)
        ticketed = request.HasField("ticket") or request.ticket_follows
        if not sequence.draws and (ticketed or sequence.first_number):
            raise BatonError(ErrorKind.INVALID, "a request for no tokens has no ticket and no output")
        if request.HasField("ticket") and request.ticket_follows:
            raise BatonError(ErrorKind.INVALID, "a request has either a ticket or ticket_follows")
        return sequence

    def ticket_of(self, request: PrefillRequest, sequence: Sequence) -> TicketBody:
        """The body of the request's ticket. Raises BatonError: INVALID where it cannot be parsed, CONFLICT
        where it is not for this sequence."""
        body = _body_of(request.ticket)
        length = len(request.token_ids)
        counts = self.model.pools.counts_for(length)
        if (
            body.attempt != request.attempt
            or body.token_count != length
            or tuple(body.block_counts) != counts
        ):
            raise BatonError(ErrorKind.CONFLICT, "the ticket is for another attempt")
        if body.fingerprint != self.model.fingerprint:
            raise BatonError(ErrorKind.CONFLICT, "the ticket's worker has another model or cache layout")
        if any(body.resident_counts):
            self._check_resident(body, sequence)
        return body

    def _check_resident(self, body: TicketBody, sequence: Sequence) -> None:
        """Raises BatonError(CONFLICT) where the blocks that decode has already are not the beginning of this
        prompt. Decode checks again at the commit, and alone where the secrets differ."""
        groups, resident = self.model.layout.groups, body.resident_counts[0]
        full = sequence.length // groups[0].block_tokens
        if list(body.resident_counts) != [resident] * len(groups) or resident > full:
            raise BatonError(
                ErrorKind.CONFLICT, "the ticket claims more resident blocks than the prompt has full ones"
            )
        comparable = self.shared_prefix_secret and self.prefix_cache is not None
        if comparable and sequence.hashes[resident - 1] != body.resident_hash:
            raise BatonError(ErrorKind.CONFLICT, "the resident blocks at decode are not of these tokens")


def _mask_of(mask: bytes, vocab_size: int) -> Mask:
    words = mask_words(vocab_size)
    if len(mask) != 4 * words:
        message = f"the mask of a vocabulary of {vocab_size} has {4 * words} bytes, not {len(mask)}"
        raise BatonError(ErrorKind.INTERNAL, message)
    return np.frombuffer(mask, dtype=np.uint32)


def _body_of(ticket: Ticket) -> TicketBody:
    try:
        return TicketBody.FromString(ticket.body)
    except DecodeError as error:
        raise BatonError(ErrorKind.INVALID, "the ticket cannot be parsed") from error
