"""Text to token ids and back, off the event loop: in threads what is short, in processes what is long."""

from __future__ import annotations

import asyncio
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from baton.errors import BatonError, ErrorKind
from services.router.request.sizes import LARGE_TOKENS
from services.router.text.token_texts import TokenTexts
from services.router.tokenization import helper_jobs as text_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.router.request.request import Chat
    from services.router.request.served_model import Model
    from services.router.text.detokenizer import Detokenizer
    from services.router.text.tokenizer import ModelText
    from services.router.tokenization.helper_processes import TextProcesses

T = TypeVar("T")
# Decoded token by token, in Python, so that fewer are done in a thread.
_LARGE_OFFSETS = 1024


class TextPool:
    """The model's tokenizer and chat template behind a few threads; at most `max_pending` jobs."""

    def __init__(self, text: ModelText, processes: TextProcesses, threads: int, max_pending: int) -> None:
        """Owns `processes` and closes them."""
        self.text = text
        self.processes = processes
        self.token_texts = TokenTexts(text.tokenizer)
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self._max_pending = max_pending
        self._pending = 0

    async def encode_text(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """A short prompt's ids; see ModelText.encode_text."""
        return await self.run(lambda: tuple(self.text.encode_text(text, special=special)))

    async def encode_chat(self, chat: Chat) -> tuple[int, ...]:
        """A short conversation's ids; see ModelText.encode_chat."""
        return await self.run(lambda: tuple(self.text.encode_chat(chat)))

    async def decode(self, ids: Sequence[int], model: Model, *, skip_special_tokens: bool) -> str:
        """The text of all ids at once."""
        if len(ids) > LARGE_TOKENS:
            decoded, _ = await self._decode_in_process(ids, model, skip=skip_special_tokens, offsets=False)
            return decoded
        return await self.run(lambda: self.text.decode(ids, skip_special_tokens=skip_special_tokens))

    async def decode_with_offsets(
        self, ids: Sequence[int], model: Model, *, skip_special_tokens: bool
    ) -> tuple[str, Sequence[int]]:
        """The text, and where in it that of each token begins."""
        if len(ids) > _LARGE_OFFSETS:
            return await self._decode_in_process(ids, model, skip=skip_special_tokens, offsets=True)
        return await self.run(
            lambda: self.text.decode_with_offsets(ids, skip_special_tokens=skip_special_tokens)
        )

    def detokenizer(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        """A fresh detokenizer for one output."""
        return self.text.detokenizer(prompt_ids, skip_special_tokens=skip_special_tokens)

    async def run(self, job: Callable[[], T]) -> T:
        """Runs a job of at most a few milliseconds in a thread; BatonError(OVERLOADED) where many wait."""
        if self._pending >= self._max_pending:
            raise BatonError(ErrorKind.OVERLOADED, f"{self._pending} prompts wait to be tokenised")
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, job)
        finally:
            self._pending -= 1

    def close(self) -> None:
        """Ends threads and processes; running jobs of threads are short."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.processes.close()

    async def _decode_in_process(
        self, ids: Sequence[int], model: Model, *, skip: bool, offsets: bool
    ) -> tuple[str, array[int]]:
        packed = await self.run(lambda: array("i", ids).tobytes())
        text, starts = await self.processes.run(
            text_jobs.decode.__name__, model, [packed], skip_special_tokens=skip, offsets=offsets
        )
        numbers = array("i")
        numbers.frombytes(starts)
        return text.decode(), numbers
