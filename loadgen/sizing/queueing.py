"""Waits and occupancies of queues with Poisson arrivals, as closed formulas."""

from __future__ import annotations

import math
from statistics import NormalDist


def waits_share(servers: int, load: float) -> float:
    """Erlang's C: the share of arrivals that find all servers busy, at a load in servers' worth of work
    (M/M/c; close for other service times). 1 where the load exceeds the servers.
    """
    if load >= servers:
        return 1.0
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def wait_quantile(servers: int, rate: float, service_s: float, variation: float, share: float) -> float:
    """The wait in seconds that a share of the arrivals does not exceed, in a queue with several servers and
    general service times; infinite where they cannot keep up.

    Allen and Cunneen's approximation: those who wait do so with an exponential tail, whose mean is that of
    M/M/c times (1 + variation²) / 2. `variation` is the coefficient of variation of the service time.
    """
    load = rate * service_s
    if load >= servers:
        return math.inf
    waiting = waits_share(servers, load)
    if waiting <= 1 - share:
        return 0.0
    mean = (1 + variation**2) / 2 * service_s / (servers - load)
    return mean * math.log(waiting / (1 - share))


def occupancy_quantile(mean: float, share: float) -> float:
    """Number of requests served at once that is not exceeded for a share of the time, if each has a server at
    once: Poisson, approximated by a normal distribution."""
    return mean + NormalDist().inv_cdf(share) * math.sqrt(mean)
