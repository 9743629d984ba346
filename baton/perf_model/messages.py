"""A worker's step costs as the message of its heartbeats."""

from __future__ import annotations

import math

from baton.perf_model.curve import NO_CURVE, Curve
from baton.perf_model.step_costs import StepCosts
from baton.v1 import worker_pb2


def to_message(costs: StepCosts) -> worker_pb2.StepCosts:
    """The message of these costs, of which `tokens_a_step` and `prompt_curve` are no part."""
    half, curve = costs.prefill_half_context, costs.decode_curve
    known = len(curve.at) > 1
    return worker_pb2.StepCosts(
        prefill_token_s=costs.prefill_token_s,
        prefill_step_s=costs.prefill_step_s,
        prefill_half_context=half if math.isfinite(half) else 0,
        decode_step_s=costs.decode_step_s,
        decode_sequence_s=costs.decode_sequence_s,
        decode_context_token_s=costs.decode_context_token_s,
        decode_curve_sequences=map(round, curve.at) if known else (),
        decode_curve_s=curve.values if known else (),
    )


def from_message(message: worker_pb2.StepCosts) -> StepCosts:
    """The costs that a worker reports."""
    at, values = tuple(message.decode_curve_sequences), tuple(message.decode_curve_s)
    return StepCosts(
        prefill_token_s=message.prefill_token_s,
        prefill_step_s=message.prefill_step_s,
        prefill_half_context=message.prefill_half_context or math.inf,
        decode_step_s=message.decode_step_s,
        decode_sequence_s=message.decode_sequence_s,
        decode_context_token_s=message.decode_context_token_s,
        decode_curve=Curve(at, values) if at else NO_CURVE,
    )
