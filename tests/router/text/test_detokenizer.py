"""Incremental text equals the decoding of everything, and costs a bounded amount a token."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from services.router.text.detokenizer import Detokenizer
from tests.router.conftest import EOS, SPECIAL, byte_characters, byte_tokenizer
from tests.router.fake_model import VOCAB

TOKENIZER = byte_tokenizer()
SPECIALS = frozenset({EOS, SPECIAL})


def merged_tokenizer() -> Tokenizer:
    """Bytes, and every pair of some bytes that begin, continue or are no part of a character."""
    alphabet = byte_characters()
    some = [0x41, 0x80, 0xA9, 0xBF, 0xC3, 0xE2, 0xED, 0xF0, 0x9F, 0x98, 0xEF, 0xBD, 0xFF]
    vocab = {alphabet[byte]: byte for byte in range(256)}
    for first in some:
        for second in some:
            vocab[alphabet[first] + alphabet[second]] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


MERGED = merged_tokenizer()
BYTE_IDS = st.lists(st.integers(0, 255), max_size=120)
UGLY_BYTES = st.lists(
    st.sampled_from(
        [0x41, 0x80, 0xA9, 0xBF, 0xC3, 0xE2, 0x82, 0xAC, 0xED, 0xF0, 0x9F, 0x98, 0xEF, 0xBD, 0xFF]
    ),
    max_size=120,
)


def stream(
    tokenizer: Tokenizer, ids: list[int], specials: frozenset[int] = SPECIALS, prompt: list[int] | None = None
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, specials, prompt or [])
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def whole(tokenizer: Tokenizer, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text


@given(st.one_of(BYTE_IDS, UGLY_BYTES))
@settings(max_examples=400, deadline=None)
def test_any_bytes(ids: list[int]) -> None:
    assert "".join(stream(TOKENIZER, ids)) == whole(TOKENIZER, ids)


@given(st.lists(st.integers(256, MERGED.get_vocab_size() - 1), max_size=120))
@settings(max_examples=400, deadline=None)
def test_tokens_that_end_within_characters(ids: list[int]) -> None:
    assert "".join(stream(MERGED, ids, frozenset())) == whole(MERGED, ids)


@given(st.text(max_size=60), st.one_of(BYTE_IDS, UGLY_BYTES))
@settings(max_examples=200, deadline=None)
def test_after_a_prompt(prompt: str, ids: list[int]) -> None:
    prompt_ids = list(prompt.encode("utf-8", "replace"))
    assert "".join(stream(TOKENIZER, ids, prompt=prompt_ids)) == whole(TOKENIZER, ids)


@pytest.mark.parametrize("begun", [b"\xe2", b"\xe2\x82", b"abc\xf0\x9f\x98", b"\x80" * 9])
def test_a_prompt_that_ends_within_a_character_is_no_part_of_the_text(begun: bytes) -> None:
    ids = list("€uro".encode())
    assert stream(TOKENIZER, ids, prompt=list(begun)) == ["", "", "€", "u", "r", "o", ""]


@pytest.mark.parametrize(("ids", "held"), [([0x41, 0xE2, 0x82], "\ufffd"), ([0x41], ""), ([], "")])
def test_held_back_text_is_returned_once(ids: list[int], held: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    for token in ids:
        detokenizer.push(token)
    assert [detokenizer.flush(), detokenizer.flush()] == [held, ""]


@given(st.text(max_size=80))
@settings(deadline=None)
def test_characters_are_never_split_and_never_late(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    for character in text:
        if character == "\ufffd":
            continue
        data = character.encode("utf-8", "surrogatepass")
        parts = [detokenizer.push(byte) for byte in data]
        assert parts == [""] * (len(data) - 1) + [character]


@given(BYTE_IDS)
@settings(max_examples=50, deadline=None)
def test_special_and_unknown_ids_have_no_text(ids: list[int]) -> None:
    mixed = [token for byte in ids for token in (byte, SPECIAL, VOCAB + 7)]
    assert "".join(stream(TOKENIZER, mixed)) == whole(TOKENIZER, ids)


def test_special_tokens_have_text_on_request() -> None:
    assert "".join(stream(TOKENIZER, [65, EOS, 66], frozenset())) == "A<|end|>B"


@pytest.mark.parametrize("repeated", [[0x80], [0xE2], [0xA9, 0xC3], [0xF0, 0x9F], [SPECIAL], [0x41]])
def test_the_window_stays_small(repeated: list[int]) -> None:
    """Cost a token is bounded by the ids it decodes, whatever the model repeats."""
    decoded = 0

    class Counting(Detokenizer):
        def _decode(self, ids: list[int]) -> str:
            nonlocal decoded
            decoded += len(ids)
            return super()._decode(ids)

    detokenizer = Counting(TOKENIZER, frozenset({SPECIAL}))
    for index in range(2000):
        detokenizer.push(repeated[index % len(repeated)])
    assert decoded <= 2000 * 40


def test_a_token_that_always_ends_within_a_character() -> None:
    token = MERGED.token_to_id(byte_characters()[0xA9] + byte_characters()[0xC3])
    assert token is not None
    ids = [token] * 500
    parts = stream(MERGED, ids, frozenset())
    assert "".join(parts) == whole(MERGED, ids)
    assert all(len(part) <= 4 for part in parts)


def fallback_tokenizer() -> Tokenizer:
    """Words with a space mark, and bytes for everything else."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁Hello": 256, "▁world": 257, "!": 258}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_spaces_between_words_survive() -> None:
    assert "".join(stream(fallback_tokenizer(), [256, 257, 258, 257], frozenset())) == "Hello world! world"


def test_a_continuation_keeps_its_space() -> None:
    assert "".join(stream(fallback_tokenizer(), [257], frozenset(), [256])) == " world"


def test_byte_fallback_characters_in_a_row() -> None:
    ids = list("€€ 😀é€".encode())
    parts = stream(fallback_tokenizer(), [256, *ids, 257], frozenset())
    assert "".join(parts) == "Hello€€ 😀é€ world"
    assert not any("\ufffd" in part for part in parts)


def test_byte_fallback_characters_after_others_of_the_prompt() -> None:
    """The decoder decodes a run of bytes as a whole: the prompt's must not affect the output's."""
    ids = list("€€".encode())
    parts = stream(fallback_tokenizer(), ids, frozenset(), list("€€€".encode()))
    assert parts == ["", "", "€", "", "", "€", ""]


def test_a_long_run_of_tokens_without_text_loses_nothing_after_it() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"A": 0, "_": 1, "B": 2}, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("_", ""), decoders.Fuse()])
    assert "".join(stream(tokenizer, [0, *[1] * 100, 2, 0], frozenset())) == "ABA"


@given(st.lists(st.integers(0, 258), max_size=100))
@settings(max_examples=200, deadline=None)
def test_byte_fallback_never_loses_words(ids: list[int]) -> None:
    """Runs of invalid bytes may be divided differently, words must not be lost."""
    text = "".join(stream(fallback_tokenizer(), ids, frozenset()))
    assert text.count("Hello") == ids.count(256) + _spelt(ids, b"Hello")


def _spelt(ids: list[int], word: bytes) -> int:
    return bytes(token if token < 256 else 0 for token in ids).count(word)


def test_random_long_output() -> None:
    rng = random.Random(7)
    ids = [rng.randrange(MERGED.get_vocab_size()) for _ in range(5000)]
    assert "".join(stream(MERGED, ids, frozenset())) == whole(MERGED, ids)
