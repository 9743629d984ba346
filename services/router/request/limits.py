"""The limits that workers describe, and what a request asks of them."""

from __future__ import annotations

import sys
from typing import NamedTuple

from baton.v1.types_pb2 import Grammar
from baton.v1.worker_pb2 import DescribeResponse

# A limit that is not known.
UNKNOWN = sys.maxsize


class Needs(NamedTuple):
    """Requirements of an attempt on workers. `computed`: tokens to prefill, with the output of earlier
    attempts. `total`: tokens of prompt and output together. `logprobs`: alternatives of each token, None for
    no logprobs. `output_format`: the kind of its grammar; empty without one."""

    computed: int
    total: int
    logprobs: int | None = None
    output_format: str = ""


def kind_of(grammar: Grammar | None) -> str:
    """The kind of a grammar, by the name of its field; empty without one."""
    return "" if grammar is None else grammar.WhichOneof("kind") or ""


class WorkerLimits(NamedTuple):
    """The limits of one worker. `formats`: the kinds of grammar that it can guide an output by; None: not
    known. `max_prefills`: prompts that it computes or has waiting."""

    context: int = UNKNOWN
    kv_tokens: int = UNKNOWN
    max_logprobs: int = UNKNOWN
    formats: frozenset[str] | None = None
    max_prefills: int = UNKNOWN

    @classmethod
    def of(cls, described: DescribeResponse) -> WorkerLimits:
        """Reads the limits that a worker describes."""
        context = described.max_context_tokens or UNKNOWN
        if not described.HasField("limits"):
            return cls(context)
        limits = described.limits
        return cls(
            context,
            limits.kv_tokens or UNKNOWN,
            limits.max_logprobs,
            frozenset(limits.output_formats),
            limits.max_prefills or UNKNOWN,
        )

    def prefills(self, needs: Needs) -> bool:
        """True if the worker may compute the prompt of a request."""
        if needs.computed > self.kv_tokens or needs.total > self.context:
            return False
        return (needs.logprobs is None and not needs.output_format) or self._offers(needs)

    def decodes(self, needs: Needs) -> bool:
        """True if the worker may decode the whole output of a request."""
        if needs.total > self.kv_tokens or needs.total > self.context:
            return False
        return (needs.logprobs is None and not needs.output_format) or self._offers(needs)

    def _offers(self, needs: Needs) -> bool:
        return offers_logprobs(self.max_logprobs, needs.logprobs) and offers_format(
            self.formats, needs.output_format
        )


class PairLimits(NamedTuple):
    """The limits of a pair of workers: tokens of a prompt, of prompt and output together, logprobs, and kinds
    of grammar."""

    prompt: int
    total: int
    max_logprobs: int = UNKNOWN
    formats: frozenset[str] | None = None

    @classmethod
    def of(cls, prefill: WorkerLimits, decode: WorkerLimits) -> PairLimits:
        """Combines the limits of a prefill and a decode worker."""
        known = [one.formats for one in (prefill, decode) if one.formats is not None]
        return cls(
            min(prefill.context, prefill.kv_tokens),
            min(prefill.context, decode.context, decode.kv_tokens),
            min(prefill.max_logprobs, decode.max_logprobs),
            frozenset.intersection(*known) if known else None,
        )

    @property
    def context(self) -> int:
        """Tokens that a request may have in all, however they are divided between prompt and output."""
        return min(self.prompt, self.total)

    def offers(self, logprobs: int | None, output_format: str) -> bool:
        """True if the pair serves requests with `logprobs` logprobs and such a grammar."""
        return offers_logprobs(self.max_logprobs, logprobs) and offers_format(self.formats, output_format)


def offers_logprobs(limit: int, wanted: int | None) -> bool:
    """True if `wanted` alternatives of each token are within a worker's limit, of which 0 disables
    logprobs."""
    return wanted is None or 0 < limit >= wanted


def offers_format(formats: frozenset[str] | None, wanted: str) -> bool:
    """True if a kind of grammar is among those of a worker."""
    return not wanted or formats is None or wanted in formats
