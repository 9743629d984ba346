"""Text to token ids and back, off the event loop: the tokenizer releases the interpreter lock."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tokenizers import Tokenizer

from baton.errors import BatonError, ErrorKind, FieldError
from services.router.byte_tokenizer import byte_tokenizer
from services.router.chat_template import ChatTemplate
from services.router.detokenize import Detokenizer
from services.router.token_texts import TokenTexts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from services.router.model_info import ModelInfo
    from services.router.request import Chat

T = TypeVar("T")


class TextPool:
    """The model's tokenizer and chat template behind a few threads; at most `max_pending` jobs."""

    def __init__(
        self, folder: Path, info: ModelInfo, threads: int, max_pending: int, *, bytes_only: bool = False
    ) -> None:
        """Raises BatonError(INVALID) where tokenizer.json is missing or broken; `bytes_only` needs none."""
        self._tokenizer = byte_tokenizer() if bytes_only else _load_tokenizer(folder / "tokenizer.json")
        self._template = ChatTemplate(info.chat_template, info.special_tokens) if info.chat_template else None
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self.token_texts = TokenTexts(self._tokenizer)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")
        self._max_pending = max_pending
        self._pending = 0

    async def encode_text(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """A plain prompt's ids, with whatever the tokenizer itself puts around it unless not `special`."""
        return await self._run(lambda: self._encode(text, "prompt", special=special))

    async def encode_chat(self, chat: Chat) -> tuple[int, ...]:
        """A rendered conversation's ids; the template itself writes every special token."""
        template = self._template
        if template is None:
            message = "this model has no chat template: send a prompt to /v1/completions instead"
            raise FieldError(message, param="messages", code="no_chat_template")
        return await self._run(lambda: self._encode(template.render(chat), "messages", special=False))

    def vocabulary_strings(self, ids: Sequence[int]) -> list[str]:
        """Each token in the spelling of the vocabulary; empty for an id without one."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in ids]

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of all ids at once."""
        text: str = await self._run(
            lambda: self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        )
        return text

    async def decode_with_offsets(
        self, ids: Sequence[int], *, skip_special_tokens: bool
    ) -> tuple[str, tuple[int, ...]]:
        """The text, and where in it that of each token begins."""
        return await self._run(lambda: self._offsets(ids, skip_special_tokens=skip_special_tokens))

    def detokenizer(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Detokenizer:
        """A fresh detokenizer for one output."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        return Detokenizer(self._tokenizer, skipped, prompt_ids)

    def close(self) -> None:
        """Ends the threads; running jobs are short."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str, param: str, *, special: bool) -> tuple[int, ...]:
        try:
            text.encode()
        except UnicodeEncodeError:  # JSON can spell halves of surrogate pairs, which are no characters
            raise FieldError(f"{param}: the text is not valid Unicode", param=param) from None
        return tuple(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def _offsets(self, ids: Sequence[int], *, skip_special_tokens: bool) -> tuple[str, tuple[int, ...]]:
        detokenizer = self.detokenizer((), skip_special_tokens=skip_special_tokens)
        parts, offsets, length = [], [], 0
        for token_id in ids:
            offsets.append(length)
            parts.append(detokenizer.push(token_id))
            length += len(parts[-1])
        return "".join(parts) + detokenizer.flush(), tuple(offsets)

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
