"""Fields of a request that no API documents: found, named to the client and in the log, or refused.

Names are the client's own text: what is shown of them is short and printable. Values are never shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic import BaseModel

from baton.base.errors import FieldError
from baton.v1.router_pb2 import GenerateRequest
from services.common.observability.logs import get_log

# The response header of HTTP, and the trailing metadata of gRPC.
HEADER = "x-baton-ignored-fields"
_MOST_NAMES = 16
_MOST_CHARS = 64
# Names that the log has had. Beyond them nothing is logged, so that a client cannot fill memory or log.
_MOST_LOGGED = 256
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.\[\]-]")

_log = get_log("request")


def unknown_keys(document: Mapping[str, object], nested: Mapping[str, type[BaseModel]]) -> Iterator[str]:
    """The keys of objects in a JSON body that their models do not have, such as `messages[].mood`."""
    for name in nested:
        if name not in document:
            continue
        value, known = document[name], nested[name].model_fields.keys()
        many = isinstance(value, list)
        found: dict[str, None] = {}
        for item in value if isinstance(value, list) else (value,):
            if isinstance(item, dict) and not item.keys() <= known:
                found |= dict.fromkeys(key for key in item if key not in known)
        yield from (f"{name}{'[]' if many else ''}.{key}" for key in found)


def unknown_numbers(request: GenerateRequest) -> tuple[str, ...]:
    """The numbers of unknown fields of a message and of its prompt, such as `77` and `chat.messages[].9`."""
    found = dict.fromkeys(_numbers("", request))
    prompt = request.WhichOneof("prompt")
    if prompt == "token_ids":
        found |= dict.fromkeys(_numbers("token_ids.", request.token_ids))
    elif prompt == "chat":
        found |= dict.fromkeys(_numbers("chat.", request.chat))
        for message in request.chat.messages:
            found |= dict.fromkeys(_numbers("chat.messages[].", message))
    return tuple(found)


def _numbers(path: str, message: Message) -> Iterator[str]:
    unknown = UnknownFieldSet(message)
    for index in range(len(unknown)):
        yield f"{path}{unknown[index].field_number}"


def shown(names: Sequence[str]) -> str:
    """The names as the header and the log have them."""
    parts = [_UNPRINTABLE.sub("?", name[:_MOST_CHARS]) or "?" for name in names[:_MOST_NAMES]]
    more = len(names) - len(parts)
    return ", ".join([*parts, f"and {more} more"] if more > 0 else parts)


def header(names: Sequence[str]) -> list[tuple[bytes, bytes]]:
    """The response header that names them; empty if there are none."""
    return [(HEADER.encode(), shown(names).encode())] if names else []


class IgnoredFields:
    """The router's treatment of undocumented fields; one object for all requests."""

    def __init__(self, *, strict: bool) -> None:
        """`strict`: whether requests with undocumented fields are refused."""
        self._strict = strict
        self._logged: set[str] = set()

    def report(self, names: Iterable[str]) -> None:
        """Logs names that are new. FieldError for the first one if undocumented fields are refused."""
        given = tuple(names)
        if not given:
            return
        if self._strict:
            first = shown(given[:1])
            raise FieldError(f"unknown field {first}", param=first, code="unknown_parameter")
        new = [name for name in given if name[:_MOST_CHARS] not in self._logged]
        room = _MOST_LOGGED - len(self._logged)
        if new and room > 0:
            self._logged |= {name[:_MOST_CHARS] for name in new[:room]}
            _log.info("fields_ignored", fields=shown(new))
