"""The format in which the served model writes tool calls and reasoning: as its chat template says, or the
configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from baton.base.errors import FieldError
from baton.v1.types_pb2 import Grammar
from services.common.config.types import ReasoningFormat, ToolCallFormat
from services.router.tools.families import FAMILIES, ToolFamily, detect
from services.router.tools.output_parser import OutputStructure
from services.router.tools.reasoning import CLOSE, OPEN, begins_within, has_reasoning
from services.router.tools.tool_use import ToolUse


@dataclass(frozen=True)
class ConversationFormat:
    """The served model's format. `family`: None where tools are refused. `special_ids`: the ids of markers
    that are special tokens."""

    family: ToolFamily | None = None
    reasoning: bool = False
    special_ids: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        template: str | None,
        special_tokens: Mapping[str, int],
        tool_calls: ToolCallFormat = "auto",
        reasoning: ReasoningFormat = "auto",
    ) -> ConversationFormat:
        """Detects the format of a model. `special_tokens`: all of the tokenizer, by text."""
        family = detect(template) if tool_calls == "auto" else FAMILIES.get(tool_calls)
        thinks = has_reasoning(template) if reasoning == "auto" else reasoning == "think"
        markers = (*(family.markers if family else ()), *((OPEN, CLOSE) if thinks else ()))
        found = {
            text: token for text, token in special_tokens.items() if any(text in marker for marker in markers)
        }
        return cls(family, thinks, found)

    def check(self, use: ToolUse | None) -> None:
        """Raises FieldError where a request has tools that the model cannot be asked to call."""
        if use is not None and self.family is None:
            message = (
                "the model's chat template writes no tool calls that are known here; "
                "router.tool_calls of the server says how it writes them"
            )
            raise FieldError(message, param="tools", code="unsupported_parameter")

    def grammar(self, use: ToolUse | None) -> Grammar | None:
        """Returns the grammar of an output that has to call a tool; None if it need not."""
        if use is None or not use.forced or self.family is None:
            return None
        return self.family.grammar(use, self.special_ids)

    def structure(self, use: ToolUse | None, prompt_end: str, *, guided: bool) -> OutputStructure | None:
        """Returns what to look for in an output; None: it is text. `guided`: a grammar leaves no room for
        reasoning. Raises FieldError where the tools' schemas lead to too many others."""
        family = self.family if use is not None else None
        reasoning = self.reasoning and not guided
        if family is None and not reasoning:
            return None
        within = reasoning and begins_within(prompt_end)
        return OutputStructure(
            family,
            {} if use is None or family is None else family.parameter_types(use),
            reasoning,
            within,
            frozenset(self.special_ids.values()),
            only_one=use is not None and use.only_one,
        )
