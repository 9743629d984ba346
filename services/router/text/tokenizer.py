"""The model's tokenizer and chat template: synchronous encoding and decoding.

Thread-safe. The router uses it in threads for short texts and in helper processes for long ones. The
tokenizer's `encode_batch_fast` releases the GIL, `encode` and `decode` do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from baton.base.errors import BatonError, ErrorKind, FieldError
from baton.model_spec.byte_tokenizer import byte_tokenizer_json
from baton.model_spec.model_files import DEFAULT_TEMPLATE, TOOL_TEMPLATE
from baton.request_fields.table import MAX_PREDICTION_TOKENS
from services.router.request.request import Chat, ParsedRequest
from services.router.request.validate import prediction_too_long, text_exceeds_context
from services.router.text.chat_template import ChatTemplate
from services.router.text.control_tokens import ControlTokens
from services.router.text.detokenizer import Detokenizer
from services.router.text.model_info import ModelInfo
from services.router.text.token_bytes import longest_token_bytes


class ModelTokenizer:
    """The tokenizer and the chat template of one model."""

    def __init__(self, folder: Path, info: ModelInfo, *, bytes_only: bool = False) -> None:
        """BatonError(INVALID) if tokenizer.json is unusable. `bytes_only`: use the byte tokenizer instead."""
        self.tokenizer = (
            Tokenizer.from_str(byte_tokenizer_json())
            if bytes_only
            else _load_tokenizer(folder / "tokenizer.json")
        )
        added = self.tokenizer.get_added_tokens_decoder()
        self._special_tokens = {token.content: id_ for id_, token in added.items() if token.special}
        self._special_ids = frozenset(self._special_tokens.values())
        # None where a text's bytes do not show how many tokens it has at least.
        self.token_bytes = longest_token_bytes(self.tokenizer)
        control = ControlTokens.of(self.tokenizer)
        self._templates = {
            name: ChatTemplate(source, info.tokenizer.special_tokens, control, name)
            for name, source in info.tokenizer.chat_templates.items()
            if name in (DEFAULT_TEMPLATE, TOOL_TEMPLATE)
        }
        # Special tokens that are matched in normalised text, by id: other spellings may become theirs.
        normalises = self.tokenizer.normalizer is not None
        self._normalised = {
            id_: token.content for id_, token in added.items() if token.special and token.normalized
        } if normalises else {}  # fmt: skip

    @property
    def has_chat_template(self) -> bool:
        """True if `encode_chat` can be used."""
        return DEFAULT_TEMPLATE in self._templates

    def encode(self, parsed: ParsedRequest, context: int | None = None) -> Sequence[int]:
        """Token ids of a request's prompt: its own, or those of its conversation or text. `context`: a text
        whose bytes already show that it has more tokens is refused without being tokenised."""
        if parsed.token_ids is not None:
            return parsed.token_ids
        if parsed.chat is not None:
            return self.encode_chat(parsed.chat, context)
        return self.encode_text(parsed.text or "", context, special=parsed.add_special_tokens is not False)

    def encode_text(self, text: str, context: int | None = None, *, special: bool = True) -> list[int]:
        """Token ids of a text prompt. `special`: whether the tokenizer adds its special tokens, such as BOS.
        Special tokens that the text spells are recognised."""
        return self._encode([text], "prompt", context, special=special)

    def encode_chat(self, chat: Chat, context: int | None = None) -> list[int]:
        """Token ids of a conversation. Only the template can write special tokens: those that messages or
        variables spell are tokenised as text."""
        template = self._templates.get(DEFAULT_TEMPLATE)
        if chat.tools:
            template = self._templates.get(TOOL_TEMPLATE, template)
        if template is None:
            message = "this model has no chat template: send a prompt to /v1/completions instead"
            raise FieldError(message, param=chat.field_name, code="no_chat_template")
        if not chat.turns:
            raise FieldError(f"{chat.field_name} must not be empty", param=chat.field_name)
        parts = template.render(chat)
        ids = self._encode(parts, chat.field_name, context, special=False)
        if self._normalised:
            self._check_normalised(parts, ids, chat.field_name)
        return ids

    def encode_prediction(self, text: str) -> list[int]:
        """Token ids of text that an output is expected to contain. Special tokens that it spells are
        recognised: the output may have them, and what is not drawn is not given out. Raises FieldError for a
        text whose bytes show that it has more than `MAX_PREDICTION_TOKENS`."""
        size = _bytes_of([text], "prediction")
        if self.token_bytes is not None and size > MAX_PREDICTION_TOKENS * self.token_bytes:
            raise prediction_too_long(f"has {size} bytes, too many for its tokens")
        return self._ids([text], special=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of all ids at once."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def decode_with_offsets(self, ids: Sequence[int], *, skip_special_tokens: bool) -> tuple[str, list[int]]:
        """The text, and the offset in it at which each token's text begins."""
        detokenizer = self.detokenizer((), skip_special_tokens=skip_special_tokens)
        parts, offsets, length = [], [], 0
        for token_id in ids:
            offsets.append(length)
            parts.append(detokenizer.push(token_id))
            length += len(parts[-1])
        return "".join(parts) + detokenizer.flush(), offsets

    def spellings(self, ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary spells it; empty for unknown ids."""
        return [self.tokenizer.id_to_token(token_id) or "" for token_id in ids]

    @property
    def special_tokens(self) -> dict[str, int]:
        """The ids of all special tokens, by text."""
        return dict(self._special_tokens)

    def detokenizer(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool, kept: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """A new detokenizer for one output. `kept`: special tokens that are not skipped."""
        skipped = self._special_ids - kept if skip_special_tokens else frozenset[int]()
        return Detokenizer(self.tokenizer, skipped, prompt_ids)

    def _encode(self, parts: list[str], param: str, context: int | None, *, special: bool) -> list[int]:
        size = _bytes_of(parts, param)
        if context is not None and self.token_bytes is not None and size > context * self.token_bytes:
            raise text_exceeds_context(param, size, context)
        return self._ids(parts, special=special)

    def _ids(self, parts: list[str], *, special: bool) -> list[int]:
        encodings = self.tokenizer.encode_batch_fast(parts, add_special_tokens=special)
        if len(encodings) == 1:
            return list(encodings[0].ids)
        return [token_id for encoding in encodings for token_id in encoding.ids]

    def _check_normalised(self, parts: list[str], ids: list[int], param: str) -> None:
        """Raises FieldError if text has become a special token by normalisation."""
        written = sum(part.count(spelling) for part in parts for spelling in self._normalised.values())
        if sum(token_id in self._normalised for token_id in ids) > written:
            raise FieldError(f"{param}: the text spells a special token of the model", param=param)


def _bytes_of(parts: list[str], param: str) -> int:
    """The bytes of texts; FieldError if one is no Unicode."""
    try:
        return sum(len(part.encode()) for part in parts)
    except UnicodeEncodeError:  # JSON can encode unpaired surrogates
        raise FieldError(f"{param}: the text is not valid Unicode", param=param) from None


def _load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise BatonError(ErrorKind.INVALID, f"model folder {path.parent} has no {path.name}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare Exception
        raise BatonError(ErrorKind.INVALID, f"{path} cannot be read: {error}") from error
    # Some files configure truncation; a prompt that is too long is refused instead.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
