"""The ideal of an arm at a run's arrivals, judged as the run is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bench.goodput.arms import Arm
from bench.goodput.ideal import arrivals_of, simulate
from bench.goodput.runs import Limits
from bench.goodput.shared_ideal import simulate_shared
from loadgen.common.record import Record
from loadgen.goodput.probe import Probe
from loadgen.sizing.rates import Rates


def ideal_probe(records: Sequence[Record], rate: float, limits: Limits, rates: Rates, arm: Arm) -> Probe:
    """The probe of a run's arrivals at an arm of Baton's workers."""
    arrivals = arrivals_of(records)
    if arm.both:
        found = simulate_shared(arrivals, rates, arm.prefill, arm.both, limits.tpot_ms / 1e3)
    else:
        found = simulate(arrivals, rates, arm.prefill, arm.decode)
    scheduled = np.array([arrival.at for arrival in arrivals])
    spent = [
        one.ttft_s + one.tpot_s * (arrival.output - 1) for one, arrival in zip(found, arrivals, strict=True)
    ]
    good = [one.ttft_s * 1e3 <= limits.ttft_ms and one.tpot_s * 1e3 <= limits.tpot_ms for one in found]
    return Probe.of(rate, limits.goal, scheduled, scheduled + np.array(spent), np.array(good, np.bool_))
