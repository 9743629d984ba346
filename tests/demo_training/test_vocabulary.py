"""The tokenizer: what the generator makes is what ships, and it takes any text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from models.demo_training.evaluate import DEMO_MODEL
from models.demo_training.tasks.words import ADJECTIVES, FIELDS, NAMES, NOUNS
from models.demo_training.vocabulary import CONTEXT, SPECIAL_TOKENS, VOCAB_SIZE, write
from services.router.request.request import Chat, ChatTurn
from services.router.text.chat_template import ChatTemplate
from services.router.text.model_info import ModelInfo

TOKENIZER: Tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@pytest.mark.slow
def test_it_is_what_the_generator_makes(tmp_path: Path) -> None:
    write(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (DEMO_MODEL / name).read_text(), name


@given(st.text())
def test_any_text_survives(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_digits_and_listed_words_are_tokens() -> None:
    words = [*"0123456789", *(f" {word}" for word in (*ADJECTIVES, *NOUNS, *FIELDS, *NAMES))]
    assert [word for word in words if len(TOKENIZER.encode(word).ids) != 1] == []


def test_a_number_is_its_digits() -> None:
    assert TOKENIZER.encode("4821").tokens == list("4821")


def test_special_tokens_and_sizes_agree() -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    ids = [TOKENIZER.token_to_id(text) for text in SPECIAL_TOKENS]
    assert ids == list(range(len(SPECIAL_TOKENS)))
    assert config["vocab_size"] == TOKENIZER.get_vocab_size() == VOCAB_SIZE
    assert config["max_position_embeddings"] == CONTEXT
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (
        ids[0],
        ids[1],
        ids[5],
    )


def test_the_router_and_transformers_word_a_chat_alike() -> None:
    info = ModelInfo.load(DEMO_MODEL)
    assert info.tokenizer.chat_template is not None
    turns = [("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye")]
    chat = Chat(
        tuple(ChatTurn(role, content, None, None) for role, content in turns),
        add_generation_prompt=True,
        template_variables=None,
    )
    ours = "".join(ChatTemplate(info.tokenizer.chat_template, info.tokenizer.special_tokens).render(chat))
    messages = [{"role": role, "content": content} for role, content in turns]
    theirs = AutoTokenizer.from_pretrained(DEMO_MODEL).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert ours == theirs
    words = [f"<|{role}|>{content}<|end|>" for role, content in turns]
    assert ours == "".join(["<|bos|>", *words, "<|assistant|>"])
