"""Tokenising and detokenising off the event loop: short texts in threads, long ones in helper processes."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TypeVar

from baton.v1.router_pb2 import TokenIds
from services.router.request.request import ParsedRequest, Request
from services.router.request.sizes import LARGE_TOKENS
from services.router.request.validate import RequestLimits, check_prediction
from services.router.tenants.current import current_tenant
from services.router.tenants.places import Places
from services.router.text.output_text import OutputText
from services.router.text.token_texts import TokenTexts
from services.router.text.tokenizer import ModelTokenizer
from services.router.tokenization import helper_jobs
from services.router.tokenization.fair_threads import FairThreads
from services.router.tokenization.helper_processes import HelperProcesses

T = TypeVar("T")
# Decoding with offsets goes token by token in Python, so a thread decodes fewer ids.
LARGE_OFFSETS = 1024
# Bytes of a token's text, on average.
_ID_BYTES = 4


class TokenizerPool:
    """The model's tokenizer and chat template behind a few threads, with at most `max_pending` jobs, which
    tenants share."""

    def __init__(
        self, tokenizer: ModelTokenizer, processes: HelperProcesses, threads: int, max_pending: int
    ) -> None:
        """Takes ownership of `processes`."""
        self.tokenizer = tokenizer
        self.processes = processes
        self.token_texts = TokenTexts(tokenizer.tokenizer)
        self._threads = FairThreads(threads, "tokenizer", ahead=threads)
        self._places = Places(max_pending, "tokenizer_places", "prompts wait to be tokenised")

    async def encode(self, parsed: ParsedRequest, context: int) -> tuple[int, ...]:
        """Token ids of a short prompt; see ModelTokenizer.encode."""
        return await self.run(lambda: tuple(self.tokenizer.encode(parsed, context)), _text_bytes(parsed))

    async def encode_prediction(self, text: str, limits: RequestLimits) -> TokenIds:
        """Token ids of a short prediction, within the limits. Raises FieldError."""
        return await self.run(
            lambda: TokenIds(ids=check_prediction(self.tokenizer.encode_prediction(text), limits)), len(text)
        )

    async def decode(self, ids: Sequence[int], limits: RequestLimits, *, skip_special_tokens: bool) -> str:
        """The text of all ids at once."""
        if len(ids) > LARGE_TOKENS:
            decoded, _ = await self._decode_in_process(ids, limits, skip=skip_special_tokens, offsets=False)
            return decoded
        return await self.run(
            lambda: self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens), _ID_BYTES * len(ids)
        )

    async def decode_with_offsets(
        self, ids: Sequence[int], limits: RequestLimits, *, skip_special_tokens: bool
    ) -> tuple[str, Sequence[int]]:
        """The text, and the offset in it at which each token's text begins."""
        if len(ids) > LARGE_OFFSETS:
            return await self._decode_in_process(ids, limits, skip=skip_special_tokens, offsets=True)
        return await self.run(
            lambda: self.tokenizer.decode_with_offsets(ids, skip_special_tokens=skip_special_tokens),
            _ID_BYTES * len(ids),
        )

    def output_text(self, request: Request) -> OutputText:
        """The text side of a request's output."""
        kept = frozenset[int]() if request.structure is None else request.structure.kept_ids
        detokenizer = self.tokenizer.detokenizer(
            request.prompt_ids, skip_special_tokens=request.skip_special_tokens, kept=kept
        )
        return OutputText(request, detokenizer)

    async def run(self, job: Callable[[], T], size_bytes: int) -> T:
        """Runs a job of at most a few milliseconds in a thread, when it is its tenant's turn.

        `size_bytes`: of what it reads. Raises BatonError: OVERLOADED if too many wait, RATE_LIMITED if too
        many of the call's tenant do.
        """
        with self._places.hold(current_tenant()):
            return await self._threads.run(job, size_bytes)

    def close(self) -> None:
        """Stops the threads, without waiting for running jobs, and the helper processes."""
        self._threads.shutdown(wait=False)
        self.processes.close()

    async def _decode_in_process(
        self, ids: Sequence[int], limits: RequestLimits, *, skip: bool, offsets: bool
    ) -> tuple[str, array[int]]:
        packed = await self.run(lambda: array("i", ids).tobytes(), _ID_BYTES * len(ids))
        text, starts = await self.processes.run(
            helper_jobs.decode.__name__, limits, [packed], skip_special_tokens=skip, offsets=offsets
        )
        return text.decode(), array("i", starts)


def _text_bytes(parsed: ParsedRequest) -> int:
    """The size of a prompt's text, by its characters."""
    if parsed.chat is not None:
        return sum(len(turn.content) for turn in parsed.chat.turns)
    return len(parsed.text or "")
