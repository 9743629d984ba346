"""The digest by which a router knows workers that split text into the same tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from baton.base.errors import BatonError, ErrorKind
from baton.model_spec.model_files import TokenizerFiles

CONFIG = {"chat_template": "{{ messages }}", "bos_token": "<s>", "eos_token": {"content": "</s>"}}


def folder(path: Path, config: dict[str, Any] = CONFIG, **files: str) -> Path:
    path.mkdir()
    (path / "tokenizer.json").write_text('{"model": 1}')
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (path / name.replace("_json", ".json").replace("_jinja", ".jinja")).write_text(text)
    return path


def test_what_decides_tokens_decides_the_digest(tmp_path: Path) -> None:
    base = TokenizerFiles.read(folder(tmp_path / "base"))
    assert base.chat_template == "{{ messages }}"
    assert base.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    others = [
        folder(tmp_path / "tokenizer", tokenizer_json='{"model": 2}'),
        folder(tmp_path / "template", {**CONFIG, "chat_template": "{{ messages[0] }}"}),
        folder(tmp_path / "no template", {**CONFIG, "chat_template": None}),
        folder(tmp_path / "beside", chat_template_jinja="{{ messages[0] }}!"),
        folder(tmp_path / "special", {**CONFIG, "bos_token": "<b>"}),
    ]
    digests = {base.digest, *(TokenizerFiles.read(other).digest for other in others)}
    assert len(digests) == len(others) + 1


def test_what_does_not_is_left_out(tmp_path: Path) -> None:
    """Left out are the way the file is written, and what the tokenizers library alone reads of it."""
    base = folder(tmp_path / "base")
    other = folder(tmp_path / "other", {**dict(reversed(CONFIG.items())), "model_max_length": 5})
    (other / "config.json").write_text("{}")
    assert TokenizerFiles.read(base).digest == TokenizerFiles.read(other).digest


def test_a_byte_tokenizer_is_one_of_its_own(tmp_path: Path) -> None:
    with_file = folder(tmp_path / "with")
    without = Path(shutil.copytree(with_file, tmp_path / "without"))
    (without / "tokenizer.json").unlink()
    digest = TokenizerFiles.read(without).digest
    assert digest != TokenizerFiles.read(with_file).digest
    assert digest == TokenizerFiles.read(with_file, byte_tokenizer=True).digest


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    broken = folder(tmp_path / "broken")
    (broken / name).write_bytes(b"\xff\xfe{")
    with pytest.raises(BatonError, match=name) as refused:
        TokenizerFiles.read(broken)
    assert refused.value.kind is ErrorKind.INVALID
