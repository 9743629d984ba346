"""Estimates where attainment crosses its goal, from all probes.

Near the crossing, the logit of attainment is modelled as linear in the logarithm of the rate. The posterior
of its two parameters, crossing and steepness, with flat priors in logarithm, is computed on a grid; a cliff
is just very steep. The median of the crossing is the goodput, the middle 95 % its interval. Probes far from
the crossing have less weight, since the model is linear only near it.

A probe counts at the rate of its actual arrivals, not at the nominal one: the arrivals of a Poisson process,
given their number, are distributed alike for any rate. Near capacity this removes most of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadgen.common.arrays import Floats
from loadgen.goodput.probe import Probe, Verdict

_STEEPNESS = np.exp(np.linspace(math.log(3.0), math.log(300.0), 20))
_RATES = 300
_BEYOND = 0.7  # how far from the outermost probes it may lie, in logarithms of the rate
_NEAR = 0.2  # distance from the crossing within which a probe has full weight
_FAR_WEIGHT = 0.02
_NEAR_WEIGHT = 0.3
# Draws are an estimate too; with this weight the intervals had their nominal coverage in simulations of
# queues whose truth is known.
_TRUST = 0.6
# What an unstable probe counts as: its own requests all hang together.
_UNSTABLE_DRAWS = 8.0

FORMULA = "the rate at which attainment crosses its goal: logit-linear in log rate of what came, all probes"


@dataclass(frozen=True, slots=True)
class Crossing:
    """The goodput in requests per second, and its 95 % interval."""

    rate: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """The ratio high / low."""
        return self.high / self.low


def find_crossing(probes: Sequence[Probe], goal: float) -> Crossing:
    """Estimates the crossing from at least one probe."""
    places = np.log([probe.offered for probe in probes])
    span = (float(places.min()) - _BEYOND, float(places.max()) + _BEYOND)
    even = np.ones(len(probes))
    coarse = np.linspace(*span, _RATES)
    middle, low, high = _quantiles(coarse, _weigh(coarse, probes, goal, even))
    # Closer, and with an eye for what is near.
    step = coarse[1] - coarse[0]
    fine = np.linspace(low - 4 * step - 0.1, high + 4 * step + 0.1, _RATES)
    near = np.maximum(_FAR_WEIGHT, np.exp(-0.5 * ((places - middle) / _NEAR) ** 2))
    middle, low, high = _quantiles(fine, _weigh(fine, probes, goal, near))
    return Crossing(math.exp(middle), math.exp(low), math.exp(high))


def _weigh(crossings: Floats, probes: Sequence[Probe], goal: float, weights: Floats) -> Floats:
    """The posterior of the crossing on the grid, with the steepness integrated out."""
    at_goal = math.log(goal / (1 - goal))
    logs = np.zeros((len(crossings), len(_STEEPNESS)))
    for probe, weight, draws in zip(probes, weights, _draws(probes, weights), strict=True):
        share = probe.attainment
        if probe.verdict is Verdict.UNSTABLE:
            share, draws = min(share, goal / 2), _UNSTABLE_DRAWS
        logit = at_goal - _STEEPNESS * (math.log(probe.offered) - crossings[:, None])
        hit, miss = -np.logaddexp(0, -logit), -np.logaddexp(0, logit)
        logs += _TRUST * weight * draws * (share * hit + (1 - share) * miss)
    likelihood = np.exp(logs - logs.max()).sum(axis=1)
    weights_of: Floats = likelihood / likelihood.sum()
    return weights_of


def _draws(probes: Sequence[Probe], weights: Floats) -> list[float]:
    """The number of independent draws of each probe. One without a miss, or that is too short, cannot
    estimate its correlation time and uses that of probes near the crossing.
    """
    near = [
        probe.requests / probe.draws / probe.offered
        for probe, weight in zip(probes, weights, strict=True)
        if weight > _NEAR_WEIGHT and 0 < probe.attainment < 1 and probe.verdict is not Verdict.UNSTABLE
    ]
    common = float(np.median(near)) if near else 0.0
    return [min(probe.draws, probe.requests / max(1.0, common * probe.offered)) for probe in probes]


def _quantiles(places: Floats, weights: Floats) -> tuple[float, float, float]:
    """Median and ends of the middle 95 %, interpolated on the grid."""
    sums = np.cumsum(weights) - weights / 2
    middle, low, high = np.interp([0.5, 0.025, 0.975], sums, places)
    return float(middle), float(low), float(high)
