"""A worker's step costs as the message of its heartbeats."""

from __future__ import annotations

from typing import Any

from baton.perf_model.curve import Curve
from baton.perf_model.step_costs import StepCosts
from baton.v1 import worker_pb2

_FIELDS = worker_pb2.StepCosts.DESCRIPTOR.fields_by_name
_NUMBERS = [name for name in _FIELDS if not name.startswith("decode_curve")]


def to_message(costs: StepCosts) -> worker_pb2.StepCosts:
    """The message of these costs, of which `prompt_curve` is no part."""
    numbers: dict[str, Any] = {name: getattr(costs, name) for name in _NUMBERS}
    at, values = costs.decode_curve if len(costs.decode_curve.at) > 1 else ((), ())
    return worker_pb2.StepCosts(**numbers, decode_curve_sequences=map(round, at), decode_curve_s=values)


def from_message(message: worker_pb2.StepCosts) -> StepCosts:
    """The costs that a worker reports; what it leaves at 0 is not known."""
    numbers: dict[str, Any] = {name: value for name in _NUMBERS if (value := getattr(message, name))}
    if message.decode_curve_s:
        at, values = tuple(message.decode_curve_sequences), tuple(message.decode_curve_s)
        numbers["decode_curve"] = Curve(at, values)
    return StepCosts(**numbers)
