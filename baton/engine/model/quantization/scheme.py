"""The quantised matrices of a checkpoint by its configuration: which of them are quantised, and how they are
stored. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Literal

from baton.engine.kernels.weight_format import WeightFormat

Container = Literal["scaled", "scaled-inverse", "scaled-either", "packed", "gptq", "awq"]
"""The tensors that a matrix is stored as; `stored_parts` lists them for each. "scaled-either": its scales
have one of two names."""


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """The format in which a checkpoint stores a matrix. `zeros_less_one`: GPTQ's first version stores zeros
    less 1."""

    container: Container
    format: WeightFormat
    zeros_less_one: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """The modules that are stored in a format: `targets` are patterns as `Scheme.matching` reads them."""

    targets: tuple[str, ...]
    stored: StoredFormat


@dataclass(frozen=True, slots=True)
class Scheme:
    """The first rule that matches a module is its own; modules that `ignored` matches are not quantised.

    `matching`: how patterns are read. "names": a whole name, or `re:` and a regular expression, or the class
    Linear. "parts": a part of the name between dots. "wildcards": `*` and `?`.
    """

    method: str
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...]
    matching: Literal["names", "parts", "wildcards"]

    def stored(self, module: str) -> StoredFormat | None:
        """Stored format of the matrix of a projection, such as that of `model.layers.0.mlp.up_proj`; None: it
        is not quantised."""
        return _stored(self, module)


# Each module of a model is asked for several times, and a mixture has some 20,000 of them.
@lru_cache(1 << 16)
def _stored(scheme: Scheme, module: str) -> StoredFormat | None:
    matches = _MATCHING[scheme.matching]
    if any(matches(module, pattern) for pattern in scheme.ignored):
        return None
    for rule in scheme.rules:
        if any(pattern == "Linear" or matches(module, pattern) for pattern in rule.targets):
            return rule.stored
    return None


def _by_name(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module == pattern


def _by_parts(module: str, pattern: str) -> bool:
    return f".{pattern}." in f".{module}."


_MATCHING: dict[str, Callable[[str, str], bool]] = {
    "names": _by_name,
    "parts": _by_parts,
    "wildcards": fnmatchcase,
}


@dataclass(frozen=True, slots=True)
class StoredPart:
    """One tensor of a stored matrix: `suffix` replaces `weight` in its name. `dtypes` as safetensors spells
    them; `shapes`: those that it may have. An `optional` one may be missing; one that is not `read` is
    checked and left alone. `substitute`: the suffix of an optional one that may be stored in its place."""

    suffix: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    optional: bool = False
    read: bool = True
    substitute: str | None = None


_FLOATS = ("F32", "BF16", "F16")
_CODE_DTYPES = {"fp8": "F8_E4M3", "int8": "I8"}


def stored_parts(stored: StoredFormat, rows: int, columns: int) -> list[StoredPart]:
    """The tensors that a checkpoint stores for W [rows, columns], eight codes of 4 bits an int32."""
    weight_format = stored.format
    count, groups = weight_format.scale_shape(rows, columns)
    eighth = -(-columns // 8)
    if stored.container == "packed":
        group_scales = (rows, groups)
        parts = [
            StoredPart("weight_packed", ("I32",), ((rows, eighth),)),
            StoredPart("weight_scale", _FLOATS, (group_scales,)),
            StoredPart("weight_shape", ("I64", "I32"), ((2,),), optional=True, read=False),
            StoredPart("weight_g_idx", ("I32", "I64"), ((columns,),), optional=True),
        ]
        if weight_format.zeros:
            parts.append(StoredPart("weight_zero_point", ("I32",), ((-(-rows // 8), groups),)))
        return parts
    if stored.container in ("gptq", "awq"):
        shape = (eighth, rows) if stored.container == "gptq" else (columns, -(-rows // 8))
        parts = [
            StoredPart("qweight", ("I32",), (shape,)),
            StoredPart("qzeros", ("I32",), ((groups, -(-rows // 8)),)),
            StoredPart("scales", _FLOATS, ((groups, rows),)),
        ]
        if stored.container == "gptq":
            parts.append(StoredPart("g_idx", ("I32", "I64"), ((columns,),), optional=True))
        return parts
    shapes: tuple[tuple[int, ...], ...] = ((count, groups),)
    if not weight_format.scale_columns:
        shapes = ((rows, 1), (rows,), (), (1,), (1, 1))  # of each row, or of the whole matrix
    inputs = ("input_scale", "activation_scale", "input_scale_ub", "input_zero_point")
    ignored = (
        StoredPart(name, (*_FLOATS, "I8", "I32"), ((), (1,)), optional=True, read=False) for name in inputs
    )
    return [
        StoredPart("weight", (_CODE_DTYPES[weight_format.codes],), ((rows, columns),)),
        *_scale_parts(stored.container, shapes),
        *ignored,
    ]


def _scale_parts(container: Container, shapes: tuple[tuple[int, ...], ...]) -> list[StoredPart]:
    """Scales of a matrix with codes of 8 bits. By either name they are what codes are multiplied by."""
    plain, inverse = "weight_scale", "weight_scale_inv"
    if container == "scaled-either":
        either = StoredPart(plain, _FLOATS, shapes, substitute=inverse)
        return [either, StoredPart(inverse, _FLOATS, shapes, optional=True)]
    return [StoredPart(plain if container == "scaled" else inverse, _FLOATS, shapes)]
