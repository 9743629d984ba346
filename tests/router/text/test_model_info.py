"""The model's folder: limits, end-of-sequence ids, chat template; what is missing is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.base.errors import BatonError, ErrorKind
from services.router.request.request import Chat, ChatTurn
from services.router.text.chat_template import ChatTemplate
from services.router.text.model_info import ModelInfo

CONFIG = {"vocab_size": 10, "max_position_embeddings": 20}


def folder(path: Path, **files: Any) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (path / f"{name}.json").write_text(text)
    return path


@pytest.mark.parametrize(
    ("config", "generation", "want"),
    [
        ({}, None, ()),
        ({"eos_token_id": 5}, None, (5,)),
        ({"eos_token_id": [5, 6, 5]}, {}, (5, 6)),
        ({"eos_token_id": 5}, {"eos_token_id": [7, 8]}, (7, 8)),
        ({"eos_token_id": None}, {"eos_token_id": 0}, (0,)),
    ],
)
def test_eos_ids(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, want: tuple[int, ...]
) -> None:
    files: dict[str, Any] = {"config": {**CONFIG, **config}}
    if generation is not None:
        files["generation_config"] = generation
    info = ModelInfo.load(folder(tmp_path, **files))
    assert (info.limits.vocab_size, info.limits.max_positions, info.limits.eos_token_ids) == (10, 20, want)


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, "config.json"),
        ({"config": "{"}, "config.json"),
        ({"config": []}, "config.json"),
        ({"config": {"vocab_size": 10}}, "max_position_embeddings"),
        ({"config": {"max_position_embeddings": 5}}, "vocab_size"),
        ({"config": {**CONFIG, "vocab_size": True}}, "vocab_size"),
        ({"config": CONFIG, "generation_config": "x"}, "generation_config.json"),
    ],
)
def test_errors_name_the_file_or_field(tmp_path: Path, files: dict[str, Any], named: str) -> None:
    with pytest.raises(BatonError, match=named) as caught:
        ModelInfo.load(folder(tmp_path, **files))
    assert caught.value.kind is ErrorKind.INVALID


def test_templates_and_special_tokens(tmp_path: Path) -> None:
    tokenizer = {
        "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}],
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "pad_token": None,
    }
    info = ModelInfo.load(folder(tmp_path, config=CONFIG, tokenizer_config=tokenizer))
    assert info.tokenizer.chat_template == "d"
    assert info.tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "chat_template.jinja").write_text("j")
    assert ModelInfo.load(tmp_path).tokenizer.chat_template == "j"


def render(source: str, *turns: tuple[str, str]) -> str:
    chat = Chat(tuple(ChatTurn(*turn) for turn in turns))
    return "".join(ChatTemplate(source, {"bos_token": "<s>"}).render(chat))


def test_templates_render_as_they_are_written_for() -> None:
    source = (
        "{{ bos_token }}\n{%- for m in messages %}\n"
        "    {%- if loop.index > 2 %}{% break %}{% endif %}\n"
        "[{{ m.content }}]\n{%- endfor %}\n"
        "    {% if add_generation_prompt %}\n>{% endif %}"
    )
    assert render(source, ("user", "a"), ("user", "b"), ("user", "c")) == "<s>[a][b]>"
    assert render("{{ messages | tojson }}", ("user", "é<")) == '[{"role": "user", "content": "é<"}]'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for %}",
    ],
)
def test_a_template_may_refuse_and_may_not_escape(source: str) -> None:
    with pytest.raises(BatonError) as caught:
        render(source, ("user", "a"))
    assert caught.value.kind is ErrorKind.INVALID
