"""The tree of settings as a list, each by its path, with what its declaration says."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from baton.base.cluster_auth import SECRET_VARIABLE
from services.common.config.settings_tree.settings import ROLE_FLAGS, Settings

_DECISION = re.compile(r" \(\[\d{4}\]\([^)]*\)\)")
_LINK = re.compile(r"\[([^]]+)\]\([^)]*\)")
# A setting without a flag, since arguments are seen by all users of a machine, but with a variable.
_SECRET = "cluster_secret"
_OF_ROLE = "engine_of_role"
_UNITS = {
    "_ms": "ms",
    "_s": "s",
    "_mb": "MB",
    "_kb": "KiB",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "port": "port",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting, or a section that a flag sets as a whole (`is_section`)."""

    path: str
    field: FieldInfo

    @property
    def _about(self) -> Mapping[str, Any]:
        extra = self.field.json_schema_extra
        return extra if isinstance(extra, dict) else {}

    @property
    def is_section(self) -> bool:
        return section_of(self.field) is not None

    @property
    def fixed(self) -> str | None:
        """The reason why a file cannot have it; None for a public setting."""
        reason: str | None = self._about.get("fixed")
        return reason

    @property
    def who(self) -> str:
        """The audience that should touch it."""
        return str(self._about.get("who", ""))

    @property
    def sentence(self) -> str:
        return self.field.description or ""

    @property
    def secret(self) -> bool:
        return not self.field.repr

    @property
    def key(self) -> str:
        """The stem of its flag and variable."""
        named = self._about.get("flag")
        return named if isinstance(named, str) else self.path.rpartition(".")[2]

    @property
    def flag(self) -> str | None:
        return "--" + self.key.replace("_", "-") if self._about.get("flag") else None

    @property
    def variable(self) -> str | None:
        if self.path == _SECRET:
            return SECRET_VARIABLE
        return "BATON_" + self.key.upper() if self.flag else None

    @property
    def types(self) -> tuple[Any, ...]:
        """The types of its values, None left out."""
        return tuple(_types_of(self.field.annotation))

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it may have, where they are few."""
        first = self.types[0]
        return get_args(first) if get_origin(first) is Literal else ()

    @property
    def unit(self) -> str:
        """The unit of a number, declared or at the end of its name, or the kind of another value."""
        if named := self._about.get("unit"):
            return str(named)
        if self.choices:
            return " | ".join(self.choices)
        if self.types[0] in (int, float):
            known = (unit for end, unit in _UNITS.items() if self.path.endswith(end))
            return next(known, re.split(r"[._]", self.path)[-1])
        kinds = {bool: "true | false", Path: "path", str: "text", tuple: "list", dict: "by role"}
        return kinds.get(get_origin(self.types[0]) or self.types[0], "")

    @property
    def default(self) -> str:
        """The default as the page shows it; empty where there is none, or it depends on the machine."""
        value = self.field.get_default(call_default_factory=True)
        if self.field.is_required():
            return "required"
        if value is None or value in ((), {}):
            return ""
        if isinstance(value, bool):
            return str(value).lower()
        return f"{value:.12g}" if isinstance(value, float) else str(value)


def without_links(sentence: str) -> str:
    """A sentence of the page without its links, and without the numbers of decisions, for a terminal."""
    return _LINK.sub(r"\1", _DECISION.sub("", sentence))


def settings_of(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[Setting]:
    """The settings below a model, in the order of their declaration; a section that has a flag before
    them, and after `engine_of_role` its keys that have one."""
    for name, field in model.model_fields.items():
        one = Setting(prefix + name, field)
        section = section_of(field)
        if section is None or one.flag:
            yield one
        if section is not None:
            yield from settings_of(section, f"{one.path}.")
        elif one.path == _OF_ROLE:
            yield from (Setting(f"{_OF_ROLE}.{key}", flag) for key, flag in ROLE_FLAGS.items())


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a section; None for a setting."""
    first = next(_types_of(field.annotation))
    return first if isinstance(first, type) and issubclass(first, BaseModel) else None


def _types_of(annotation: Any) -> Iterator[Any]:  # noqa: ANN401
    if get_origin(annotation) is Annotated:
        yield from _types_of(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, types.UnionType):
        for inner in get_args(annotation):
            if inner is not type(None):
                yield from _types_of(inner)
    else:
        yield annotation
