"""The exchange's kernels on the host, threads in any order: what is published is right, and every wait ends.

Each rank has every launch late or never, and is stopped within any; sums are whole numbers, so that one part
read too early or too late makes a step wrong.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from baton.engine.parallel.exchange import ExchangeTimeoutError
from baton.engine.parallel.exchange_layout import ERROR_AT
from tests.engine.parallel.host.devices import NEVER, Edit, Hold
from tests.engine.parallel.host.steps import DEADLINE_NS, LAUNCHES_A_STEP, Steps
from tests.support.host_kernels import needs_compiler

pytestmark = needs_compiler

LATE = DEADLINE_NS * 3 // 2
FULL = pytest.mark.slow
RANKS = [2, 3, pytest.param(4, marks=FULL), pytest.param(8, marks=FULL)]


def tokens_of(step: int) -> list[int]:
    """Rows of a step: none, one or two."""
    return [step % 50, step % 7][: step % 3]


def steps_of(ranks: int, count: int, **options: object) -> Steps:
    """A worker with `count` steps enqueued."""
    steps = Steps(ranks, **options)  # type: ignore[arg-type]
    for step in range(count):
        steps.step(tokens_of(step)[: steps.rows])
    return steps


def assert_nothing_wrong(steps: Steps) -> None:
    """Steps are published up to some, and none behind it."""
    outcomes = steps.outcomes()
    published = outcomes.count(True)
    assert outcomes == [True] * published + [None] * (len(outcomes) - published)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("residency", "early"), [(1, False), (1, True), (3, True)])
def test_every_step_is_right_in_any_order_of_threads(ranks: int, residency: int, early: bool) -> None:
    for seed in range(12 // ranks):
        steps = steps_of(ranks, 12, seed=seed, residency=residency, early=early)
        assert steps.run() == 0
        assert steps.outcomes() == [True] * 12
        steps.exchange.check()


# Of a step: whether the first rank sends its rows, and whether it has sums.
DECODE, PREFILL, LOGITS = (True, True), (False, True), (False, False)


def steps_of_kinds(ranks: int, kinds: Sequence[tuple[bool, bool]], **options: object) -> Steps:
    """A worker with steps of these kinds enqueued."""
    steps = Steps(ranks, **options)  # type: ignore[arg-type]
    for step, (sent, sums) in enumerate(kinds):
        steps.step(tokens_of(1 + step), sent=sent, sums=sums)
    return steps


@pytest.mark.parametrize("ranks", RANKS)
def test_steps_of_all_kinds_are_counted_together(ranks: int) -> None:
    for seed in range(24 // ranks):
        kinds = random.Random(seed).choices([DECODE, PREFILL, LOGITS], k=10)
        steps = steps_of_kinds(ranks, kinds, seed=seed, residency=1 + seed % 3)
        assert steps.run() == 0
        assert steps.outcomes() == [True] * 10
        steps.exchange.check()


@pytest.mark.parametrize("ranks", RANKS[:2])
@pytest.mark.parametrize("ns", [LATE, NEVER], ids=["late", "never"])
def test_a_rank_that_is_late_at_any_launch_of_a_prompt(ranks: int, ns: int) -> None:
    """Neither it nor its logits are published, nor a decode step that follows."""
    kinds = [DECODE, PREFILL, LOGITS, DECODE]
    for rank in range(ranks):
        before = Steps(ranks).launches(rank)
        for launch in range(before + LAUNCHES_A_STEP):
            steps = steps_of_kinds(ranks, kinds, seed=launch)
            left = steps.run(Hold(rank, 0, before + launch, ns))
            assert (left == 0) == (ns == LATE)
            assert_nothing_wrong(steps)
            outcomes = steps.outcomes()
            assert outcomes[0]
            assert outcomes[3] is None
            assert outcomes[2] is None or launch > before
            timeout = steps.exchange.timeouts()[0]
            assert (timeout.peer, timeout.step) in {(rank, 2), (rank, 3), (rank, 4)}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=FULL) for seed in range(1, 6))])
def test_steps_with_jitter(seed: int) -> None:
    """Each rank stands still for up to 10 ms again and again, anywhere: in all, a hundred thousand steps."""
    draw, batches = random.Random(seed), 40 if seed else 1
    steps = Steps(2, sums=2, seed=seed << 32, residency=3 - seed % 3, early=seed != 3)
    steps.worker.jump_ns = 10_000_000  # less than a wait may take, many times
    held = 0
    for first in range(0, batches * 500, 500):
        for step in range(first, first + 500):
            steps.step(tokens_of(step))
        holds = [
            Hold(rank, 1, at, draw.randint(1_000, 10_000_000)) for rank in (0, 1) for at in moments(draw)
        ]
        assert steps.run(*holds) == 0
        assert steps.outcomes() == [True] * 500
        steps.exchange.check()
        steps.forget()
        held += len(holds)
    print(f"\nPROOF {batches * 500} steps, up to {held} halts, by seed {seed}: all right, none in vain")


def moments(draw: random.Random) -> Iterator[int]:
    """Yields the number of a rank's runs at each halt, up to beyond the last step of 500."""
    at = 0
    while at < 400_000:
        at += draw.randint(10, 400)
        yield at


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("ns", [LATE, NEVER], ids=["late", "never"])
def test_a_rank_that_is_late_at_any_launch_of_a_step(ranks: int, ns: int) -> None:
    """The step that misses it is not published, nor one behind it, and all other devices get to their end."""
    for rank in range(ranks):
        for launch in range(Steps(ranks).launches(rank)):
            steps = steps_of(ranks, 3, seed=launch)
            at = steps.launches(rank) + launch
            began = steps.worker.clock_ns
            left = steps.run(Hold(rank, 0, at, ns))
            assert left == (0 if ns == LATE else 3 * steps.launches(rank) - at)
            assert_nothing_wrong(steps)
            outcomes = steps.outcomes()
            assert outcomes[0]
            assert outcomes[2] is None
            timeout = steps.exchange.timeouts()[0]
            assert (timeout.peer, timeout.step) in {(rank, 2), (rank, 3)}
            ended = 1, steps.exchange.shape.last_node - 1
            assert ended <= (timeout.peer_step, timeout.peer_node) < (timeout.step, timeout.node)
            assert timeout.waited_s > DEADLINE_NS / 1e9
            # One deadline for all waits that follow, and what the clock jumps by.
            assert steps.worker.clock_ns - began < 2 * DEADLINE_NS
            alive = [one for one in range(ranks) if one != rank or ns == LATE]
            assert all(failed(steps, one) for one in alive)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    ranks=st.sampled_from([2, 3]),
    holds=st.lists(
        st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 4_000), st.sampled_from([10**6, LATE])),
        max_size=3,
    ),
)
def test_ranks_that_stop_anywhere(seed: int, ranks: int, holds: list[tuple[int, bool, int, int]]) -> None:
    steps = steps_of(ranks, 4, seed=seed)
    given_holds = [
        Hold(rank % ranks, within, at if within else at % (4 * steps.launches(rank % ranks)), ns)
        for rank, within, at, ns in holds
    ]
    assert steps.run(*given_holds) == 0
    assert_nothing_wrong(steps)
    if all(hold.ns < DEADLINE_NS // 3 for hold in given_holds):
        assert steps.outcomes() == [True] * 4


def test_one_rank_alone_is_told_too_late() -> None:
    """The last rank's flag reaches the first in time and the second too late: the first, which
    had no wait in vain, publishes nothing."""
    found = 0
    for seed in range(2):
        for at in range(1, 110, 3):
            steps = steps_of(3, 2, seed=seed, sums=1, rows=1)
            assert steps.run(Hold(2, 1, at, LATE)) == 0
            assert_nothing_wrong(steps)
            found += {one.rank for one in steps.exchange.timeouts()} == {1}
    assert found


@pytest.mark.parametrize("near", [2**31, 2**32, 2**32 * 6, 2**53])
def test_steps_and_epochs_pass_powers_of_two(near: int) -> None:
    steps = steps_of(2, 6, first_step=near // 6 - 3 if near == 2**32 else near - 3)
    assert steps.run() == 0
    assert steps.outcomes() == [True] * 6
    late = steps_of(2, 3, first_step=near - 2)
    assert late.run(Hold(1, 0, late.launches(1) + 2, LATE)) == 0
    assert late.outcomes() == [True, None, None]


def test_the_last_hundred_steps_before_a_power_of_two() -> None:
    steps = steps_of(2, 110, first_step=2**32 - 100, rows=1, sums=2)
    assert steps.run() == 0
    assert steps.outcomes() == [True] * 110


def test_devices_run_alone_and_are_equal_afterwards() -> None:
    steps = steps_of(2, 3)
    assert steps.run() == 0
    with steps.exchange.solo():
        # Each captures what it likes, and no other device is there.
        for rank, count in ((0, 5), (1, 2)):
            for _ in range(count):
                steps.step([1], ranks=[rank])
            assert steps.run() == 0
    steps.forget()
    for step in range(4):
        steps.step(tokens_of(step))
    assert steps.run() == 0
    assert steps.outcomes() == [True] * 4
    steps.exchange.check()


def test_a_device_that_runs_alone_waits_for_none_and_touches_none() -> None:
    steps = Steps(2)
    with steps.exchange.solo():
        began, before = steps.worker.clock_ns, arena(steps, 1).clone()
        steps.step([3], ranks=[0])
        assert steps.run() == 0
        assert steps.worker.clock_ns - began < DEADLINE_NS // 10
        assert arena(steps, 1).equal(before)
    assert steps.exchange.timeouts() == []


def failed(steps: Steps, rank: int) -> bool:
    """True if a rank's memory says that the exchange has failed."""
    return bool(arena(steps, rank)[ERROR_AT])


def arena(steps: Steps, rank: int) -> Tensor:
    """The memory of a rank that others write."""
    return steps.worker.devices[rank].memory[0]


def test_nothing_makes_a_failed_exchange_whole_again() -> None:
    steps = steps_of(2, 2)
    steps.run(Hold(1, 0, 3, LATE))
    with steps.exchange.solo():
        pass
    steps.exchange.set_steps(1000)
    steps.step([1])
    assert steps.run() == 0
    assert steps.outcomes() == [None] * 3
    waited = r"device 0 waited 2\.\d s for device 1 at node 1 of layer 0 in step 1"
    with pytest.raises(ExchangeTimeoutError, match=f"{waited}, which was last at node 0 in step 0"):
        steps.exchange.check()


ERROR = "release(error_at(ranks.arenas[rank]), 1);"
MEETS = "!node.solo && peer < RANKS && peer != ranks.rank"
EPOCH = "step * ranks.nodes + number;"
WAIT = "  wait_for_previous_kernel();\n"
NODE = "  const int peer = threadIdx.x;\n  const Node node(ranks, given.node, 0"
MUTANTS: dict[str, tuple[int, Edit]] = {
    "a wait without a deadline": (2, ("now - began > deadline_ns", "false")),
    "a wait that no error ends": (2, ("if (acquire(error_at(mine))) return false;", "")),
    "an end that reads no error": (2, ("!acquire(error_at(ranks.arenas[0]))", "1")),
    "an error that stays on its device": (3, (ERROR, f"if (rank == ranks.rank) {ERROR}")),
    "a sum that waits for no peer": (2, ("if (meets) await(ranks, node, peer, ranks.deadline_ns);", "")),
    "a flag before the work in front of it": (2, (f"{WAIT}{NODE}", NODE)),
    "an epoch of 32 bits": (2, (f"epoch = {EPOCH}", f"epoch = (u32){EPOCH}")),
    "logits told by the first block": (2, ("arrive(given.arrived) == gridDim.x - 1", "blockIdx.x == 0")),
    "rows that are told too early": (2, ("    __syncthreads();\n    if (peer > 0", "    if (peer > 0")),
    "a device alone that tells others": (2, (MEETS, MEETS.removeprefix("!node.solo && "))),
}


@pytest.mark.parametrize(
    "name", [name if n == 0 else pytest.param(name, marks=FULL) for n, name in enumerate(MUTANTS)]
)
def test_a_mutant_is_found(name: str) -> None:
    ranks, edit = MUTANTS[name]
    assert any(is_wrong(ranks, edit, seed) for seed in range(200))


def is_wrong(ranks: int, edit: Edit, seed: int) -> bool:
    """True if a worker with this edit publishes what it must not, or does not come to its end."""
    steps = steps_of(ranks, 3, first_step=2**32 // 6 - 2, seed=seed, residency=1 + seed % 3, edits=(edit,))
    rank, number = seed % ranks, seed // ranks
    launch = number * 7 % steps.launches(rank)
    hold = (
        Hold(rank, 0, launch, NEVER),
        Hold(rank, 1, 1 + number * 21, LATE),
        Hold(rank, 0, launch, 1_000_000),
    )[seed % 3]
    if steps.run(hold) != (3 * steps.launches(rank) - launch if hold.ns == NEVER else 0):
        return True
    try:
        assert_nothing_wrong(steps)
        if seed % 3 == 2:
            assert steps.outcomes() == [True] * 3
            with steps.exchange.solo():
                other = (seed + 1) % ranks
                before = arena(steps, other).clone()
                steps.step([3], ranks=[seed % ranks])
                if steps.run():
                    return True
                assert arena(steps, other).equal(before)
        elif steps.exchange.timeouts():
            alive = [one for one in range(ranks) if one != rank or hold.ns != NEVER]
            assert all(failed(steps, one) for one in alive)
            assert steps.worker.clock_ns < 10**9 + 2 * DEADLINE_NS
    except AssertionError:
        return True
    return False
