"""The output items of a response, built piece by piece, and the events that report them.

Text becomes a message, reasoning a reasoning item, a call of a function an item of its own. An item ends when
one of another kind begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from services.router.tools.pieces import CallArguments, CallBegin, CallEnd, Content, Piece, Reasoning

Document = dict[str, Any]
# The type of an event and its fields.
Event = tuple[str, Document]


class OutputItems:
    """`push` the pieces of an output in order, then `close`. Iterate over the events: they do the work."""

    def __init__(self, token: str) -> None:
        """`token`: the random part of the items' ids."""
        self.items: list[Document] = []
        self._token = token
        self._texts: list[str] = []
        # Whether the arguments of the last call are complete.
        self._call_ended = False

    def push(self, piece: Piece, logprobs: object = ()) -> Iterator[Event]:
        """The events of one piece. `logprobs`: of its tokens, for text."""
        match piece:
            case Content(text):
                yield from self._continue("message", text, logprobs)
            case Reasoning(text):
                yield from self._continue("reasoning", text, ())
            case CallBegin():
                yield from self.close("completed")
                self._call_ended = False
                yield from self._begin(_call(self._new_id("fc"), piece))
            case CallArguments(_, text):
                self._texts.append(text)
                yield "response.function_call_arguments.delta", {**self._place(), "delta": text}
            case CallEnd():
                self._call_ended = True

    def close(self, status: str) -> Iterator[Event]:
        """Ends the item that is open, if there is one, with this status; a call is completed if its arguments
        are."""
        if not self.items or self.items[-1]["status"] != "in_progress":
            return
        item, text = self.items[-1], "".join(self._texts)
        self._texts.clear()
        item["status"] = status
        if item["type"] == "function_call":
            item["status"] = "completed" if self._call_ended else "incomplete"
            item["arguments"] = text
            fields = {**self._place(), "name": item["name"], "arguments": text}
            yield "response.function_call_arguments.done", fields
        else:
            part = _part(item["type"], text)
            item["content"] = [part]
            more: Document = {"logprobs": []} if item["type"] == "message" else {}
            yield f"response.{part['type']}.done", {**self._place(), "content_index": 0, "text": text, **more}
            yield "response.content_part.done", {**self._place(), "content_index": 0, "part": part}
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def open_message(self) -> Iterator[Event]:
        """Begins a message, unless one is open."""
        if not self._is_open("message"):
            yield from self.close("completed")
            yield from self._begin(_message(self._new_id("msg")))

    def _continue(self, kind: str, text: str, logprobs: object) -> Iterator[Event]:
        """More text of the open item, or of a new one."""
        if kind == "message":
            yield from self.open_message()
        elif not self._is_open(kind):
            yield from self.close("completed")
            yield from self._begin(_reasoning(self._new_id("rs")))
        self._texts.append(text)
        place = {**self._place(), "content_index": 0, "delta": text}
        if kind == "message":
            yield "response.output_text.delta", {**place, "logprobs": logprobs or []}
        else:
            yield "response.reasoning_text.delta", place

    def _begin(self, item: Document) -> Iterator[Event]:
        self.items.append(item)
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": item}
        if item["type"] != "function_call":
            part = _part(item["type"], "")
            yield "response.content_part.added", {**self._place(), "content_index": 0, "part": part}

    def _is_open(self, kind: str) -> bool:
        return (
            bool(self.items) and self.items[-1]["type"] == kind and self.items[-1]["status"] == "in_progress"
        )

    def _place(self) -> Document:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _new_id(self, prefix: str) -> str:
        number = len(self.items)
        return f"{prefix}_{self._token}_{number}" if number else f"{prefix}_{self._token}"


def _message(item_id: str) -> Document:
    return {"id": item_id, "type": "message", "status": "in_progress", "role": "assistant", "content": []}


def _reasoning(item_id: str) -> Document:
    return {"id": item_id, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}


def _call(item_id: str, begin: CallBegin) -> Document:
    return {
        "id": item_id,
        "type": "function_call",
        "status": "in_progress",
        "call_id": begin.id,
        "name": begin.name,
        "arguments": "",
    }


def _part(kind: str, text: str) -> Document:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
