"""Text to token ids, off the event loop: the tokenizer releases the interpreter lock."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tokenizers import Tokenizer

from baton.errors import BatonError, ErrorKind
from services.router.chat_template import ChatTemplate
from services.router.detokenize import Detokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.router.model_info import ModelInfo
    from services.router.request import ChatTurn

T = TypeVar("T")


class TextPool:
    """The model's tokenizer and chat template behind a few threads; at most `max_pending` jobs."""

    def __init__(self, folder: Path, info: ModelInfo, threads: int, max_pending: int) -> None:
        """Raises BatonError(INVALID) where tokenizer.json is missing or broken."""
        self._tokenizer = _load_tokenizer(folder / "tokenizer.json")
        self._template = ChatTemplate(info.chat_template, info.special_tokens) if info.chat_template else None
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self._max_pending = max_pending
        self._pending = 0

    async def encode_text(self, text: str) -> tuple[int, ...]:
        """A plain prompt's ids, with whatever the tokenizer itself puts around it."""
        return await self._run(lambda: self._encode(text, special=True))

    async def encode_chat(self, messages: Sequence[ChatTurn]) -> tuple[int, ...]:
        """A rendered conversation's ids; the template itself writes every special token."""
        template = self._template
        if template is None:
            raise BatonError(ErrorKind.INVALID, "this model has no chat template")
        return await self._run(lambda: self._encode(template.render(messages), special=False))

    def detokenizer(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        """A fresh detokenizer for one output."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        return Detokenizer(self._tokenizer, skipped, prompt_ids)

    def close(self) -> None:
        """Ends the threads; running jobs are short."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=special).ids)

    async def _run(self, job: Callable[[], T]) -> T:
        if self._pending >= self._max_pending:
            raise BatonError(ErrorKind.OVERLOADED, f"{self._pending} prompts wait to be tokenised")
        self._pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, job)
        finally:
            self._pending -= 1


def _load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise BatonError(ErrorKind.INVALID, f"model folder {path.parent} has no {path.name}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare Exception
        raise BatonError(ErrorKind.INVALID, f"{path} cannot be read: {error}") from error
    # Baked into some files; a prompt is refused when too long, never cut in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
