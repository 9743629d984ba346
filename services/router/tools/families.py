"""The formats in which families of models write tool calls, and the parts of a chat template by which a
family is known.

    hermes       <tool_call>{"name": …, "arguments": {…}}</tool_call>      Qwen2.5, Qwen3, Hermes
    llama3       {"name": …, "parameters": {…}}; …                         Llama 3.1 to 3.3
    mistral      [TOOL_CALLS][{"name": …, "arguments": {…}}, …]            Mistral, Mixtral
    mistral_v11  [TOOL_CALLS]name[ARGS]{…}, or as mistral                  Mistral (tokenizer from v11 on)
    qwen3_coder  <tool_call><function=name>                                Qwen3-Coder
                 <parameter=key>value</parameter></function></tool_call>

Sources: the chat templates that the models' authors publish, and mistral-common for tokenizer versions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto

from baton.v1.types_pb2 import Grammar
from services.common.grammar_text import literal, schema_text
from services.router.tools.named_call import ARGUMENTS, CALL_ID
from services.router.tools.parameter_types import ParameterTypes, types_of_tools
from services.router.tools.tagged_call import FUNCTION
from services.router.tools.tool_use import Tool, ToolUse


class Syntax(Enum):
    """The syntax of a call itself."""

    JSON = auto()  # an object with a name and arguments
    NAMED = auto()  # a name and an object of arguments
    TAGS = auto()  # tags of a function and of its parameters; an object, too


@dataclass(frozen=True)
class ToolFamily:
    """One way to write calls. `opening`: what a call, or a list of calls, begins with; "": an output that
    is a call begins with its brace. `separator`: between two calls. `arguments`: the key of a call's
    arguments."""

    name: str
    opening: str
    closing: str
    separator: str
    arguments: str
    # Whether opening and closing are around each call, not around all of them.
    each: bool = False
    # What may stand before a call without saying anything.
    ignored: str = ""
    syntax: Syntax = Syntax.JSON
    # Whether chat templates take ids of nine letters and digits only.
    short_ids: bool = False
    # How else calls are written behind the same opening: by earlier models, or where they are forced.
    older: ToolFamily | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that must not be left out of the output as special tokens."""
        within = (ARGUMENTS, CALL_ID) if self.syntax is Syntax.NAMED else ()
        texts = (self.opening, self.closing, self.ignored, *within)
        return tuple(text.strip() for text in texts if text.strip())

    def parameter_types(self, use: ToolUse) -> dict[str, ParameterTypes]:
        """The tools, with the types of their parameters where calls do not say them. Raises FieldError."""
        if self.syntax is Syntax.TAGS:
            return types_of_tools({tool.name: tool.parameters for tool in use.tools})
        return {tool.name: {} for tool in use.tools}

    def grammar(self, use: ToolUse, special_ids: Mapping[str, int]) -> Grammar:
        """Returns the grammar of an output that calls the tools of `use.forced`, at least one and at most
        `most_calls`. `special_ids`: the ids of markers that are special tokens."""
        opening, closing = (_literal(text, special_ids) for text in (self.opening, self.closing))
        calls = " | ".join(f"call_{number}" for number in range(len(use.forced)))
        separator = f"{literal(self.separator)} " if self.separator else ""
        more = f" ({separator}one){{0,{use.most_calls - 1}}}" if use.most_calls > 1 else ""
        if self.each:
            rules = [f"start: one{more}", f"one: {opening} ({calls}) {closing}"]
        else:
            rules = [f"start: {opening} one{more} {closing}", f"one: {calls}"]
        rules += [self._call(number, tool, special_ids) for number, tool in enumerate(use.forced)]
        return Grammar(grammar="\n".join(rules))

    def _call(self, number: int, tool: Tool, special_ids: Mapping[str, int]) -> str:
        """The grammar's rule for one tool call. A forced call is JSON also in families that usually write
        tags, since a schema describes JSON, and no text between tags."""
        schema = schema_text({**tool.parameters, "x-guidance": {"whitespace_pattern": " ?"}})
        if self.syntax is Syntax.NAMED:
            return f"call_{number}: {_literal(tool.name + ARGUMENTS, special_ids)} %json {schema}"
        before = f'{{"name": {json.dumps(tool.name)}, "{self.arguments}": '
        return f"call_{number}: {literal(before)} %json {schema} {literal('}')}"


HERMES = ToolFamily("hermes", "<tool_call>\n", "\n</tool_call>", "\n", "arguments", each=True)
LLAMA3 = ToolFamily("llama3", "", "", "; ", "parameters", ignored="<|python_tag|>")
MISTRAL = ToolFamily("mistral", "[TOOL_CALLS][", "]", ", ", "arguments", short_ids=True)
MISTRAL_V11 = ToolFamily(
    "mistral_v11", "[TOOL_CALLS]", "", "", "", each=True, syntax=Syntax.NAMED, short_ids=True, older=MISTRAL
)
QWEN3_CODER = replace(HERMES, name="qwen3_coder", syntax=Syntax.TAGS, older=HERMES)
FAMILIES = {family.name: family for family in (HERMES, LLAMA3, MISTRAL, MISTRAL_V11, QWEN3_CODER)}


def detect(template: str | None) -> ToolFamily | None:
    """The family whose calls a chat template writes; None where it writes none, or in another way."""
    if template is None:
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL_V11 if ARGUMENTS in template else MISTRAL
    if "<tool_call>" in template:
        if "<arg_key>" in template:  # tags of another kind
            return None
        return QWEN3_CODER if FUNCTION in template else HERMES
    if "<|python_tag|>" in template or ('"parameters": ' in template and "ipython" in template):
        return LLAMA3
    return None


def _literal(text: str, special_ids: Mapping[str, int]) -> str:
    """A text in a grammar, its special tokens by their ids."""
    for marker, token in special_ids.items():
        before, found, after = text.partition(marker)
        if found:
            parts = (_literal(before, {}), f"<[{token}]>", _literal(after, {}))
            return " ".join(part for part in parts if part)
    return literal(text) if text else ""
