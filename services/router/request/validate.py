"""The one judge of parameters, for both doors: whatever passes here may run.

Every refusal is a FieldError that names the field as its door does; its kind is INVALID but for an
unknown model.
"""

from __future__ import annotations

import math
import secrets
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from baton.errors import ErrorKind, FieldError
from baton.v1.types_pb2 import LogitBias, Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.router.request.request import Asked, Chat

Ids = TypeVar("Ids", bound="Sequence[int]")
DEFAULT_MAX_TOKENS = 16
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
# Beyond these a logit of single precision may become infinite.
LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIASES = 300
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_TOKEN_IDS = 8
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
_U32 = 2**32 - 1
_U64 = 2**64 - 1


# The roles that chat templates know; a template may write a role into the prompt as it is.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


@dataclass(frozen=True)
class Fields:
    """What was asked besides the prompt, checked."""

    choices: int
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...]


def check_fields(asked: Asked, served: str, eos: tuple[int, ...], vocab_size: int) -> Fields:
    """Judges all that can be judged before the prompt is tokenised."""
    check_model(asked, served)
    if asked.chat is not None:
        _check_roles(asked.chat)
    return Fields(
        choices=check_choices(asked),
        sampling=check_sampling(asked, vocab_size),
        stop_token_ids=check_stop_ids(asked, eos, vocab_size),
        stop=check_stop_strings(asked),
    )


def check_model(asked: Asked, served: str) -> None:
    """The model must be the one that is served here."""
    if asked.model != served:
        raise FieldError(
            f"the model {_shorten(asked.model)!r} does not exist",
            param="model",
            code="model_not_found",
            kind=ErrorKind.NOT_FOUND,
        )


def check_sampling(asked: Asked, vocab_size: int) -> Sampling:
    """How tokens are drawn; a seed is drawn here where none was given.

    What asks for nothing stays unset on the wire, so that workers see at once what a request needs.
    """
    top_k = _whole("top_k", asked.top_k, 0, _U32, default=0)
    sampling = Sampling(
        temperature=_number("temperature", asked.temperature, 0.0, MAX_TEMPERATURE, default=1.0),
        top_k=min(top_k, vocab_size),
        top_p=_above_zero("top_p", asked.top_p),
        min_p=_number("min_p", asked.min_p, 0.0, 1.0, default=0.0),
        presence_penalty=_penalty("presence_penalty", asked.presence_penalty),
        frequency_penalty=_penalty("frequency_penalty", asked.frequency_penalty),
        logit_bias=_logit_bias(asked, vocab_size),
        logprobs=_logprobs(asked),
        seed=_whole("seed", asked.seed, 0, _U64, default=secrets.randbits(64)),
    )
    name, given = "repetition_penalty", asked.repetition_penalty
    repetition = _number(name, given, LEAST_REPETITION_PENALTY, MAX_REPETITION_PENALTY, default=1.0)
    if repetition != 1:
        sampling.repetition_penalty = repetition
    return sampling


def with_seed_of(sampling: Sampling, choice: int) -> Sampling:
    """The same for one of n outputs: number i draws with seed + i."""
    if choice == 0:
        return sampling
    own = Sampling()
    own.CopyFrom(sampling)
    own.seed = (sampling.seed + choice) % 2**64
    return own


def check_choices(asked: Asked) -> int:
    """How many outputs are wanted of the prompt."""
    n = _whole("n", asked.n, 1, MAX_CHOICES, default=1)
    if asked.best_of is not None and asked.best_of != n:
        raise FieldError("best_of other than n is not supported", param="best_of")
    return n


def check_max_tokens(asked: Asked, prompt_tokens: int, context: int) -> int:
    """The output's limit: what was asked, or what the prompt leaves of the context."""
    if prompt_tokens == 0:
        raise FieldError("the prompt is empty", param=asked.named("prompt"))
    name, least = asked.named("max_tokens"), 0 if asked.echo else 1
    default = _U32 if asked.fills_context else DEFAULT_MAX_TOKENS
    wanted = _whole(name, asked.max_tokens, least, _U32, default=default)
    if prompt_tokens + min(1, wanted) > context:
        raise context_exceeded(asked.named("prompt"), prompt_tokens, context)
    return min(wanted, context - prompt_tokens)


def context_exceeded(name: str, prompt_tokens: int, context: int) -> FieldError:
    """The error of a prompt, in the field `name`, that is too long."""
    return FieldError(
        f"the prompt has {prompt_tokens} tokens; with at least one of output it must fit the model's "
        f"context of {context} tokens",
        param=name,
        code="context_length_exceeded",
    )


def check_min_tokens(asked: Asked, max_tokens: int) -> int:
    """Never more than the output may have: neither than was asked for, nor than the context leaves."""
    unset = _U32 if asked.fills_context else DEFAULT_MAX_TOKENS
    most = unset if asked.max_tokens is None else asked.max_tokens
    if asked.min_tokens is not None and asked.min_tokens > most:
        message = f"min_tokens must not exceed {asked.named('max_tokens')}, which is {most}"
        raise FieldError(message, param="min_tokens")
    return min(max_tokens, _whole("min_tokens", asked.min_tokens, 0, _U32, default=0))


def check_token_ids(name: str, ids: Ids, vocab_size: int) -> Ids:
    """Every id must be one of the model's vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        message = f"{name}: token id {_shorten(str(wrong))} is not in the vocabulary of {vocab_size}"
        raise FieldError(message, param=name)
    return ids


def check_stop_ids(asked: Asked, eos: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """What ends a sequence at its worker: the request's own ids and, unless ignored, the model's."""
    own = check_token_ids("stop_token_ids", asked.stop_token_ids, vocab_size)
    every = tuple(dict.fromkeys((*own, *(() if asked.ignore_eos else eos))))
    if len(every) > MAX_STOP_TOKEN_IDS:
        message = f"at most {MAX_STOP_TOKEN_IDS} stop token ids, the model's own included; got {len(every)}"
        raise FieldError(message, param="stop_token_ids")
    return every


def check_stop_strings(asked: Asked) -> tuple[str, ...]:
    """A few short strings, none of them empty."""
    if len(asked.stop) > MAX_STOP_STRINGS:
        raise FieldError(f"at most {MAX_STOP_STRINGS} stop strings; got {len(asked.stop)}", param="stop")
    if any(not text for text in asked.stop):
        raise FieldError("a stop string must not be empty", param="stop")
    if any(len(text) > MAX_STOP_STRING_CHARS for text in asked.stop):
        raise FieldError(f"a stop string has at most {MAX_STOP_STRING_CHARS} characters", param="stop")
    return tuple(dict.fromkeys(asked.stop))


def _check_roles(chat: Chat) -> None:
    for number, turn in enumerate(chat.turns):
        if turn.role not in ROLES:
            message = f"messages[{number}].role must be one of {', '.join(sorted(ROLES))}"
            raise FieldError(message, param="messages")


def _logprobs(asked: Asked) -> int | None:
    if asked.logprobs is None:
        return None
    return _whole_within(asked.named("logprobs"), asked.logprobs, 0, MAX_LOGPROBS)


def _logit_bias(asked: Asked, vocab_size: int) -> list[LogitBias]:
    name, biases = "logit_bias", asked.logit_bias
    if len(biases) > MAX_LOGIT_BIASES:
        raise FieldError(f"at most {MAX_LOGIT_BIASES} tokens in logit_bias; got {len(biases)}", param=name)
    ids = check_token_ids(name, tuple(token_id for token_id, _ in biases), vocab_size)
    if len(set(ids)) < len(ids):
        raise FieldError("logit_bias names a token twice", param=name)
    narrow = [(token, _within(name, bias, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS)) for token, bias in biases]
    return [LogitBias(token_id=token, bias=bias) for token, bias in narrow if bias]


def _penalty(name: str, value: float | None) -> float:
    return _number(name, value, -MAX_PENALTY, MAX_PENALTY, default=0.0)


def _above_zero(name: str, value: float | None) -> float:
    if value is None:
        return 1.0
    narrow = _finite(name, value)
    if not 0 < narrow <= 1:
        raise FieldError(f"{name} must be above 0 and at most 1", param=name)
    return narrow


def _number(name: str, value: float | None, least: float, most: float, default: float) -> float:
    return default if value is None else _within(name, value, least, most)


def _within(name: str, value: float, least: float, most: float) -> float:
    narrow = _finite(name, value)
    if not _float32(least) <= narrow <= most:
        raise FieldError(f"{name} must be from {least:g} to {most:g}", param=name)
    return narrow


def _finite(name: str, value: float) -> float:
    """The number as the wire will carry it, where it is finite in single precision."""
    narrow = _float32(value)
    if not math.isfinite(narrow):
        raise FieldError(f"{name} must be a finite number", param=name)
    return narrow


def _float32(value: float) -> float:
    """The nearest number of single precision; infinite where none is near."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.inf


def _whole(name: str, value: int | None, least: int, most: int, default: int) -> int:
    return default if value is None else _whole_within(name, value, least, most)


def _whole_within(name: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise FieldError(f"{name} must be from {least} to {most}", param=name)
    return value


def _shorten(text: str) -> str:
    return text if len(text) <= 64 else f"{text[:64]}…"
