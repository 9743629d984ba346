"""The checkpoint made on the spot: whole, the same everywhere, and readable by `transformers`."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.cli.up.random_checkpoint import BOS, EOS, VOCAB, random_checkpoint

FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("cache"))


def digests(folder: Path) -> list[str]:
    return [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES]


def test_whole_and_deterministic(folder: Path, tmp_path: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == FILES
    assert digests(random_checkpoint(tmp_path)) == digests(folder)


def test_many_at_once_make_one(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: random_checkpoint(tmp_path), range(4)))
    assert len(set(made)) == 1
    assert list(tmp_path.iterdir()) == [made[0]]
    assert sorted(path.name for path in made[0].iterdir()) == FILES


def test_user_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert random_checkpoint().parent == tmp_path / "baton"


def test_transformers_loads_and_runs_it(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == VOCAB == len(tokenizer)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, EOS)
    ids = tokenizer("naïve 🏃", return_tensors="pt").input_ids
    assert ids[0].tolist() == list("naïve 🏃".encode())
    torch.manual_seed(0)
    drawn = model.generate(ids, max_new_tokens=40, do_sample=True, temperature=0.8, top_k=0, pad_token_id=0)
    text = tokenizer.decode(drawn[0, ids.shape[1] :])
    assert sum(character.isalpha() or character in " .," for character in text) >= 38, text
    assert len(set(text)) > 5, text


def test_chat_template(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "Go!"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|bos|><|user|>Go!<|end|><|assistant|>"
    assert tokenizer(text).input_ids == [BOS, 259, *b"Go!", 261, 260]
