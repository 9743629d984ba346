"""Changes by operators at one process reach the others, once they have found the worker or the pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from services.router.lifecycle.dispatcher import Dispatcher
from services.router.processes.operator_state import OperatorState
from services.router.workers.worker import Worker, pool_id
from tests.router.workers.bare_workers import Found, bare_worker, pools_of


class Draining:
    """The part of a dispatcher that is used."""

    draining = leaving = False

    def set_draining(self, draining: bool) -> None:
        self.draining = draining


def process(
    workers: list[Worker], sent: list[Mapping[str, Any]] | None = None
) -> tuple[OperatorState, Any, Draining]:
    pools, dispatcher = pools_of(workers), Draining()
    state = OperatorState(Found(workers), cast(Dispatcher, dispatcher), pools)
    if sent is not None:
        state.relay_by(sent.append)
    return state, pools, dispatcher


def test_drains_and_the_pool_are_relayed_once() -> None:
    sent: list[Mapping[str, Any]] = []
    workers = [bare_worker("both-0"), bare_worker("both-1", checkpoint=b"new")]
    state, pools, dispatcher = process(workers, sent)
    state.review()
    assert sent == []  # the parent waits for the ready line
    state.begin()
    state.review()
    first = pool_id(workers[0].described)
    assert sent == [{"pool": first, "router_drained": False, "drained_workers": []}]
    workers[0].set_drained(True)
    pools.switch(pool_id(workers[1].described))
    state.review()
    dispatcher.set_draining(True)
    state.review()
    assert [one["router_drained"] for one in sent] == [False, False, True]
    assert sent[-1]["pool"] == pool_id(workers[1].described)
    assert sent[-1]["drained_workers"] == [bytes(16).hex()]
    dispatcher.leaving = True
    dispatcher.set_draining(False)
    state.review()
    assert len(sent) == 3  # a process that stops reports nothing


def test_what_is_not_found_yet_is_applied_later() -> None:
    worker = bare_worker("both-0")
    workers: list[Worker] = []
    state, pools, dispatcher = process(workers)
    state.receive(
        {
            "pool": pool_id(worker.described),
            "router_drained": True,
            "drained_workers": [worker.identity.incarnation.hex()],
        }
    )
    assert dispatcher.draining
    assert pools.current is None
    workers.append(worker)
    pools.review()
    state.review()
    assert pools.current == pool_id(worker.described)
    assert worker.drained_by_operator
    state.receive({"drained_workers": []})
    state.receive({"workers": ["elsewhere:1"]})  # of the parent's other messages it takes none
    assert not worker.drained_by_operator


def test_another_process_relays_once_the_first_one_has_ended() -> None:
    sent: list[Mapping[str, Any]] = []
    worker = bare_worker("both-0")
    state, pools, _ = process([worker])
    state.receive({"pool": pools.current, "router_drained": True, "drained_workers": []})
    state.begin()
    state.relay_by(sent.append)
    assert sent == [{"pool": pools.current, "router_drained": True, "drained_workers": []}]
    worker.set_drained(True)
    state.review()
    assert sent[-1]["drained_workers"] == [worker.identity.incarnation.hex()]
