"""Reads `quantization_config` of compressed-tensors: fp8 and int8 by tensor, channel or block, and int4 by
groups. Torch-free."""

from __future__ import annotations

import re

from baton.engine.kernels.weight_format import WeightFormat
from baton.engine.model.quantization.scheme import Rule, Scheme, StoredFormat
from baton.model_spec.model_files import ConfigFile

_SCALED = ("float-quantized", "int-quantized", "naive-quantized")


def read_compressed_tensors(section: ConfigFile) -> Scheme:
    """The scheme of a configuration with `config_groups`. Raises BatonError(INVALID) naming the key of what
    is not supported."""
    for key in ("sparsity_config", "transform_config"):
        other = section.section(key)
        if other is not None and other.values and other.get("format") != "dense":
            raise section.error(key, "is not supported")
    groups = section.section("config_groups")
    if groups is None or not groups.values:
        raise section.error("config_groups", "is missing")
    default = section.text("format", "")
    rules = []
    for name in groups.values:
        group = groups.section(name)
        if group is None:
            raise groups.error(name, "expected an object")
        stored = _stored(group, group.text("format", default))
        rules.append(Rule(_patterns(group, "targets"), stored))
    # Groups with names come before the one of all linear modules.
    rules.sort(key=lambda rule: "Linear" in rule.targets)
    return Scheme("compressed-tensors", tuple(rules), _patterns(section, "ignore"), "names")


def _stored(group: ConfigFile, form: str) -> StoredFormat:
    weights = group.section("weights")
    if weights is None:
        raise group.error("weights", "is missing: only weights that are quantised are supported")
    bits, kind = weights.positive("num_bits"), weights.text("type", "int")
    strategy = weights.text("strategy", "group" if weights.get("group_size") else "tensor")
    symmetric = weights.flag("symmetric", True)
    if form == "pack-quantized" and (kind, bits) == ("int", 4) and strategy in ("group", "channel"):
        columns = weights.positive("group_size") if strategy == "group" else 0
        return StoredFormat("packed", WeightFormat("int4", scale_columns=columns, zeros=not symmetric))
    if form in _SCALED and symmetric:
        if (kind, bits) == ("float", 8):
            if strategy in ("tensor", "channel"):
                return StoredFormat("scaled", WeightFormat("fp8"))
            if strategy == "block":
                rows, columns = read_block(weights, "block_structure")
                return StoredFormat("scaled", WeightFormat("fp8", rows, columns))
        if (kind, bits) == ("int", 8) and strategy in ("tensor", "channel"):
            return StoredFormat("scaled", WeightFormat("int8"))
    signs = "symmetric" if symmetric else "asymmetric"
    raise group.error("weights", f"{form} of {signs} {kind} {bits} bits by {strategy} is not supported")


def read_block(section: ConfigFile, key: str) -> tuple[int, int]:
    """Rows and columns of a block of scales."""
    value = section.get(key)
    if isinstance(value, list) and len(value) == 2 and all(isinstance(n, int) and n > 0 for n in value):
        return value[0], value[1]
    raise section.error(key, f"expected rows and columns of a block, got {value!r}")


def _patterns(section: ConfigFile, key: str) -> tuple[str, ...]:
    names = read_names(section, key)
    for name in names:
        if name.startswith("re:"):
            try:
                re.compile(name[3:])
            except re.error as error:
                raise section.error(key, f"{name!r} is not a regular expression: {error}") from None
    return names


def read_names(section: ConfigFile, key: str) -> tuple[str, ...]:
    """A list of names; none where it is missing."""
    value = section.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise section.error(key, f"expected a list of names, got {value!r}")
    return tuple(value)
