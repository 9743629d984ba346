"""Requests that wait until they are too late for their limits, and what those count that wait behind one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from baton.perf_model.step_costs import StepCosts
from services.router.placement import room
from services.router.placement.claim import Claim, PrefillClaim
from services.router.placement.placement import NoRoom, Placement
from services.router.queue.waiting_queue import WaitingQueue
from services.router.request.request import ClientCall
from services.router.request.slo import Slo
from tests.loadgen.virtual_time import run_virtual
from tests.router.placement.modelled_cluster import Cluster, Machine
from tests.router.workers.bare_workers import Found, pools_of, workers_of


@pytest.mark.parametrize("for_others", [True, False])
def test_a_late_one_waits_while_others_would_miss_their_limits(
    monkeypatch: pytest.MonkeyPatch, for_others: bool
) -> None:
    """Beside 35 sequences that just meet 6.4 ms, the first of which ends 0.45 s after it comes."""
    if not for_others:
        monkeypatch.setattr(room, "keeps_others_in_time", lambda worker, context_tokens, sequences: True)

    async def main() -> None:
        cluster = Cluster(
            [Machine("prefill"), Machine("decode")], lambda f, w: Placement(f, pools_of(w), 2048)
        )
        slo = Slo(0.3, 0.0064)
        others = [asyncio.create_task(cluster.serve(0, Slo(None, slo.tpot_s))) for _ in range(35)]
        await asyncio.sleep(1.0)
        late = await cluster.serve(0, slo)
        assert late.ttft_s is not None
        assert (late.ttft_s > 0.4) is for_others
        assert (late.ttft_s < 0.35) is not for_others
        await asyncio.gather(*others)

    run_virtual(main())


def test_a_late_one_waits_for_half_of_the_time_that_is_left() -> None:
    """Beside two sequences that go on for ever, and would miss 6 ms; its first token is due after 0.2 s."""

    async def main() -> None:
        workers = workers_of("prefill-0", "decode-0")
        prefill, decode = workers
        prefill.costs = StepCosts(prefill_token_s=2e-5)
        decode.costs = StepCosts(decode_step_s=0.005, decode_sequence_s=0.0005)
        decode.claimed_slots, decode.tpot_limits = 2, [0.006] * 2
        queue = WaitingQueue(Placement(Found(workers), pools_of(workers), 1000), 8, 60.0)
        begun = asyncio.get_running_loop().time()
        entry = queue.enter(ClientCall(), Slo(0.2, 0.006))
        claim = await queue.claim(entry, 50, 10, begun + 10, lambda worker: 0)
        late_s = 0.2 - 0.021
        waited_s = asyncio.get_running_loop().time() - begun
        assert waited_s == pytest.approx(late_s + (10 - late_s) / 2, abs=0.01)
        claim.release()

    run_virtual(main())


class Spying(Placement):
    """Records how many requests wait behind each that it places."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.behind: list[int] = []

    def pick(self, *arguments: Any, behind: Callable[[], int] = lambda: 0, **options: Any) -> Claim | NoRoom:
        self.behind.append(behind())
        return super().pick(*arguments, behind=behind, **options)


@pytest.mark.parametrize("lacking", ["prefill", "decode"])
async def test_those_that_wait_for_decode_do_not_count_as_waiting_for_prefill(lacking: str) -> None:
    """Otherwise a decode worker without room under a limit would compute prompts to relieve idle prefill
    workers, and have less room still."""
    workers = workers_of("prefill-0", "decode-0")
    prefill, decode = workers
    queued = PrefillClaim(prefill, 8000, 0.8) if lacking == "prefill" else None
    decode.claimed_slots = 0 if lacking == "prefill" else 8
    spying = Spying(Found(workers), pools_of(workers), 1000)
    queue = WaitingQueue(spying, 8, 60.0)
    until = asyncio.get_running_loop().time() + 60
    waiting = [
        asyncio.ensure_future(queue.claim(queue.enter(ClientCall()), 50, 10, until, lambda worker: 0))
        for _ in range(3)
    ]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    spying.behind.clear()
    decode.claimed_slots = 0
    if queued is not None:
        queued.release()
    queue.place_waiting()
    assert spying.behind == ([2, 1, 0] if lacking == "prefill" else [0, 0, 0])
    for claimed in waiting:
        (await claimed).release()
