"""Compiled grammars, and the state of each guided sequence: a function of the tokens that it has drawn.

The compile process and mask processes compile the same text, `grammar_source`'s, with the same library,
tokenizer and limits; the latter only what the former has compiled.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from baton.base.errors import BatonError, ErrorKind
from baton.engine.shared_memory.mask_board import Mask, mask_words
from baton.model_spec.byte_tokenizer import byte_tokenizer_json
from baton.model_spec.model_files import TOKENIZER_FILE, ConfigFile, ModelLimits
from baton.v1.types_pb2 import Limits
from services.grammar.grammar_source import one_line
from services.grammar.heap import heap_bytes, return_free_memory

# What one grammar may cost. The lexer's fuel is about 20 ms of compiling and 10 ms a token, its states 40 MB.
_LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
# Sets of tokens that are allowed or refused as a whole: text of a JSON string of at most these characters.
# The library's own have 10 and 30, so that the rest of a bounded string is walked token by token.
_STRING_LENGTHS = (2, 4, 6, 8, 10, 12, 16, 30)
_SLICES = [
    *(rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in _STRING_LENGTHS),
    r'[^"\\\x00-\x1F\x7F]+',
]
# Parts of the library's message for a token that the grammar does not allow; other errors are the grammar's.
_OUTSIDE = ("satisfy the grammar", "parser stopped")
# Compiled grammars that are kept for the next request with the same: how many, and the memory that grammars
# and sequences may take before those that were used longest ago are dropped.
_KEPT = 64
KEPT_BYTES = 128 << 20


class GuidedSequence:
    """One sequence's place in its grammar. Not thread-safe."""

    def __init__(self, matcher: LLMatcher, words: int, ends: Sequence[int], limits: Limits) -> None:
        """`words`: of a mask; `ends`: the model's end-of-sequence ids."""
        self._matcher = matcher
        self._words = words
        self._ends = ends
        self._limits = limits
        self._drawn = 0

    def advance(self, tokens: Sequence[int]) -> None:
        """Appends drawn tokens. Raises BatonError: INVALID where the grammar exceeds a limit, INTERNAL where
        it does not allow one."""
        self._drawn += len(tokens)
        if not self._matcher.consume_tokens(list(tokens)):
            reason = self._matcher.get_error()
            if not any(words in reason for words in _OUTSIDE):
                raise _invalid(self._matcher)
            raise BatonError(ErrorKind.INTERNAL, "a token outside the grammar was sampled")

    def mask(self) -> Mask:
        """Returns the mask of the tokens that may be drawn next, [V / 32 rounded up] uint32; no stop id
        before `min_tokens`. Raises BatonError(INVALID) if the grammar exceeds a limit, or there are none."""
        mask = np.zeros(self._words, dtype=np.uint32)
        self.write_mask(mask)
        return mask

    def write_mask(self, mask: Mask) -> None:
        """Writes the mask that `mask` returns into a contiguous array."""
        if mask.shape != (self._words,):
            raise ValueError(f"a mask has {self._words} words, not {mask.shape}")
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise _invalid(self._matcher)
        if not self._matcher.is_accepting():  # nor does an end-of-sequence id count as text, if it has any
            _clear(mask, self._ends)
        if self._drawn < self._limits.min_tokens:
            _clear(mask, self._limits.stop_token_ids)
        if not mask.max():
            raise BatonError(ErrorKind.INVALID, "the grammar allows no token here")


def _clear(mask: Mask, tokens: Iterable[int]) -> None:
    for token in tokens:
        mask[token // 32] &= ~np.uint32(1 << token % 32)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A matcher at its grammar's beginning; the lock is held while it is copied."""

    matcher: LLMatcher
    lock: threading.Lock


class Matchers:
    """Compiles grammars for one model's tokenizer; thread-safe. The library releases the GIL meanwhile."""

    def __init__(
        self,
        tokenizer: LLTokenizer,
        vocab_size: int,
        most_bytes: int | None = None,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """`most_bytes`: of memory that all grammars and sequences may take; beyond, no more are opened."""
        self._kept_bytes = kept_bytes
        self._tokenizer = tokenizer
        self._words = mask_words(vocab_size)
        self._most_bytes = most_bytes
        self._kept: OrderedDict[bytes, _Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self._first_bytes = heap_bytes()

    @classmethod
    def of_model(cls, folder: Path, most_bytes: int | None = None, kept_bytes: int = KEPT_BYTES) -> Matchers:
        """Reads a model's folder. Raises BatonError(INVALID) where its tokenizer cannot be used, or it has no
        end-of-sequence token, by which an output ends that has matched its grammar."""
        limits = ModelLimits.read(ConfigFile.read(folder / "config.json"))
        if not limits.eos_token_ids:
            raise BatonError(ErrorKind.INVALID, "guided decoding needs a model with an end-of-sequence token")
        file = folder / TOKENIZER_FILE
        if file.is_file():
            text = file.read_text(encoding="utf-8")
        else:
            text = byte_tokenizer_json(max(limits.eos_token_ids) + 1)
        try:
            tokenizer = LLTokenizer(
                text, n_vocab=limits.vocab_size, eos_token=list(limits.eos_token_ids), slices=_SLICES
            )
        except ValueError as error:
            raise BatonError(
                ErrorKind.INVALID, f"guided decoding cannot use the tokenizer: {one_line(str(error))}"
            ) from None
        return cls(tokenizer, limits.vocab_size, most_bytes, kept_bytes)

    def open(self, source: str, limits: Limits, output: Sequence[int]) -> GuidedSequence:
        """A sequence that has drawn `output`. `source`: of `grammar_source`. Raises BatonError: INVALID where
        the grammar does not compile within its limits, INTERNAL where it does not allow the output, CONFLICT
        where there is no memory left for another."""
        compiled = self._compiled(source)
        with compiled.lock:
            matcher = compiled.matcher.deep_copy()
        sequence = GuidedSequence(matcher, self._words, self._tokenizer.eos_tokens, limits)
        if output:
            sequence.advance(output)
        return sequence

    def check(self, source: str) -> None:
        """Compiles a grammar and computes its first mask, and keeps neither. Raises BatonError(INVALID) where
        it does not compile within its limits, or allows no token."""
        matcher = self._compile(source)
        GuidedSequence(matcher, self._words, self._tokenizer.eos_tokens, Limits()).mask()

    def warm(self) -> None:
        """Makes the library prepare what it prepares with the first mask, about 2 ms of work."""
        self.check(LLMatcher.grammar_from_regex("[a-z ]+"))

    def keeps(self, source: str) -> bool:
        """True if a sequence of that grammar can be opened without compiling it."""
        with self._lock:
            return _key(source) in self._kept

    @property
    def used_bytes(self) -> int:
        """Memory that grammars and sequences take."""
        return heap_bytes() - self._first_bytes

    def _compiled(self, source: str) -> _Compiled:
        key = _key(source)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        self._make_room()
        compiled = _Compiled(self._compile(source), threading.Lock())
        with self._lock:
            self._kept[key] = compiled
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return compiled

    def _compile(self, source: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise _invalid(matcher)
        return matcher

    def _make_room(self) -> None:
        """Drops grammars until there is room for another. Raises BatonError(CONFLICT) where sequences that
        run leave none."""
        used, dropped = self.used_bytes, False
        while used > self._kept_bytes:
            with self._lock:
                if not self._kept:
                    break
                self._kept.popitem(last=False)
            used, dropped = self.used_bytes, True
        if dropped:
            return_free_memory()
        if self._most_bytes is not None and used > self._most_bytes:
            raise BatonError(ErrorKind.CONFLICT, "the grammars that are in use leave no memory for another")


def _key(source: str) -> bytes:
    return hashlib.sha256(source.encode()).digest()


def _invalid(matcher: LLMatcher) -> BatonError:
    return BatonError(ErrorKind.INVALID, f"the grammar cannot be used: {one_line(matcher.get_error())}")
