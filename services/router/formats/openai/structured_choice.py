"""A choice of a chat whose output has structure: reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from services.router.request.request import Delta, Finish
from services.router.tools.output_parser import OutputParser, OutputStructure
from services.router.tools.pieces import CallArguments, CallBegin, CallEnd, Content, Piece, Reasoning

Document = dict[str, Any]


class StructuredChoice:
    """Parses one output as it comes: to be sent as a whole (`take`, then `message`), or so (`deltas`)."""

    def __init__(self, structure: OutputStructure) -> None:
        self._parser = OutputParser(structure)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallBegin, list[str]]] = []

    @property
    def reasoning_tokens(self) -> int | None:
        """The number of tokens of reasoning, so far; None where there is no reasoning."""
        return self._parser.reasoning_tokens

    def take(self, delta: Delta) -> None:
        """Takes a delta of an output that is sent as a whole."""
        for piece in self._pieces(delta):
            match piece:
                case Content(text):
                    self._content.append(text)
                case Reasoning(text):
                    self._reasoning.append(text)
                case CallBegin():
                    self._calls.append((piece, []))
                case CallArguments(index, text):
                    self._calls[index][1].append(text)

    def message(self) -> Document:
        """The message of an output that has ended. Its content is null where it only calls."""
        content = "".join(self._content)
        message: Document = {"role": "assistant", "content": content if content or not self._calls else None}
        message["refusal"] = None
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [_call(begin, "".join(arguments)) for begin, arguments in self._calls]
        return message

    def deltas(self, delta: Delta) -> list[Document]:
        """The API's deltas of one of the output."""
        return [_delta(piece) for piece in _joined(self._pieces(delta)) if not isinstance(piece, CallEnd)]

    def reason(self, finish: Finish) -> str:
        """OpenAI's `finish_reason`, once the output has ended."""
        return "tool_calls" if self._parser.closed_calls and finish is Finish.STOP else finish.reason

    def _pieces(self, delta: Delta) -> list[Piece]:
        return self._parser.push(delta.text, last=delta.finish is not None, offsets=delta.offsets)


def _call(begin: CallBegin, arguments: str = "") -> Document:
    return {"id": begin.id, "type": "function", "function": {"name": begin.name, "arguments": arguments}}


def _delta(piece: Content | Reasoning | CallBegin | CallArguments) -> Document:
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
    """The pieces, adjacent texts of a kind as one."""
    joined: list[Piece] = []
    for kind, alike in groupby(pieces, key=type):
        if kind is Content or kind is Reasoning:
            joined.append(kind("".join(one.text for one in alike if isinstance(one, Content | Reasoning))))
        else:
            joined += alike
    return joined
