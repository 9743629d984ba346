"""The one judge of parameters, for both doors: whatever passes here may run.

Every refusal is a FieldError that names the field; its kind is INVALID but for an unknown model.
"""

from __future__ import annotations

import math
import secrets
import struct
from typing import TYPE_CHECKING

from baton.errors import ErrorKind
from baton.v1.types_pb2 import Sampling
from services.common.errors import FieldError

if TYPE_CHECKING:
    from services.router.request import Asked

DEFAULT_MAX_TOKENS = 16
MAX_TEMPERATURE = 100.0
MAX_STOP_TOKEN_IDS = 8
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 1024
_U32 = 2**32 - 1
_U64 = 2**64 - 1


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
    """How tokens are drawn; a seed is drawn here where none was given."""
    temperature = _float32("temperature", asked.temperature, default=1.0)
    if not 0 <= temperature <= MAX_TEMPERATURE:
        raise FieldError(f"temperature must be from 0 to {MAX_TEMPERATURE:g}", param="temperature")
    top_p = _float32("top_p", asked.top_p, default=1.0)
    if not 0 < top_p <= 1:
        raise FieldError("top_p must be above 0 and at most 1", param="top_p")
    top_k = _whole("top_k", asked.top_k, 0, _U32, default=0)
    seed = _whole("seed", asked.seed, 0, _U64, default=secrets.randbits(64))
    return Sampling(temperature=temperature, top_k=min(top_k, vocab_size), top_p=top_p, seed=seed)


def check_max_tokens(asked: Asked, prompt_tokens: int, context: int) -> int:
    """The output's limit: what was asked, or what the prompt leaves of the context."""
    if prompt_tokens == 0:
        raise FieldError("the prompt is empty", param="prompt")
    wanted = _whole("max_tokens", asked.max_tokens, 1, _U32, default=DEFAULT_MAX_TOKENS)
    if prompt_tokens + 1 > context:
        raise FieldError(
            f"the prompt has {prompt_tokens} tokens; with at least one of output it must fit the model's "
            f"context of {context} tokens",
            param="prompt",
            code="context_length_exceeded",
        )
    return min(wanted, context - prompt_tokens)


def check_token_ids(name: str, ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
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


def _float32(name: str, value: float | None, default: float) -> float:
    """The number as the wire will carry it: finite in single precision."""
    if value is None:
        return default
    try:
        narrow = float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        narrow = math.inf
    if not math.isfinite(narrow):
        raise FieldError(f"{name} must be a finite number", param=name)
    return narrow


def _whole(name: str, value: int | None, least: int, most: int, default: int) -> int:
    if value is None:
        return default
    if not least <= value <= most:
        raise FieldError(f"{name} must be from {least} to {most}", param=name)
    return value


def _shorten(text: str) -> str:
    return text if len(text) <= 64 else f"{text[:64]}…"
