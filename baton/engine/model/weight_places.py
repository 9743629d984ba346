"""Memory for a model's weights, on one device or divided among several, and how matrices get there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from baton.engine.kernels.quantized_weight import QuantizedWeight, Weight, dense
from baton.engine.kernels.weight_format import WeightFormat
from baton.engine.model.config.model_config import ModelConfig
from baton.engine.model.layers.tensor_spec import TensorPart, TensorSpec
from baton.engine.model.quantization.quantize import quantize
from baton.engine.model.tensors import EMBEDDING, HEAD, tensor_specs
from baton.engine.model.weight_reader import Target
from baton.model_spec.split import splits

# Elements of a matrix that are quantised at once, which takes a few float32 for each.
_QUANTIZED_ELEMENTS = 1 << 27

Formats = Mapping[str, WeightFormat]
"""The matrices in fewer bits, as `weight_formats` lists them."""
UNQUANTIZED: Formats = MappingProxyType({})


def weight_places(
    config: ModelConfig, device: torch.device | str, dtype: torch.dtype, formats: Formats = UNQUANTIZED
) -> dict[str, Weight]:
    """Uninitialised memory for every tensor. Those of one pack lie one behind another, so that `packed`
    needs no copy: a model is in memory once, from the first byte on."""
    packs: dict[str, list[TensorSpec]] = {}
    specs = tensor_specs(config, own_head=HEAD in formats)
    for spec in specs:
        packs.setdefault(spec.key, []).append(spec)
    places: dict[str, Weight] = {}
    for key, parts in packs.items():
        rows = [part.shape[0] for part in parts]
        views: Sequence[Weight]
        if key in formats:
            views = QuantizedWeight.empty(formats[key], sum(rows), parts[0].shape[1], device).split(rows)
        else:
            shape = (sum(rows), *parts[0].shape[1:])
            whole = torch.empty(shape, device=device, dtype=dtype_of(parts[0], dtype))
            views = torch.split(whole, rows)
        places.update(zip((part.name for part in parts), views, strict=True))
    return {spec.name: places[spec.name] for spec in specs}


class RankPlaces:
    """The memory of every rank's tensors, `places`, one rank a device; one device has the whole model."""

    def __init__(
        self,
        config: ModelConfig,
        devices: Sequence[torch.device | str],
        dtype: torch.dtype,
        formats: Formats,
    ) -> None:
        self._configs = [config.of_rank(split) for split in splits(len(devices))]
        self.places = [
            weight_places(mine, device, dtype, formats)
            for mine, device in zip(self._configs, devices, strict=True)
        ]
        own_head = HEAD in formats
        self._specs = [
            {spec.name: spec for spec in tensor_specs(mine, own_head=own_head)} for mine in self._configs
        ]

    def parts(self, spec: TensorSpec) -> Iterator[tuple[Weight, TensorPart, TensorSpec]]:
        """The place of each rank that has a part of a tensor, what part that is, and its own spec."""
        for config, places, specs in zip(self._configs, self.places, self._specs, strict=True):
            if spec.name in places:
                yield places[spec.name], spec.part(config.split), specs[spec.name]

    def targets(self, spec: TensorSpec) -> list[Target]:
        """The places of a tensor that is stored as it is."""
        return [Target(place, part) for place, part, _ in self.parts(spec) if isinstance(place, Tensor)]

    def put(self, spec: TensorSpec, weight: Weight, *, as_stored: bool) -> None:
        """Copies each rank's part of a tensor to its place, quantised or dequantised as that is; `as_stored`:
        its rows are in the order of the checkpoint."""
        parts = list(self.parts(spec))
        if len(parts) > 1:
            # Divided in the form of its parts, so that all ranks together have what one device would.
            weight = _converted(parts[0][0], weight)
        for place, part, mine in parts:
            cut = _cut(weight, part) if len(parts) > 1 else weight
            put_weight(place, _in_order(cut, mine.order) if as_stored else cut)

    def put_rows_in_order(self, names: Collection[str]) -> None:
        """Brings the rows of tensors, which are as stored, into the order that the model has them in."""
        for places, specs in zip(self.places, self._specs, strict=True):
            for name, spec in specs.items():
                if spec.order is not None and name in names:
                    place = places[name]
                    assert isinstance(place, Tensor)
                    place.copy_(place[torch.tensor(spec.order, device=place.device)])

    def copy_tied_head(self) -> None:
        """Fills a tied head's own matrix, where there is one, from the embedding."""
        for config, places in zip(self._configs, self.places, strict=True):
            if config.tied_head and HEAD in places:
                embedding, rows = places[EMBEDDING], config.head_rows
                assert isinstance(embedding, Tensor)
                put_weight(places[HEAD], embedding[rows.start : rows.stop])


def _converted(place: Weight, weight: Weight) -> Weight:
    """A matrix in the format of a place for a part of it."""
    if isinstance(place, Tensor):
        return dense(weight, place.dtype)
    rows, columns = weight.shape
    whole = QuantizedWeight.empty(place.format, rows, columns, weight.device)
    put_weight(whole, weight)
    return whole


def _cut(weight: Weight, part: TensorPart) -> Weight:
    """A part of a tensor, in memory of its own."""
    if isinstance(weight, QuantizedWeight):
        return weight.part(part.rows, part.columns)
    rows = torch.cat([weight[run.start : run.stop] for run in part.rows])
    return rows if part.columns is None else rows[:, part.columns.start : part.columns.stop]


def _in_order(weight: Weight, order: Sequence[int] | None) -> Weight:
    """The matrix whose row i is row order[i] of this one."""
    if order is None:
        return weight
    index = torch.tensor(order, device=weight.device)
    return weight.reordered(index) if isinstance(weight, QuantizedWeight) else weight[index]


def put_weight(place: Weight, weight: Weight, elements_at_once: int = _QUANTIZED_ELEMENTS) -> None:
    """Copies a matrix to its place, quantised or dequantised as that is; `elements_at_once`: those that are
    quantised together, a row at least."""
    if isinstance(place, Tensor):
        place.copy_(dense(weight, place.dtype))
    elif isinstance(weight, Tensor):
        rows = max(1, elements_at_once // weight.shape[1]) * place.format.scale_rows
        parts = torch.split(weight, rows)
        for part, into in zip(parts, place.split([len(part) for part in parts]), strict=True):
            into.copy_(quantize(part, place.format))
    else:
        place.copy_(weight if weight.format == place.format else weight.with_row_scales())


def dtype_of(spec: TensorSpec, dtype: torch.dtype) -> torch.dtype:
    found: torch.dtype = dtype if spec.dtype is None else getattr(torch, spec.dtype)
    return found
