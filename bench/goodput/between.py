"""Where attainment crosses its goal, of a few fixed rates: read off the line between those on both sides.

Attainment falls with the rate. Where one of a higher rate is above that of a lower one, by chance, both have
their mean, weighted by their requests (isotonic regression by pooling adjacent violators). `loadgen search`
chooses its rates near the crossing and fits a curve (`loadgen.goodput.crossing`); of rates far apart such a
curve says more of itself than of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from loadgen.goodput.probe import Probe, Verdict


class Between(NamedTuple):
    """The rate at the goal, the highest rate measured below it, and the lowest above it. Without one on a
    side, `rate` is the other and that side None."""

    rate: float
    low: float | None
    high: float | None


class _Pool(NamedTuple):
    """Neighbouring probes that have one attainment."""

    first: float
    last: float
    share: float
    weight: float


def cross(probes: Sequence[Probe], goal: float) -> Between:
    """The crossing of at least one probe. One whose backlog grows does not meet the goal, whatever share of
    its requests did."""
    pools: list[_Pool] = []
    for probe in sorted(probes, key=lambda probe: probe.offered):
        share = probe.attainment
        if probe.verdict is Verdict.UNSTABLE:
            share = min(share, goal - 1e-9)
        pools.append(_Pool(probe.offered, probe.offered, share, max(1, probe.requests)))
        while len(pools) > 1 and pools[-1].share > pools[-2].share:
            pools[-2:] = [_joined(*pools[-2:])]
    met = [pool for pool in pools if pool.share >= goal]
    missed = pools[len(met) :]
    if not met:
        return Between(missed[0].first, None, missed[0].first)
    if not missed:
        return Between(met[-1].last, met[-1].last, None)
    low, high = met[-1], missed[0]
    part = (low.share - goal) / (low.share - high.share)
    return Between(low.last + part * (high.first - low.last), low.last, high.first)


def _joined(low: _Pool, high: _Pool) -> _Pool:
    weight = low.weight + high.weight
    share = (low.share * low.weight + high.share * high.weight) / weight
    return _Pool(low.first, high.last, share, weight)
