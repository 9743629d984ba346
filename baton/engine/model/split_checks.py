"""Refuses models that cannot be divided among a number of devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.base.errors import BatonError, ErrorKind
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.layers.tensor_spec import TensorSpec
from baton.engine.model.tensors import HEAD, tensor_specs
from baton.engine.model.weight_places import Formats
from baton.model_spec.split import splits


def check_split(config: ModelConfig, formats: Formats, count: int) -> None:
    """Raises BatonError(INVALID) where a model whose matrices are in fewer bits as in `formats` cannot be
    divided among `count` devices; the message has the numbers that work."""
    if count == 1:
        return
    specs = tensor_specs(config, own_head=HEAD in formats)
    problem = _problem(config, formats, specs, count)
    if problem is not None:
        fewer = range(1, config.num_kv_heads + 1)
        work = [str(n) for n in fewer if n == 1 or _problem(config, formats, specs, n) is None]
        listed = " or ".join(filter(None, (", ".join(work[:-1]), work[-1])))
        raise BatonError(ErrorKind.INVALID, f"tensor_parallel {count}: {problem}; {listed} would work")


def _problem(config: ModelConfig, formats: Formats, specs: Sequence[TensorSpec], count: int) -> str | None:
    """Says why a model cannot be divided, in words; None where it can."""
    if config.experts is not None:
        return f"{config.experts.count} experts cannot be divided among devices yet"
    divided = {
        "KV head": config.num_kv_heads,
        "attention head": config.num_heads,
        "column of the MLP (intermediate_size)": config.intermediate_size,
    }
    for what, size in divided.items():
        if size % count:
            return f"{_counted(size, what)} not divide among {count} devices"
    return next(_divided_blocks(formats, specs, count), None)


def _counted(size: int, what: str) -> str:
    """Puts a count before what is counted, and the verb behind it: `8 KV heads do`, `1 KV head does`."""
    first, *rest = what.split(" of ")
    plural = first if size == 1 else f"{first}s"
    return f"{size} {' of '.join([plural, *rest])} {'does' if size == 1 else 'do'}"


def _divided_blocks(formats: Formats, specs: Sequence[TensorSpec], count: int) -> Iterator[str]:
    """The matrices in fewer bits of which not every device can have its part: some part begins within a block
    of a scale, as the one before it ends there."""
    for spec in specs:
        if spec.key not in formats:
            continue
        mine = formats[spec.key]
        if mine.codes != "fp8":
            yield f"{spec.name} is in {mine.name}, which cannot be divided among devices yet"
        for split in splits(count):
            part = spec.part(split)
            if any(run.start % mine.scale_rows for run in part.rows):
                yield f"{spec.name} would be cut within blocks of {mine.scale_rows} rows ({mine.name})"
            if part.columns and part.columns.start % (mine.scale_columns or 1):
                yield f"{spec.name} would be cut within blocks of {mine.scale_columns} columns ({mine.name})"
