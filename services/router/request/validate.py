"""Validates the parameters of a request, for both APIs: what passes may run.

An invalid request raises FieldError, which names the field as its API does. The error's kind is INVALID, or
NOT_FOUND for an unknown model.
"""

from __future__ import annotations

import dataclasses
import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from baton.base.errors import ErrorKind, FieldError
from baton.request_fields.field import Kind, float32
from baton.request_fields.table import BY_NAME, MAX_PREDICTION_TOKENS, MOST_ITEMS, SAMPLING_NUMBERS, U32
from baton.v1.types_pb2 import Grammar, LogitBias, Sampling
from services.router.request.bounds import (
    DEFAULT_MAX_TOKENS,
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    MAX_RULES,
)
from services.router.request.limits import PairLimits, kind_of
from services.router.request.request import Chat, ParsedRequest

Ids = TypeVar("Ids", bound="Sequence[int]")

_BOUNDS = {name: field.bounds for name, field in BY_NAME.items() if field.bounds is not None}
# Name of a sampling parameter that is a number, and whether it is an integer.
_SAMPLING_NUMBERS = tuple((field.name, field.kind is Kind.INTEGER) for field in SAMPLING_NUMBERS)
# Fields that stay unset at the value that changes nothing, and the defaults of the others.
_UNUSED = {
    field.name: field.unused
    for field in SAMPLING_NUMBERS
    if Sampling.DESCRIPTOR.fields_by_name[field.name].has_presence
}
_DEFAULTS = {field.name: field.default for field in SAMPLING_NUMBERS if field.name not in _UNUSED}
# The beginning of a rule of Lark or GBNF: a name, what Lark may have behind it, and a colon, in one line.
_RULE = re.compile(r"^[ \t]*[?!]?[A-Za-z_][^\n:|\"/]*+:", re.MULTILINE)

# The roles that chat templates know. Others are refused: a template may copy the role into the prompt.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass(frozen=True)
class RequestLimits:
    """The served model's limits, a snapshot: they change as workers join and leave. `pairs`: what each
    pair of workers serves; empty where that is not known."""

    served_name: str
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_context_tokens: int
    pairs: tuple[PairLimits, ...] = ()

    def without_pairs(self) -> RequestLimits:
        """The limits that hold whichever workers serve a request."""
        return dataclasses.replace(self, pairs=())

    def pairs_for(self, parsed: ParsedRequest) -> Sequence[PairLimits]:
        """Returns the limits of pairs that report the request's logprobs and guide its output."""
        pairs = self.pairs or (PairLimits(self.max_context_tokens, self.max_context_tokens),)
        return [pair for pair in pairs if pair.offers(parsed.logprobs, kind_of(parsed.grammar))]


@dataclass(frozen=True)
class Fields:
    """The checked fields besides the prompt. Token limits do not consider the context yet."""

    choices: int
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]
    max_tokens: int
    min_tokens: int
    priority: int
    max_draft_tokens: int | None


@dataclass(frozen=True)
class OutputLimits:
    """Token limits of an output that fits the context together with its prompt."""

    max_tokens: int
    min_tokens: int


def check_fields(parsed: ParsedRequest, limits: RequestLimits) -> Fields:
    """Checks everything that can be checked before the prompt is tokenised."""
    check_model(parsed, limits.served_name)
    if parsed.chat is not None:
        check_roles(parsed.chat)
    if parsed.grammar is not None:
        _check_grammar(parsed, parsed.grammar)
    fields = Fields(
        choices=_choices(parsed),
        sampling=_sampling(parsed, limits.vocab_size),
        stop_token_ids=_stop_token_ids(parsed, limits),
        stop=_stop_strings(parsed),
        max_tokens=_max_tokens(parsed),
        min_tokens=_min_tokens(parsed),
        priority=0 if parsed.priority is None else _whole("priority", parsed.priority),
        max_draft_tokens=None
        if parsed.max_draft_tokens is None
        else _whole("max_draft_tokens", parsed.max_draft_tokens),
    )
    _check_offered(parsed, limits)
    if not (parsed.tokenized or parsed.token_ids or parsed.chat or parsed.text):
        raise _empty_prompt(parsed)
    return fields


def check_prompt(
    parsed: ParsedRequest, fields: Fields, prompt_ids: Sequence[int], limits: RequestLimits
) -> OutputLimits:
    """Checks the tokenised prompt, and fits the token limits into the rest of the context."""
    if not prompt_ids:
        raise _empty_prompt(parsed)
    name, pairs = parsed.api_name("prompt"), limits.pairs_for(parsed)
    length = len(prompt_ids)
    room = max((pair.total - length for pair in pairs if length <= pair.prompt), default=-1)
    if room < min(1, fields.max_tokens):
        raise context_exceeded(name, length, max((pair.context for pair in pairs), default=0))
    if parsed.tokenized is None:
        check_token_ids(name, prompt_ids, limits.vocab_size)
    max_tokens = min(fields.max_tokens, room)
    return OutputLimits(max_tokens, min(fields.min_tokens, max_tokens))


def _check_offered(parsed: ParsedRequest, limits: RequestLimits) -> None:
    """Raises FieldError for logprobs, or a kind of grammar, that no pair of workers has."""
    kind = kind_of(parsed.grammar)
    if limits.pairs and not any(pair.offers(None, kind) for pair in limits.pairs):
        name = parsed.api_name("grammar")
        raise FieldError(f"{name}: the workers do not guide outputs by a {kind}", param=name)
    if parsed.logprobs is not None and limits.pairs and not limits.pairs_for(parsed):
        name = parsed.api_name("logprobs")
        most = max(pair.max_logprobs for pair in limits.pairs if pair.offers(None, kind))
        why = f"at most {most} are reported" if most else "the workers report none"
        raise FieldError(f"{name}: {why}", param=name)


def check_model(parsed: ParsedRequest, served: str) -> None:
    """Raises FieldError if the request names another model than the served one (NOT_FOUND), or none that a
    model could have."""
    most = BY_NAME["model"].most_chars
    if most is not None and len(parsed.model) > most:
        raise FieldError(f"the model's name has more than {most} characters", param="model")
    if parsed.model != served:
        raise FieldError(
            f"the model {_shorten(parsed.model)!r} does not exist",
            param="model",
            code="model_not_found",
            kind=ErrorKind.NOT_FOUND,
        )


def _sampling(parsed: ParsedRequest, vocab_size: int) -> Sampling:
    """The sampling parameters. A missing seed is drawn here, so that every attempt uses the same one.

    Neutral values stay unset in the message, so that workers see at once which features a request needs.
    """
    numbers: dict[str, Any] = dict(_DEFAULTS)
    for name, is_integer in _SAMPLING_NUMBERS:
        if (value := getattr(parsed, name)) is not None:
            number = _whole(name, value) if is_integer else _within(name, value)
            if number != _UNUSED.get(name):
                numbers[name] = number
    numbers["top_k"] = min(numbers["top_k"], vocab_size)
    seed = secrets.randbits(64) if parsed.seed is None else _whole("seed", parsed.seed)
    return Sampling(
        logit_bias=_logit_bias(parsed, vocab_size),
        logprobs=_logprobs(parsed),
        # Those of signed and of unsigned integers are the same bits.
        seed=seed % 2**64,
        **numbers,
    )


def with_seed_of(sampling: Sampling, choice: int) -> Sampling:
    """The parameters of output number `choice`, which samples with seed + choice."""
    if choice == 0:
        return sampling
    own = Sampling()
    own.CopyFrom(sampling)
    own.seed = (sampling.seed + choice) % 2**64
    return own


def _choices(parsed: ParsedRequest) -> int:
    """The number of outputs of the prompt."""
    n = 1 if parsed.n is None else _whole("n", parsed.n)
    if parsed.best_of is not None and parsed.best_of != n:
        raise FieldError("best_of other than n is not supported", param="best_of")
    return n


def context_exceeded(name: str, prompt_tokens: int, context: int) -> FieldError:
    """The error of a prompt that is too long; `name` is the API's name of its field."""
    return FieldError(
        f"the prompt has {prompt_tokens} tokens; with at least one of output it must fit the model's "
        f"context of {context} tokens",
        param=name,
        code="context_length_exceeded",
    )


def text_exceeds_context(name: str, size: int, context: int) -> FieldError:
    """The error of a prompt that is too long by its bytes alone, so that its tokens were not counted."""
    return FieldError(
        f"the prompt has {size} bytes, more than the model's context of {context} tokens can have",
        param=name,
        code="context_length_exceeded",
    )


def check_prediction(ids: Ids, limits: RequestLimits) -> Ids:
    """Returns the tokens of a prediction. Raises FieldError where they are too many, or one is not in the
    vocabulary."""
    if len(ids) > MAX_PREDICTION_TOKENS:
        raise prediction_too_long(f"has {len(ids)} tokens")
    return check_token_ids("prediction", ids, limits.vocab_size)


def prediction_too_long(size: str) -> FieldError:
    """The error of a prediction that is too long; `size` says what it has too much of."""
    message = f"prediction {size}; at most {MAX_PREDICTION_TOKENS} tokens are allowed"
    return FieldError(message, param="prediction")


def check_token_ids(name: str, ids: Ids, vocab_size: int) -> Ids:
    """Returns the ids; FieldError names the first one that is not in the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        message = f"{name}: token id {_shorten(str(wrong))} is not in the vocabulary of {vocab_size}"
        raise FieldError(message, param=name)
    return ids


def _stop_token_ids(parsed: ParsedRequest, limits: RequestLimits) -> tuple[int, ...]:
    """The request's own stop ids and, unless ignored, the model's end-of-sequence ids."""
    own = check_token_ids("stop_token_ids", parsed.stop_token_ids, limits.vocab_size)
    model = () if parsed.ignore_eos else limits.eos_token_ids
    unique = tuple(dict.fromkeys((*own, *model)))
    most = MOST_ITEMS["stop_token_ids"]
    if len(unique) > most:
        message = f"at most {most} stop token ids, the model's own included; got {len(unique)}"
        raise FieldError(message, param="stop_token_ids")
    return unique


def _stop_strings(parsed: ParsedRequest) -> tuple[str, ...]:
    """The distinct stop strings, in order."""
    most, most_chars = MOST_ITEMS["stop"], BY_NAME["stop"].most_chars
    if len(parsed.stop) > most:
        raise FieldError(f"at most {most} stop strings; got {len(parsed.stop)}", param="stop")
    if any(not text for text in parsed.stop):
        raise FieldError("a stop string must not be empty", param="stop")
    if most_chars is not None and any(len(text) > most_chars for text in parsed.stop):
        raise FieldError(f"a stop string has at most {most_chars} characters", param="stop")
    return tuple(dict.fromkeys(parsed.stop))


def _max_tokens(parsed: ParsedRequest) -> int:
    if parsed.max_tokens is None:
        return _default_max_tokens(parsed)
    tokens = _whole("max_tokens", parsed.max_tokens, parsed.api_name("max_tokens"))
    if parsed.structured and not tokens:
        name = parsed.api_name("max_tokens")
        raise FieldError(f"{name} must be at least 1", param=name)
    return tokens


def _min_tokens(parsed: ParsedRequest) -> int:
    most = _default_max_tokens(parsed) if parsed.max_tokens is None else parsed.max_tokens
    if parsed.min_tokens is not None and parsed.min_tokens > most:
        message = f"min_tokens must not exceed {parsed.api_name('max_tokens')}, which is {most}"
        raise FieldError(message, param="min_tokens")
    return 0 if parsed.min_tokens is None else _whole("min_tokens", parsed.min_tokens)


def _default_max_tokens(parsed: ParsedRequest) -> int:
    return U32 if parsed.fills_context else DEFAULT_MAX_TOKENS


def _check_grammar(parsed: ParsedRequest, grammar: Grammar) -> None:
    """Checks sizes, and what a grammar excludes. The worker finds out whether it compiles."""
    name = parsed.api_name("grammar")
    size = grammar.ByteSize()
    if size > MAX_GRAMMAR_BYTES:
        raise FieldError(f"{name} has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed", param=name)
    if len(grammar.choice.choices) > MAX_CHOICES:
        raise FieldError(f"{name}: at most {MAX_CHOICES} choices", param=name)
    if len(_RULE.findall(grammar.grammar)) > MAX_RULES:
        raise FieldError(f"{name}: at most {MAX_RULES} rules", param=name)
    if grammar.WhichOneof("kind") is None or (grammar.HasField("choice") and not grammar.choice.choices):
        raise FieldError(f"{name} is empty", param=name)
    if parsed.ignore_eos:
        message = f"ignore_eos cannot be combined with {name}: the output ends where the grammar does"
        raise FieldError(message, param="ignore_eos")


def _empty_prompt(parsed: ParsedRequest) -> FieldError:
    return FieldError("the prompt is empty", param=parsed.api_name("prompt"))


def check_roles(chat: Chat) -> None:
    """Raises FieldError for a message with an unknown role."""
    for number, turn in enumerate(chat.turns):
        if turn.role not in ROLES:
            message = f"{chat.field_name}[{number}].role must be one of {', '.join(sorted(ROLES))}"
            raise FieldError(message, param=chat.field_name)


def _logprobs(parsed: ParsedRequest) -> int | None:
    if parsed.logprobs is None:
        return None
    return _whole("logprobs", parsed.logprobs, parsed.api_name("logprobs"))


def _logit_bias(parsed: ParsedRequest, vocab_size: int) -> list[LogitBias]:
    name, biases = "logit_bias", parsed.logit_bias
    if len(biases) > MOST_ITEMS[name]:
        raise FieldError(f"at most {MOST_ITEMS[name]} tokens in logit_bias; got {len(biases)}", param=name)
    ids = check_token_ids(name, tuple(token_id for token_id, _ in biases), vocab_size)
    if len(set(ids)) < len(ids):
        raise FieldError("logit_bias names a token twice", param=name)
    narrow = [(token, _within(name, bias)) for token, bias in biases]
    return [LogitBias(token_id=token, bias=bias) for token, bias in narrow if bias]


def _within(name: str, value: float) -> float:
    """The number that workers use, rounded to float32, as protobuf carries it."""
    bounds = _BOUNDS[name]
    narrow = float32(bounds.nearest(value))
    if not math.isfinite(narrow) or not math.isfinite(value):
        raise FieldError(f"{name} must be a finite number", param=name)
    if bounds.above and value <= bounds.least:
        raise FieldError(f"{name} must be above {bounds.least:g}", param=name)
    if value < bounds.least and math.isinf(bounds.most):
        raise FieldError(f"{name} must be at least {bounds.least:g}", param=name)
    if not bounds.least <= (narrow if bounds.used is None else value) <= bounds.most:
        raise FieldError(f"{name} must be from {bounds.least:g} to {bounds.most:g}", param=name)
    return narrow


def _whole(name: str, value: int, api_name: str | None = None) -> int:
    """The integer that workers use. `api_name`: the API's name of the field, where it differs."""
    bounds, name = _BOUNDS[name], api_name or name
    if not bounds.least <= value <= bounds.most:
        raise FieldError(f"{name} must be from {int(bounds.least)} to {int(bounds.most)}", param=name)
    return int(bounds.nearest(value))


def _shorten(text: str) -> str:
    return text if len(text) <= 64 else f"{text[:64]}…"
