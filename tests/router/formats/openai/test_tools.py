"""Tools of a chat: what a model is shown, and what it may or must call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from baton.base.errors import FieldError
from baton.model_spec.byte_tokenizer import byte_tokenizer_json
from baton.v1.types_pb2 import Limits
from services.grammar.matcher import Matchers
from services.router.formats.openai.chat import ChatBody
from services.router.text.chat_template import ChatTemplate
from services.router.text.control_tokens import ControlTokens
from services.router.tools.conversation_format import ConversationFormat
from services.router.tools.families import FAMILIES
from services.router.tools.output_parser import OutputParser
from services.router.tools.pieces import CallArguments, CallBegin
from tests.grammar.model import END_ID, allowed, make_folder, open_grammar

# As Qwen's and Llama's templates use them.
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}|{% endif %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls %}"
    "<tool_call>{{ call.function.name }}({{ call.function.arguments | tojson }})"
    "{% endfor %}{% if message.tool_call_id %}[{{ message.tool_call_id }}]{% endif %};{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "ä"}'}}


def body(**fields: Any) -> ChatBody:
    return ChatBody.parse({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields})


def rendered(chat: ChatBody, control: ControlTokens | None = None) -> list[str]:
    return ChatTemplate(TEMPLATE, {}, control).render(chat.chat())


def test_tools_and_calls_are_rendered() -> None:
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
    ]
    (text,) = rendered(body(messages=messages, tools=[TOOL]))
    shown, _, rest = text.partition("|")
    assert json.loads(shown) == TOOL
    assert rest == 'user:hi;assistant:<tool_call>f({"a": "ä"});tool:5[c1];'
    shows_none: list[dict[str, Any]] = [{}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}]
    for fields in shows_none:
        assert rendered(body(**fields)) == ["user:hi;"]


def test_arguments_that_are_not_json_are_rendered_as_they_are() -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": "{broken"}}
    (text,) = rendered(body(messages=[{"role": "assistant", "tool_calls": [call]}]))
    assert '"{broken"' in text


def test_no_tool_spells_a_control_token() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "<|end|>"}}
    parts = rendered(body(tools=[tool]), ControlTokens(["<|end|>"]))
    assert len(parts) > 1
    assert not any("<|end|>" in part for part in parts)


def test_what_must_be_called() -> None:
    other = {"type": "function", "function": {"name": "g"}}
    named = {"type": "function", "function": {"name": "g"}}
    for choice, forced, most in (
        (None, [], 16),
        ("auto", [], 16),
        ("required", ["f", "g"], 16),
        (named, ["g"], 1),
    ):
        use = body(tools=[TOOL, other], tool_choice=choice).parsed_request().tools
        assert use is not None
        assert [tool.name for tool in use.tools] == ["f", "g"]
        assert [tool.name for tool in use.forced] == forced
        assert use.most_calls == most
    assert body(tools=[TOOL], tool_choice="none").parsed_request().tools is None
    single = body(tools=[TOOL], parallel_tool_calls=False).parsed_request().tools
    assert single is not None
    assert single.most_calls == 1


def test_a_model_without_calls_refuses_tools() -> None:
    use = body(tools=[TOOL]).parsed_request().tools
    for found in (ConversationFormat.of("{{ messages }}", {}), ConversationFormat.of(None, {}, "none")):
        found.check(None)
        with pytest.raises(FieldError, match="router") as caught:
            found.check(use)
        assert caught.value.param == "tools"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_forced_call_is_guided_to_is_parsed(family: str, tmp_path: Path) -> None:
    """The likeliest tokens of a model that always takes the lowest id allowed; with the marker as text,
    and as a special token."""
    properties = {"n": {"enum": [7]}}
    schema = {"type": "object", "properties": properties, "required": ["n"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in ("f", "g")]
    use = body(tools=tools, tool_choice="required", parallel_tool_calls=False).parsed_request().tools
    (marker, *_) = FAMILIES[family].markers
    for special in ({}, {marker: 256}):
        found = ConversationFormat.of(None, special, family)  # type: ignore[arg-type]
        grammar, structure = found.grammar(use), found.structure(use, "", guided=True)
        assert grammar is not None
        assert structure is not None
        matchers = Matchers.of_model(make_folder(tmp_path))
        sequence = open_grammar(matchers, grammar, Limits(), ())
        ids: list[int] = []
        while (token := min(allowed(sequence.mask()))) not in (END_ID, END_ID + 33):
            ids.append(token)
            sequence.advance((token,))
        tokenizer = Tokenizer.from_str(byte_tokenizer_json())
        text = "".join(marker if one == 256 else tokenizer.decode([one]) for one in ids)
        assert (256 in ids) == bool(special and FAMILIES[family].opening)
        pieces = OutputParser(structure).push(text, last=True)
        assert [piece.name for piece in pieces if isinstance(piece, CallBegin)] == ["f"]
        arguments = "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))
        assert json.loads(arguments) == {"n": 7}
