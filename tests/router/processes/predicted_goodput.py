"""Predicts in virtual time what arrangements of several workers attain, to compare a measurement with.

    python -m tests.router.processes.predicted_goodput --arms 2p2d,2p2both,4both --workload 1k-256 --tpot 12
        --rates 18,20,22 [--goal 0.9] [--seconds 20] [--draws 2] [--ttft 500] [--unstated]
        [--slower 1]

The real queue and placement of two router processes, before workers that take as long as an H200 with an 8B
model in bf16. A rate is in requests a second and worker; `both` exchange prompts where all workers are. One
line for each arm and rate: the share of requests within the limits, whose requests state them, or with
--unstated do not. Workers take --slower times as long, and report it. Before the first arrival 24 requests
warm up what the router learns.

With --goal --rates has two, between which attainment crosses this share: the crossing is found within 3 % by
bisection and printed with what is attained at 0.9, 1.0 and 1.1 times of it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
from collections.abc import Callable

from baton.perf_model.step_costs import StepCosts
from services.router.request.slo import Slo
from tests.loadgen.virtual_time import run_virtual
from tests.router.placement.modelled_cluster import Machine, Served, Traffic
from tests.router.processes.modelled_processes import TwoProcesses

_WARM_UP, _WARM_UP_S = 24, 4.0
# In service (bench/LOG.md, 28 November): prompts of 1,024 tokens 25.1 ms, steps of 5.8 ms with 32 sequences,
# 7.3 with 68 and 8.4 with 96 of about 1,150 tokens.
_SHORT = StepCosts(
    prefill_token_s=24.1e-6,
    prefill_step_s=5e-3,
    prefill_half_context=26_600,
    decode_step_s=4.5e-3,
    decode_sequence_s=1e-5,
    decode_context_token_s=2.7e-8,
)
# Prompts of 4,096 tokens 93 ms; steps of 4.75 ms + 8 us a sequence + 20.5 ns a token of context.
_LONG = StepCosts(
    prefill_token_s=21.1e-6,
    prefill_step_s=5e-3,
    prefill_half_context=26_600,
    decode_step_s=4.75e-3,
    decode_sequence_s=8e-6,
    decode_context_token_s=2.05e-8,
)
_WORKLOADS = {"1k-256": (1024, 256, _SHORT), "4k-256": (4096, 256, _LONG)}
# The crossing is found once its bounds are as near as this ratio; rates beside it are these parts of it.
_NEAR, _PARTS = 1.03, (0.9, 1.0, 1.1)
_ROLES = {"p": "prefill", "d": "decode", "both": "both"}


def roles_of(arm: str) -> tuple[str, ...]:
    """`2p2both` → two prefill workers and two combined ones."""
    parts = re.findall(r"(\d+)(both|p|d)", arm)
    return tuple(_ROLES[role] for count, role in parts for _ in range(int(count)))


def attained(
    arm: str,
    rate: float,
    workload: str,
    judged: Slo,
    stated: bool,
    seconds: float,
    seed: int,
    slower: float = 1.0,
) -> float:
    """The share of requests within the limits, of Poisson arrivals at `rate` a worker that takes `slower`
    times as long as the workload's costs say."""
    prompt, output, costs = _WORKLOADS[workload]
    roles = roles_of(arm)
    slo = judged if stated else None

    async def main() -> list[Served]:
        machines = [
            Machine(role, slower, costs=costs, exchanges=role == "both", by_slack=True) for role in roles
        ]
        cluster = TwoProcesses(machines, 1.0)
        loop, draw = asyncio.get_running_loop(), random.Random(seed)

        def request() -> asyncio.Task[Served]:
            return asyncio.create_task(cluster.serve(draw.randrange(2), slo, prompt, output))

        warm = [request() for _ in range(_WARM_UP)]
        await asyncio.gather(*warm)
        await asyncio.sleep(_WARM_UP_S)
        requests, began = [], loop.time()
        for at in Traffic(rate * len(roles), seconds, (judged,)).arrivals(draw):
            await asyncio.sleep(began + at - loop.time())
            requests.append(request())
        return [await one for one in requests]

    served = run_virtual(main())
    return sum(one.meets(judged) for one in served) / len(served)


def crossing(share: Callable[[float], float], low: float, high: float, goal: float) -> float:
    """Returns the rate at which `share`, which falls with it, is `goal`, interpolated between two rates that
    differ by at most 3 %. Raises ValueError where it does not cross the goal between `low` and `high`."""
    lower, upper = share(low), share(high)
    if not lower >= goal > upper:
        raise ValueError(f"{lower:.3f} at {low:g} and {upper:.3f} at {high:g} do not enclose {goal:g}")
    while high / low > _NEAR:
        middle = (low + high) / 2
        found = share(middle)
        if found >= goal:
            low, lower = middle, found
        else:
            high, upper = middle, found
    return low + (high - low) * (lower - goal) / (lower - upper)


def main() -> None:
    arguments = _parser().parse_args()
    judged = Slo(ttft_s=arguments.ttft / 1000, tpot_s=arguments.tpot / 1000)
    rates = [float(rate) for rate in arguments.rates.split(",")]
    for arm in arguments.arms.split(","):

        def shares(rate: float, arm: str = arm) -> list[float]:
            stated, seconds = not arguments.unstated, arguments.seconds
            return [
                attained(arm, rate, arguments.workload, judged, stated, seconds, seed, arguments.slower)
                for seed in range(11, 11 + arguments.draws)
            ]

        words = f"{arm} {arguments.workload} tpot {arguments.tpot:g}"
        if arguments.goal is not None:
            low, high = rates

            def mean(rate: float) -> float:
                found = shares(rate)
                return sum(found) / len(found)

            crossed = crossing(mean, low, high, arguments.goal)
            print(f"{words} crosses {arguments.goal:g} at rate {crossed:.2f}", flush=True)
        for rate in rates if arguments.goal is None else [round(part * crossed, 2) for part in _PARTS]:
            found = " ".join(f"{100 * share:.1f}" for share in shares(rate))
            print(f"{words} rate {rate:g}: {found} %", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", required=True)
    parser.add_argument("--workload", choices=sorted(_WORKLOADS), default="1k-256")
    parser.add_argument("--rates", required=True)
    parser.add_argument("--goal", type=float, help="share at the crossing between two rates")
    parser.add_argument("--tpot", type=float, required=True, help="ms")
    parser.add_argument("--ttft", type=float, default=500, help="ms")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--unstated", action="store_true")
    parser.add_argument("--slower", type=float, default=1, help="times that workers take")
    return parser


if __name__ == "__main__":
    main()
