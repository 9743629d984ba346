"""The current pool, the workers that belong to it, and reasons for which a switch is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import structlog.testing

from baton.base.errors import BatonError, ErrorKind
from baton.v1.admin_pb2 import PoolStatus
from baton.v1.worker_pb2 import DescribeResponse, Pool
from services.router.placement.pools import Pools, bind
from services.router.request.request import ClientCall
from services.router.workers.other_claims import SiblingCounts
from services.router.workers.worker import Worker, pool_id
from tests.router.workers.bare_workers import bare_worker, pools_of


def pair(checkpoint: bytes, number: int = 0, context: int = 512, vocab_size: int = 300) -> list[Worker]:
    return [
        bare_worker(f"{role}-{number}", checkpoint=checkpoint, context=context, vocab_size=vocab_size)
        for role in ("prefill", "decode")
    ]


def serving(workers: list[Worker]) -> list[str]:
    return [worker.name for worker in workers if worker.serves]


def became_current(pool: str, before: str | None) -> dict[str, object]:
    """The log line of a selected pool."""
    return {"event": "pool_selected", "part": "pools", "log_level": "info", "pool": pool, "before": before}


def test_the_id_of_a_pool_is_the_same_in_every_router() -> None:
    """An operator may write it into the configuration of the next one."""
    pool = Pool(model="m", checkpoint=b"c", tokenizer=b"t", kv_format="k", numerics="exact")
    assert pool_id(DescribeResponse(pool=pool)) == "768899a93364"


def test_parts_of_a_pool_are_not_confused() -> None:
    """Though they are the same bytes in a row."""
    one, other = Pool(checkpoint=b"ab", tokenizer=b"c"), Pool(checkpoint=b"a", tokenizer=b"bc")
    assert pool_id(DescribeResponse(pool=one)) != pool_id(DescribeResponse(pool=other))


def test_the_first_pool_that_is_ready_becomes_current_and_stays() -> None:
    workers = [bare_worker("decode-9", checkpoint=b"alone")]
    with structlog.testing.capture_logs() as logs:
        pools = pools_of(workers)
        assert (pools.current, logs) == (None, [])
        assert serving(workers) == ["decode-9"]
        assert not pools.admits(workers[0])
        old, new = pair(b"c"), pair(b"new", 1)
        workers += [*old, *new]
        pools.review()
        assert pools.current == old[0].pool
        assert serving(workers) == ["prefill-0", "decode-0"]
        del workers[:3]
        pools.review()
        assert (pools.current, serving(workers)) == (old[0].pool, [])
        workers.extend(old)
        pools.review()
        assert serving(workers) == ["prefill-0", "decode-0"]
        assert [pools.admits(worker) for worker in workers] == [False, False, True, True]
    assert logs == [became_current(old[0].pool, before=None)]


def test_a_configured_pool_is_current_from_the_start() -> None:
    old, new = pair(b"c"), pair(b"new", 1)
    pools = pools_of([*old, *new], configured=new[0].pool)
    assert (pools.current, serving([*old, *new])) == (new[0].pool, ["prefill-1", "decode-1"])


def test_there_are_several_pools_from_the_second_on() -> None:
    workers = pair(b"c")
    pools = pools_of(workers)
    assert not pools.several
    workers += pair(b"new", 1)
    pools.review()
    assert pools.several
    del workers[2:]
    pools.review()
    assert pools.several  # requests may be bound to what is gone
    assert not pools_of([bare_worker("decode-0")]).several
    assert pools_of(pair(b"c"), configured="another").several


def test_the_vocabulary_is_the_smallest_in_the_current_pool() -> None:
    workers = [*pair(b"c", 0, 512, 301), *pair(b"c", 1, 256, 300), *pair(b"new", 2, 128, 200)]
    assert pools_of(workers).vocab_size == 300
    assert pools_of([]).vocab_size is None


def test_a_worker_that_is_not_ready_yet_is_a_member() -> None:
    """A request may come to wait for it."""
    prefill, decode = pair(b"c", context=256)
    decode.following = False
    pools = pools_of([prefill, decode], configured=prefill.pool)
    assert pools.members() == [prefill, decode]


def test_a_review_after_no_change_of_any_worker_keeps_all_marks() -> None:
    """A review comes with every heartbeat: only changes of who is there and alive count."""
    workers = pair(b"c")
    pools = pools_of(workers)
    assert pools.review()  # repeated, since a pool became current
    workers[0].serves = False
    assert not pools.review()
    assert serving(workers) == ["decode-0"]
    workers[1].following = False
    assert pools.review()
    assert serving(workers) == ["prefill-0", "decode-0"]


def test_a_role_keeps_its_weight_format_while_a_worker_with_it_is_alive() -> None:
    first = bare_worker("decode-0", weight_format="fp8")
    second = bare_worker("decode-1", weight_format="bfloat16")
    third = bare_worker("decode-2", weight_format="fp8")
    prefill = bare_worker("prefill-0", weight_format="bfloat16")
    workers = [first, second, third, prefill]
    pools = pools_of(workers)
    assert serving(workers) == ["decode-0", "decode-2", "prefill-0"]

    def after(change: Callable[[], None]) -> list[str]:
        change()
        pools.review()
        return serving(workers)

    assert after(lambda: first.set_following(following=False)) == ["decode-0", "decode-2", "prefill-0"]
    assert after(lambda: third.set_following(following=False)) == ["decode-1", "prefill-0"]
    assert after(lambda: first.set_following(following=True)) == ["decode-1", "prefill-0"]
    assert after(lambda: second.set_following(following=False)) == ["decode-0", "decode-2", "prefill-0"]
    # With none of a role alive its format is kept.
    assert after(lambda: first.set_following(following=False)) == ["decode-0", "decode-2", "prefill-0"]


def test_each_role_has_a_weight_format_of_its_own() -> None:
    workers = [
        bare_worker(f"{role}-{number}", weight_format=weight_format)
        for role, formats in (("prefill", ("fp8", "bfloat16")), ("decode", ("bfloat16", "fp8")))
        for number, weight_format in enumerate(formats)
    ]
    pools_of(workers)
    assert serving(workers) == ["prefill-0", "decode-0"]


def test_a_request_keeps_the_weight_formats_that_it_has_met() -> None:
    prefill = bare_worker("prefill-0")
    old, new = bare_worker("decode-0", weight_format="fp8"), bare_worker("decode-1")
    workers = [prefill, old, new]
    pools = pools_of(workers)
    prefilled, decoded, unbound = ClientCall(), ClientCall(), ClientCall()
    bind(prefilled, prefill)
    bind(decoded, prefill, old)
    assert (prefilled.pool, prefilled.formats.get(prefill.decodes), prefilled.formats.get(old.decodes)) == (
        prefill.pool, "bfloat16", None,
    )  # fmt: skip
    assert (unbound.pool, unbound.formats.get(prefill.decodes)) == (None, None)

    def admitted(call: ClientCall | None) -> list[str]:
        return [worker.name for worker in workers if pools.admits(worker, call)]

    for call in (None, unbound, prefilled, decoded):
        assert admitted(call) == ["prefill-0", "decode-0"]
    old.set_following(following=False)
    pools.review()
    for call in (None, unbound, prefilled):
        assert admitted(call) == ["prefill-0", "decode-1"]
    assert admitted(decoded) == ["prefill-0", "decode-0"]
    other = pair(b"new", 9)
    workers += other
    pools.switch(other[0].pool)
    for call in (None, unbound):
        assert admitted(call) == ["prefill-9", "decode-9"]
    assert admitted(prefilled) == ["prefill-0", "decode-0", "decode-1"]  # of a pool that is not current
    assert admitted(decoded) == ["prefill-0", "decode-0"]


def test_a_pool_is_ready_where_a_live_decode_worker_has_a_prefill_worker() -> None:
    decode, other = bare_worker("decode-0"), bare_worker("prefill-0", fingerprint=b"other")
    prefill, foreign = bare_worker("prefill-1"), bare_worker("prefill-2", checkpoint=b"new")
    workers = [decode, other, foreign]
    pools = pools_of(workers)
    assert not pools.ready(decode.pool)
    assert not pools.ready(foreign.pool)
    workers.append(prefill)
    assert pools.ready(decode.pool)
    assert not pools.ready(foreign.pool)
    decode.following = False
    assert not pools.ready(decode.pool)
    strange = pair(b"c")
    for worker in strange:
        worker.described.pool.model = "another name"
    assert not pools_of(strange).ready(strange[0].pool)


def test_a_switch_is_refused_with_the_whole_reason() -> None:
    workers = pair(b"c")
    strange = bare_worker("decode-9", tokenizer=b"another")
    alone = bare_worker("decode-8", checkpoint=b"new")
    pools = pools_of([*workers, strange, alone])
    for pool, kind, message in (
        ("none", ErrorKind.NOT_FOUND, "no worker belongs to a pool 'none'"),
        (
            strange.pool,
            ErrorKind.CONFLICT,
            f"pool {strange.pool} has another served name or tokenizer than this router",
        ),
        (alone.pool, ErrorKind.CONFLICT, f"pool {alone.pool} has no pair of workers that is ready"),
    ):
        with pytest.raises(BatonError) as caught:
            pools.switch(pool)
        assert (caught.value.kind, caught.value.message) == (kind, message)
        assert pools.current == workers[0].pool


def test_a_switch_takes_effect_at_once_and_one_to_the_current_pool_changes_nothing() -> None:
    old, new = pair(b"c"), pair(b"new", 1)
    for worker in old:
        worker.weight_format = "fp8"
    workers = [*old, *new]
    pools = pools_of(workers)
    pools.review()
    with structlog.testing.capture_logs() as logs:
        pools.switch(old[0].pool)
        assert logs == []
        pools.switch(new[0].pool)
    assert (pools.current, serving(workers)) == (new[0].pool, ["prefill-1", "decode-1"])
    assert logs == [became_current(new[0].pool, before=old[0].pool)]


def status_of(pools: Pools) -> list[tuple[bytes, bool, bool, bool, int, int]]:
    return [
        (one.pool.checkpoint, one.current, one.compatible, one.ready, one.workers, one.running)
        for one in pools.status()
    ]


def test_the_status_has_every_pool_the_current_one_first() -> None:
    strange = bare_worker("both-9", tokenizer=b"another", checkpoint=b"strange")
    old, new = pair(b"c"), pair(b"new", 1)
    old[1].claimed_slots, new[1].claimed_slots = 3, 2
    more = bare_worker("decode-8", checkpoint=b"new")
    more.claimed_slots = 4
    more.others.set_siblings(SiblingCounts(processes=1, slots=5))
    pools = pools_of([strange, *old, *new, more])
    assert status_of(pools) == [
        (b"c", True, True, True, 2, 3),
        (b"strange", False, False, False, 1, 0),
        (b"new", False, True, True, 3, 11),
    ]
    assert [one.id for one in pools.status()] == [old[0].pool, strange.pool, new[0].pool]
    assert pools.status()[1].pool == strange.described.pool
    assert pools_of([], configured="gone").status() == [PoolStatus(id="gone", current=True)]
    alone = bare_worker("decode-8")
    assert [(one.id, one.current) for one in pools_of([alone]).status()] == [(alone.pool, False)]
