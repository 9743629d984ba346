"""A choice of a chat whose output has structure: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from services.router.request.request import Finish
from services.router.tools.output_parser import OutputParser, OutputStructure
from services.router.tools.pieces import CallArguments, CallBegin, Content, Piece, Reasoning

Document = dict[str, Any]


class StructuredChoice:
    """Parses one output, whole or delta by delta."""

    def __init__(self, structure: OutputStructure) -> None:
        self._parser = OutputParser(structure)

    def message(self, text: str) -> Document:
        """The message of an output that has ended. Its content is null where it only calls."""
        content, reasoning = "", ""
        calls: list[Document] = []
        for piece in self._parser.push(text, last=True):
            match piece:
                case Content(more):
                    content += more
                case Reasoning(more):
                    reasoning += more
                case CallBegin():
                    calls.append(_call(piece))
                case CallArguments(index, more):
                    calls[index]["function"]["arguments"] += more
        message: Document = {"role": "assistant", "content": content if content or not calls else None}
        message["refusal"] = None
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def deltas(self, text: str, *, last: bool) -> list[Document]:
        """The deltas of more text."""
        return [_delta(piece) for piece in _joined(self._parser.push(text, last=last))]

    def reason(self, finish: Finish) -> str:
        """OpenAI's `finish_reason`, once the output has ended."""
        return "tool_calls" if self._parser.calls and finish is Finish.STOP else finish.reason


def _call(begin: CallBegin) -> Document:
    return {"id": begin.id, "type": "function", "function": {"name": begin.name, "arguments": ""}}


def _delta(piece: Piece) -> Document:
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallBegin(index):
            return {"tool_calls": [{"index": index, **_call(piece)}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The pieces, adjacent texts as one."""
    joined: list[Piece] = []
    for piece in pieces:
        before = joined[-1] if joined else None
        if isinstance(piece, Content) and isinstance(before, Content):
            joined[-1] = Content(before.text + piece.text)
        elif isinstance(piece, Reasoning) and isinstance(before, Reasoning):
            joined[-1] = Reasoning(before.text + piece.text)
        else:
            joined.append(piece)
    return joined
