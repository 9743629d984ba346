"""Random requests as data, and the body and the message that say the same.

Values come from the bounds that validation has: at, within and just beyond each.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.request_fields.field import Bounds, Kind
from baton.request_fields.table import BY_NAME, MOST_ITEMS, SAMPLING_NUMBERS
from baton.v1.router_pb2 import ChatMessage, ChatMessages, GenerateRequest, TokenIds, Tool
from baton.v1.types_pb2 import Choices, Grammar, LogitBias
from services.router.request.bounds import MAX_GRAMMAR_BYTES
from tests.router.conftest import MODEL
from tests.router.fake_model import VOCAB

FLOATS = tuple(field.name for field in SAMPLING_NUMBERS if field.kind is Kind.FLOAT)
INTEGERS = ("top_k", "seed", "n", "max_tokens", "min_tokens", "logprobs", "max_draft_tokens")
_BITS = {"seed": 64}
_STOP_CHARS = BY_NAME["stop"].most_chars or 0
TEXTS = ("a", "hé", "<|end|>", "<|pad|>x", "\0", "e" + "\u0301" * 40, "\U0001f600", " ", "x" * 300, "日本語")
ROLES = ("system", "developer", "user", "assistant", "tool", "robot", "", "refused")
# A prompt so large that a helper process tokenises it; no prompt that large fits the context.
LARGE = "y" * 70_000


@dataclass(frozen=True)
class Ask:
    """One request: the field and value of its prompt, and the other fields as both APIs name them."""

    prompt_kind: str
    prompt: Any
    model: str
    fields: dict[str, Any]

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.prompt_kind == "chat" else "/v1/completions"

    def body(self) -> bytes:
        """The request as an HTTP body."""
        fields = dict(self.fields)
        if "logit_bias" in fields:
            fields["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"]}
        if "prediction" in fields:
            fields["prediction"] = {"type": "content", "content": fields["prediction"]}
        if "grammar" in fields:
            fields["structured_outputs"] = fields.pop("grammar")
        if "tools" in fields:
            functions = [{"name": name, "parameters": parameters} for name, parameters in fields["tools"]]
            fields["tools"] = [{"type": "function", "function": one} for one in functions]
        if self.prompt_kind == "chat":
            count = fields.pop("logprobs", None)
            if count is not None:
                fields |= {"logprobs": True, "top_logprobs": count}
            messages = [{"role": role, "content": content} for role, content in self.prompt]
            return json.dumps({"model": self.model, "messages": messages, **fields}).encode()
        return json.dumps({"model": self.model, "prompt": self.prompt, **fields}).encode()

    def message(self) -> GenerateRequest:
        """The request as a gRPC message."""
        fields = dict(self.fields)
        biases = [LogitBias(token_id=token, bias=bias) for token, bias in fields.pop("logit_bias", ())]
        grammar, tools = fields.pop("grammar", None), fields.pop("tools", ())
        request = GenerateRequest(model=self.model, logit_bias=biases, **fields)
        if grammar is not None:
            request.grammar.CopyFrom(_grammar_message(grammar))
        if self.prompt_kind == "chat":
            turns = [ChatMessage(role=role, content=content) for role, content in self.prompt]
            offered = [Tool(name=name, parameters=json.dumps(parameters)) for name, parameters in tools]
            request.chat.CopyFrom(ChatMessages(messages=turns, tools=offered))
        elif self.prompt_kind == "token_ids":
            request.token_ids.CopyFrom(TokenIds(ids=self.prompt))
        else:
            request.text = self.prompt
        return request


def _grammar_message(grammar: dict[str, Any]) -> Grammar:
    ((kind, value),) = grammar.items()
    match kind:
        case "json":
            return Grammar(json_schema=json.dumps(value, ensure_ascii=False))
        case "choice":
            return Grammar(choice=Choices(choices=value))
        case _:
            return Grammar(**{kind: value})


def draw_ask(draw: random.Random) -> Ask:
    """A request that both APIs can say: most of its fields are valid."""
    kind = draw.choice(("text", "token_ids", "chat"))
    fields: dict[str, Any] = {}
    for name in draw.sample((*FLOATS, *INTEGERS), draw.randrange(4)):
        fields[name] = _number(draw, name)
    for name, make in _OTHERS.items():
        if draw.random() < 0.12:
            fields[name] = make(draw)
    if kind == "chat":
        fields.pop("echo", None)
        if draw.random() < 0.1:
            fields["tools"] = [_tool(draw) for _ in range(draw.choice((1, 2, 128, 129)))]
        # Without it the two APIs differ: a chat over HTTP fills the context.
        fields.setdefault("max_tokens", draw.randrange(1, 5))
    else:
        fields.setdefault("max_tokens", draw.randrange(1, 5))
    if fields.get("n", 1) > 4 and fields["n"] <= _bounds("n").most and draw.random() < 0.98:
        fields["n"] = 2  # valid, and dear
    if 16 < fields["max_tokens"] <= _bounds("max_tokens").most and draw.random() < 0.98:
        fields["max_tokens"] = 4
    model = MODEL if draw.random() < 0.97 else draw.choice(("", "other", "../../etc/passwd", "m" * 2000))
    return Ask(kind, _prompt(draw, kind), model, fields)


def _prompt(draw: random.Random, kind: str) -> Any:
    if kind == "chat":
        turns = draw.randrange(4) if draw.random() < 0.2 else 1
        return [(_role(draw), _text(draw)) for _ in range(turns)]
    if kind == "text":
        return LARGE if draw.random() < 0.002 else _text(draw)
    count = draw.choice((0, 255, 256, 257)) if draw.random() < 0.1 else draw.randrange(1, 12)
    return [_token(draw) for _ in range(count)]


def _role(draw: random.Random) -> str:
    return draw.choice(ROLES) if draw.random() < 0.2 else "user"


def _text(draw: random.Random) -> str:
    return "".join(draw.choice(TEXTS) for _ in range(draw.randrange(3)))


def _token(draw: random.Random) -> int:
    return draw.choice((VOCAB, 2**31, 2**32 - 1)) if draw.random() < 0.01 else draw.randrange(VOCAB)


def _bounds(name: str) -> Bounds:
    bounds = BY_NAME[name].bounds
    assert bounds is not None
    return bounds


def _number(draw: random.Random, name: str) -> float | int:
    """Draws a number at, beyond or between the bounds that a message can carry."""
    bounds = _bounds(name)
    if name in FLOATS:
        least, most = bounds.used or (bounds.least, bounds.most)
        step = (most - least) / 64
        beyond = (least - step, most + step, 1e30, -1e30)
        edges: tuple[float, ...] = (least, most, 0.0, 1e-45, *beyond)
        return draw.choice(edges) if draw.random() < 0.4 else draw.uniform(least, most)
    largest: int = 2 ** _BITS.get(name, 32) - 1
    last = int(bounds.most)
    wanted: tuple[int, ...] = (0, 1, 2, 3, last, last + 1, largest, draw.randrange(20))
    return min(draw.choice(wanted), largest)


def _stops(draw: random.Random) -> list[str]:
    count = draw.choice((1, 2, MOST_ITEMS["stop"], MOST_ITEMS["stop"] + 1))
    longest = draw.choice((1, 2, 2, 2, _STOP_CHARS, _STOP_CHARS + 1))
    empty = draw.random() < 0.1
    return ["" if empty else "".join(draw.choices("ab<é", k=longest)) for _ in range(count)]


def _biases(draw: random.Random) -> list[tuple[int, float]]:
    count = draw.choice((1, 3, MOST_ITEMS["logit_bias"], MOST_ITEMS["logit_bias"] + 1))
    tokens = draw.sample(range(VOCAB), min(count, VOCAB))
    if draw.random() < 0.1:
        tokens[0] = VOCAB
    return [(token, draw.choice((-100.0, 0.0, 5.0, 100.0, 100.5))) for token in tokens]


def _grammar(draw: random.Random) -> dict[str, Any]:
    """Draws a value of `structured_outputs`. The longest is beyond the bound."""
    size = draw.choice((1, 3, 1000, MAX_GRAMMAR_BYTES)) if draw.random() < 0.2 else 3
    kinds: dict[str, Any] = {
        "json": {"enum": ["a" * size]},
        "json_object": draw.random() < 0.8,
        "regex": "a" * size,
        "choice": ["a" * size, "b"],
        "grammar": "start: " + "a" * size,
    }
    kind = draw.choice(list(kinds))
    return {kind: kinds[kind]}


def _tool(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A tool's name and the schema of its parameters."""
    name = draw.choice(("", "x" * 65, "a b", "é")) if draw.random() < 0.05 else f"f{draw.randrange(1000)}"
    return name, draw.choice(({}, {"type": "object", "properties": {"a": {"type": "string"}}}))


_OTHERS: dict[str, Callable[[random.Random], Any]] = {
    "ignore_eos": lambda draw: draw.random() < 0.5,
    "echo": lambda draw: draw.random() < 0.5,
    "skip_special_tokens": lambda draw: draw.random() < 0.5,
    "grammar": _grammar,
    "stop": _stops,
    "stop_token_ids": lambda draw: [_token(draw) for _ in range(draw.choice((1, 2, 8, 9)))],
    "logit_bias": _biases,
    "prediction": lambda draw: "a" * 16_385 if draw.random() < 0.1 else _text(draw),
}
