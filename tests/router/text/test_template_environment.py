"""A template gets what it gets in `transformers`, and writes the same prompt."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from baton.base.errors import BatonError
from services.router.text.chat_template import ChatTemplate
from services.router.text.model_info import ModelInfo
from services.router.text.tokenizer import ModelTokenizer
from tests.router.conftest import byte_tokenizer
from tests.router.text.conversations import (
    CONVERSATIONS,
    SPECIAL,
    TOOLS,
    WEATHER,
    allowed_prompts,
    chat,
    rendered_by_transformers,
)

TRL = "trl==1.16.0"
_EACH = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
_END = "{% endfor %}{% endfor %}"
SOURCES = [
    "{% for tool in tools or [] %}{{ tool | tojson(ensure_ascii=False) }}{% endfor %}",
    "{% for tool in tools or [] %}{{ tool | tojson(True) }}{{ tool | tojson(indent=2) }}{% endfor %}",
    "{{ tools | tojson(separators=(',', ':'), sort_keys=True) }}{{ messages | tojson(indent='\t') }}",
    "{{ tools | tojson(ensure_ascii=True, indent=4, separators=(', ', ': '), sort_keys=True) }}",
    "{% if tools is not none %}Environment: ipython{{ tools | tojson }}{% endif %}ok",
    "{% if documents is not none %}{{ documents | length }}{% endif %}{{ documents is defined }}{{ tools }}",
    "{% for m in messages %}{% generation %}A:{{ m.content }}\n    {% endgeneration %}\n{% endfor %}",
    "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}{{ messages[0] }}",
    "{%- generation -%}  x  {%- endgeneration -%}  y",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ loop.index }}{% endfor %}",
    "{{ strftime_now('%Y') }}{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token is defined }}",
    "{% set ns = namespace(n=0, s='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.s = ns.s ~ m.role ~ ns.n %}{% endfor %}{{ ns.s }}{{ ns.n % 2 }}{{ 7 // 2 }}{{ 2 ** 3 }}",
    "{% set d = dict(a=1, b=[1, 2]) %}{{ d }}{{ d | tojson }}{{ dict.fromkeys('ab') }}{{ d.items() | list }}",
    "{% macro say(m, n=2) %}<{{ m.role }}>{{ m.content * n }}{% endmacro %}{{ say(messages[0]) }}"
    "{% call say(messages[-1], n=1) %}{% endcall %}",
    "{% set t %}{% for m in messages %}{{ m.content | trim }}|{% endfor %}{% endset %}{{ t | upper }}{{ t }}",
    "{% filter indent(2) %}{{ messages[0].content }}\n{{ messages[0].role }}{% endfilter %}",
    "{{ messages | map(attribute='role') | join(', ') }}",
    "{{ messages | selectattr('role', 'eq', 'user') | list }}",
    "{{ '%s-%05.1f' % (messages[0].role, 2.5) }}{{ '{:>8}|'.format('x') }}{{ 'x' | center(9) }}",
    "{{ '%s' | format('y') }}{{ 'a-b' | replace('-', '+') }}{{ 'a,b'.split(',') }}{{ '-'.join(['a', 'b']) }}",
    "{{ [1, 2] + [3] }}{{ (1, 2) + (3,) }}{{ [[1], [2]] | sum(start=[]) }}{{ [3, 1] | sort }}{{ 1 + 1.5 }}",
    "{{ 'one two' | wordwrap(3) }}{{ [1, 2, 3] | batch(2, 'x') | list }}{{ [1, 2, 3] | slice(2) | list }}",
    "{{ messages[0].nothing }}{{ messages[0].nothing or 'none' }}{{ nothing | default('d') }}",
    "{{ None }}{{ 1 ~ none }}{{ 'ab' * 3 }}",
    "{% for m in messages recursive %}{{ m.role }}{{ loop.depth }}{% endfor %}{{ messages[1:] | length }}",
    "{% for m in messages %}{{ (m | tojson)[-40:] }}{% endfor %}{% if messages[9] %}{% endif %}",
    "{{ raise_exception('no') if messages | length > 2 }}x",
    "{{ messages | string }}{{ tools | string }}",
    "{% set ns = namespace(_a=1) %}",
    "{% set ns = namespace() %}{% set ns._a = 1 %}",
    "{{ messages.append(1) }}",
    "{{ [messages[0].content, 'é<'] | tojson }}{{ {'a': messages[0].role, 'b': (1, 2)} | tojson }}",
    _EACH + "{{ f.name + ' ' + f.arguments }}" + _END,
    _EACH + "{{ f.name }} {{ f.arguments | tojson }}" + _END,
    _EACH + "{{ f.name }} {{ f.arguments }}" + _END,
    _EACH + "{{ f.arguments if f.arguments is string else f.arguments | tojson(indent=3) }}" + _END,
    _EACH + "{% for k, v in f.arguments.items() %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}" + _END,
    _EACH + "{% if f.arguments is mapping %}{{ f.arguments | items | list }}{% endif %}" + _END,
    _EACH + "{{ c | tojson(sort_keys=True) }}" + _END,
    _EACH + "{{ f.arguments | tojson(ensure_ascii=True, separators=(',', ':')) }}" + _END,
    _EACH + "{{ 'call:' ~ f.name ~ f.arguments }}" + _END,
]


def compared(source: str, counts: Counter[str]) -> list[str]:
    """Faults in the prompts of a template. Counts each kind of prompt."""
    template = ChatTemplate(source, SPECIAL)
    wrong = []
    for number, messages in enumerate(CONVERSATIONS):
        for tools in TOOLS:
            allowed = allowed_prompts(source, messages, tools)
            try:
                prompt = "".join(template.render(chat(messages, tools)))
            except BatonError:
                counts["refused"] += 1
                right = not allowed
            else:
                counts["rendered"] += 1
                right = prompt in allowed
            if not right:
                wrong.append(f"conversation {number}, {len(tools or ())} tools")
    return wrong


@pytest.mark.parametrize("source", SOURCES)
def test_a_template_writes_what_it_writes_in_transformers(source: str) -> None:
    assert compared(source, Counter()) == []


@pytest.mark.slow
def test_templates_of_a_package(tmp_path: Path) -> None:
    """The templates are those that trl ships: of some twenty families, as published and for training."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path), TRL]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    counts: Counter[str] = Counter()
    with zipfile.ZipFile(wheel) as files:
        names = [name for name in files.namelist() if name.endswith(".jinja")]
        wrong = {name: found for name in names if (found := compared(files.read(name).decode(), counts))}
    print(f"{TRL}: {len(names)} templates, {dict(counts)}")
    assert wrong == {}
    assert len(names) >= 70
    assert counts["rendered"] > 8 * counts["refused"]


def test_the_variables_of_the_client_come_too() -> None:
    source = "{{ documents | tojson }}{{ enable_thinking is false }}{{ thinking }}"
    given: dict[str, Any] = {"documents": [{"title": "t", "text": "x"}], "enable_thinking": False}
    asked = chat(CONVERSATIONS[0])
    object.__setattr__(asked, "template_variables", given)
    theirs = rendered_by_transformers(source, CONVERSATIONS[0], None, **given)
    assert "".join(ChatTemplate(source, SPECIAL).render(asked)) == theirs


_NAMED = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t{{ bos_token }}"}]
_FOLDERS: dict[str, dict[str, Any]] = {
    "one": {"tokenizer_config.json": {"chat_template": "{{ eos_token }}c", "eos_token": "</s>"}},
    "named": {"tokenizer_config.json": {"chat_template": _NAMED, "bos_token": "<b>"}},
    "tools alone": {"tokenizer_config.json": {"chat_template": _NAMED[1:], "bos_token": "<b>"}},
    "file": {"tokenizer_config.json": {"chat_template": _NAMED}, "chat_template.jinja": "f"},
    "files": {
        "tokenizer_config.json": {"chat_template": "c", "cls_token": "<c>"},
        "chat_template.jinja": "f{{ cls_token }}",
        "additional_chat_templates/tool_use.jinja": "ft{{ sep_token }}{{ bos_token }}",
        "additional_chat_templates/rag.jinja": "{{ broken",
        "special_tokens_map.json": {"sep_token": "<sep>", "bos_token": {"content": "<b>"}},
    },
    "files without a default": {
        "tokenizer_config.json": {"chat_template": "c"},
        "additional_chat_templates/tool_use.jinja": "ft",
    },
    "older file": {
        "tokenizer_config.json": {"chat_template": "{{ bos_token }}{{ mask_token }}", "bos_token": "<a>"},
        "special_tokens_map.json": {"bos_token": "<b>", "mask_token": {"content": "<m>"}},
    },
    "tokens listed": {
        "tokenizer_config.json": {
            "chat_template": "{{ bos_token }}",
            "bos_token": "<a>",
            "added_tokens_decoder": {"256": {"content": "<|end|>", "special": True}},
        },
        "special_tokens_map.json": {"bos_token": "<b>"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", _FOLDERS)
def test_templates_and_special_tokens_are_those_of_the_folder(tmp_path: Path, name: str) -> None:
    """Templates are read from each of the files; which one a conversation gets depends on whether it has
    tools."""
    transformers = pytest.importorskip("transformers")
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"vocab_size": 300, "max_position_embeddings": 64}')
    for path, content in _FOLDERS[name].items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / path).write_text(text)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    ours = ModelTokenizer(tmp_path, ModelInfo.load(tmp_path))
    for tools in (None, [WEATHER]):
        try:
            theirs = reference.apply_chat_template(
                [*CONVERSATIONS[0]], tools=tools, tokenize=False, add_generation_prompt=True
            )
        except ValueError:
            theirs = None
        try:
            prompt = ours.decode(ours.encode_chat(chat(CONVERSATIONS[0], tools)), skip_special_tokens=False)
        except BatonError:
            prompt = None
        assert prompt == theirs, tools
