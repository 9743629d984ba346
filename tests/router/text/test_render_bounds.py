"""A rendering ends within its bounds, whatever the template does and the client sends."""

from __future__ import annotations

import json
import resource
import shutil
import time
from pathlib import Path

import pytest

from baton.base.errors import FieldError
from services.router.request import sizes
from services.router.request.request import Chat, ChatTurn
from services.router.text import render_budget
from services.router.text.chat_template import ChatTemplate
from tests.router.conftest import MODEL, TEMPLATE, SiteMaker
from tests.router.http_client import http

ONE = Chat((ChatTurn("user", "x"),))
_BIG = "{% set b = 'x' * 8000000 %}"
_GROWING = "{% set ns = namespace(s=START) %}{% for i in range(60) %}{% set ns.s = GROWN %}{% endfor %}"


def growing(start: str, grown: str, use: str = "") -> str:
    return _GROWING.replace("START", start).replace("GROWN", grown) + use


TOO_LARGE = [
    "{{ 'a' * 10**10 }}",
    "{{ 10**10 * 'a' }}",
    "{{ [0] * 10**9 }}",
    "{{ (0,) * 10**9 }}",
    "{{ 'x' | center(10**9) | length }}",
    "{{ 'x' | center(1000000000) | length }}",
    "{{ 'x'.center(10**9) | length }}",
    "{{ 'x'.ljust(1000000000) }}{{ 'x'.rjust(1000000000) }}",
    "{{ 'x'.zfill(1000000000) }}",
    "{{ 'x'.encode().center(1000000000) | length }}",
    "{{ (5).to_bytes(10**9, 'big') | length }}",
    "{{ ('\t' * 1000000).expandtabs(1000000) }}",
    "{{ ('a' * 1000000).translate({97: 'x' * 1000000}) }}",
    "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "{{ ('a' * 1000000) | replace('', 'b' * 1000000) }}",
    "{{ ('a' * 1000000) | join('b' * 1000000) }}",
    "{{ ('b' * 1000000).join('a' * 100000) }}",
    "{{ range(100000) | join('x' * 100000) }}",
    "{{ ('a\n' * 1000000) | indent(1000) }}",
    "{{ ('a ' * 100000) | wordwrap(1, wrapstring='x' * 1000000) }}",
    "{{ ('<' * 1000000) | striptags }}",
    "{{ ('www.' * 1000000) | urlize }}",
    "{{ [1] | batch(10**9, 'x') | list }}",
    "{{ [1] | slice(10**9) | list | length }}",
    "{{ ([[1]] * 100000) | sum(start=[]) | length }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "{{ ('{0}' * 1000).format('x' * 1000000) }}",
    "{{ ('{a}' * 1000).format_map({'a': 'x' * 1000000}) }}",
    "{{ '%s%s%s' % ('x' * 8000000, 'x' * 8000000, 'x' * 8000000) }}",
    "{{ lipsum(n=10**8) }}",
    "{{ lipsum(100, false, 10, 100000000) }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ messages | tojson(indent=' ' * 1000000) }}",
    "{{ messages | tojson(separators=('x' * 10000000, 'y' * 10000000)) }}",
    "{{ ('<' * 5000000) | e | e | e | e | length }}",
    growing("'x'", "ns.s + ns.s"),
    growing("'x'", "ns.s ~ ns.s"),
    growing("'x'", "ns.s * 2"),
    growing("'x'", "[ns.s, ns.s] | join"),
    growing("'x'", "'%s%s' % (ns.s, ns.s)"),
    growing("['x']", "ns.s + ns.s"),
    growing("['x']", "[ns.s, ns.s]", "{{ ns.s }}"),
    growing("['x']", "(ns.s, ns.s)", "{{ ns.s == 1 }}"),
    growing("['x']", "{'a': ns.s, 'b': ns.s}", "{{ ns.s | tojson }}"),
    growing("['x']", "dict(a=ns.s, b=ns.s)", "{{ ns.s | string }}"),
    growing("['x']", "[ns.s, ns.s] | list", "{{ ns.s | join }}"),
    _BIG + "{% for i in range(100000) %}{{ b }}{% endfor %}",
    _BIG + "{{ [b, b, b, b, b, b] | join }}",
    _BIG + growing("[]", "ns.s + [b ~ i]"),
    _BIG + "{% set c = cycler(b, b) %}{% for i in range(1000) %}{{ c.next() }}{% endfor %}",
    "{{ dict.fromkeys(range(100000), 'x' * 10000) | tojson | length }}",
    "{{ range(1000) | map(attribute='x') | map('default', 'x' * 1000000) | list | tojson | length }}",
    "{% for i in range(100000) %}" + "y" * 10000 + "{% endfor %}",
]  # fmt: skip
TOO_MUCH = [
    _BIG + "{% set t %}{% for i in range(100000) %}{{ b }}{% endfor %}{% endset %}",
    _BIG + "{% macro m() %}{% for i in range(100000) %}{{ b }}{% endfor %}{% endmacro %}{{ m() }}",
    "{% set t %}{% for i in range(100000) %}" + "y" * 10000 + "{% endfor %}{% endset %}",
    "{{ range(100000) | map('center', 100000) | list | length }}",
]
TOO_LONG = [
    "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) %}{% set x = range(100000) | sort | list %}{% endfor %}",
    "{% for i in range(100000) if range(100000) | sum == 1 %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set x = 'a' * 1000000 %}{% for i in range(100000) %}{% if 'b' ~ i in x %}{% endif %}{% endfor %}",
]
OTHERS = [
    "{{ range(10**9) | length }}",
    "{{ 2 ** (10**9) }}",
    "{{ (2 ** 4000) ** 4000 }}",
    growing("3", "ns.s * ns.s"),
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% for a in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}",
]


def refusal(source: str) -> str:
    """The error of a template's rendering, after which the template itself and others are as before."""
    template = ChatTemplate(source, {}, name="tool_use")
    began = time.thread_time()
    with pytest.raises(FieldError) as caught:
        template.render(ONE)
    assert time.thread_time() - began < render_budget.MAX_CPU_S + 1
    assert "chat template 'tool_use'" in caught.value.message
    assert "".join(ChatTemplate("{{ messages[0].content }}", {}).render(ONE)) == "x"
    return caught.value.message


@pytest.mark.parametrize("source", TOO_LARGE, ids=lambda source: source[-40:])
def test_what_writes_too_much(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "writes more than 16 MB" in refusal(source)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 128 * 1024


@pytest.mark.parametrize("source", TOO_MUCH, ids=lambda source: source[-40:])
def test_what_builds_too_much(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_budget, "MAX_BUILT", 32 * 1024 * 1024)
    assert "needs too much memory" in refusal(source)


@pytest.mark.parametrize("source", TOO_LONG, ids=lambda source: source[-40:])
def test_what_takes_too_long(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_budget, "MAX_CPU_S", 0.05)
    assert "takes more than 0.05 s of processor time" in refusal(source)


@pytest.mark.parametrize("source", OTHERS, ids=lambda source: source[-40:])
def test_what_fails_otherwise(source: str) -> None:
    assert "fails on these messages" in refusal(source)


def test_a_client_alone_can_make_no_template_expensive() -> None:
    """The templates are as models publish them: deep tools, indented; many messages; long texts."""
    deep: object = [1] * 1000
    for _ in range(100):
        deep = [deep]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"x": deep}}}
    indented = ChatTemplate("{{ tools | tojson(indent=4) }}", {})
    assert len("".join(indented.render(Chat(ONE.turns, tools=[tool])))) > 400_000
    with pytest.raises(FieldError, match="chat template 'default'"):
        indented.render(Chat(ONE.turns, tools=[tool] * 64))
    long = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}", {})
    turns = tuple(ChatTurn("user", " é" * 100_000) for _ in range(40))
    assert len("".join(long.render(Chat(turns)))) == 40 * (6 + 199_999)
    with pytest.raises(FieldError, match="writes more than 16 MB"):
        long.render(Chat(turns * 2))


@pytest.fixture
def model_folder(model_folder: Path, tmp_path: Path) -> Path:
    """A model whose template never ends where the client has it so."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    endless = "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"
    template = "{% if endless is defined %}" + endless + "{% endif %}" + TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.mark.parametrize("length", [1, pytest.param(sizes.LARGE_BYTES, marks=pytest.mark.slow)])
async def test_the_next_request_is_served(
    site: SiteMaker, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over HTTP: whether the request is rendered in the router or, a large one, in a helper process."""
    monkeypatch.setattr(render_budget, "MAX_CPU_S", 0.25)  # not in the helper
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "user": "y" * length}
    async with site() as here, http(here) as client:
        answers = [
            await client.post("/v1/chat/completions", json={**asked, "max_tokens": 2, **more})
            for more in ({"chat_template_kwargs": {"endless": True}}, {})
        ]
        assert [answer.status_code for answer in answers] == [400, 200]
        error = answers[0].json()["error"]
        assert error["param"] == "messages"
        assert "the chat template 'default' takes more than" in error["message"]
        await here.quiet()
