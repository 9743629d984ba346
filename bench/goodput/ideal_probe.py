"""The ideal of an arm at a run's arrivals, judged as the run is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton.perf_model.step_costs import StepCosts
from bench.goodput.arms import Arm
from bench.goodput.ideal_cluster import Workers, arrivals_of, simulate
from bench.goodput.runs import Limits
from loadgen.common.record import Record
from loadgen.goodput.probe import Probe


def ideal_probe(records: Sequence[Record], rate: float, limits: Limits, costs: StepCosts, arm: Arm) -> Probe:
    """The probe of a run's arrivals at an arm of Baton's workers."""
    arrivals = arrivals_of(records)
    workers = Workers(arm.prefill, arm.decode, arm.both, limits.tpot_ms / 1e3)
    found = simulate(arrivals, costs, workers)
    scheduled = np.array([arrival.at for arrival in arrivals])
    spent = [
        one.ttft_s + one.tpot_s * (arrival.output - 1) for one, arrival in zip(found, arrivals, strict=True)
    ]
    good = [one.ttft_s * 1e3 <= limits.ttft_ms and one.tpot_s * 1e3 <= limits.tpot_ms for one in found]
    return Probe.of(rate, limits.goal, scheduled, scheduled + np.array(spent), np.array(good, np.bool_))
