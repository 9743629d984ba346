"""API keys in Redis: added, listed, revoked; forged entries are no keys; what is known during an outage."""

from __future__ import annotations

import math
import uuid
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from baton.api_keys import ApiKey, key_hash
from baton.errors import BatonError, ErrorKind
from baton.state import State
from baton.state.key_view import KeyView
from baton.state.keys import Keys
from baton.state.redis_keys import KeyListing, RedisKeyStore
from tests.router.tenants.clock import Clock
from tests.state.opened import open_state
from tests.state.raw import raw

SECRET = "the secret of a cluster"


def api_key(key: str = "sk-1", **fields: object) -> ApiKey:
    return ApiKey.model_validate({"sha256": key_hash(key).hex(), "tenant": "acme", **fields})


@pytest.fixture(params=["redis", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


@pytest.fixture
async def state(url: str) -> AsyncIterator[State]:
    opened = await open_state(url, namespace=uuid.uuid4().hex)
    yield opened
    await opened.close()


@pytest.fixture
def store(state: State) -> RedisKeyStore:
    return state.api_keys(SECRET)


async def test_what_is_added_is_listed_until_it_is_revoked(store: RedisKeyStore) -> None:
    assert (await store.listing()).entries == ()
    one = api_key(
        id="ci", scopes=("models",), models=("llama",), expires="2999-01-01T00:00:00Z", tenant="acme"
    )
    two = api_key("sk-2")
    await store.add(one)
    await store.add(two)
    listing = await store.listing()
    assert set(listing.entries or ()) == {one, two}
    assert await store.listing(listing.version) == KeyListing(listing.version, None)
    await store.revoke("ci")
    left = await store.listing(listing.version)
    assert left.entries == (two,)
    assert left.version != listing.version
    await store.revoke(two.key_id)
    last = await store.listing(left.version)
    assert (last.entries, bool(last.version)) == ((), True)  # unlike a Redis that has lost its keys


async def test_an_id_is_unique_and_an_unknown_one_is_an_error(store: RedisKeyStore) -> None:
    await store.add(api_key(id="ci"))
    with pytest.raises(BatonError, match="there is a key ci already") as refused:
        await store.add(api_key("sk-2", id="ci"))
    assert refused.value.kind is ErrorKind.CONFLICT
    with pytest.raises(BatonError, match="no key other") as refused:
        await store.revoke("other")
    assert refused.value.kind is ErrorKind.NOT_FOUND


async def test_entries_without_the_clusters_signature_are_no_keys(store: RedisKeyStore, state: State) -> None:
    await store.add(api_key())
    stranger = state.api_keys("the secret of another one")
    await stranger.add(api_key("sk-2"))
    forged = (b"", b"\xff", b"00:{}", store._proof.sign("[]").encode() + b":[]")
    put = "for i = 1, #ARGV do redis.call('HSET', KEYS[1], 'x' .. i, ARGV[i]) end"
    await store._connection.script(put, store._keys, forged)
    with capture_logs() as logs:
        assert (await store.listing()).entries == (api_key(),)
    assert len([log for log in logs if log["event"] == "api_key_ignored"]) == 1 + len(forged)
    assert "sk-" not in str(logs)


async def test_no_key_is_in_redis(redis_url: str) -> None:
    namespace = uuid.uuid4().hex
    state = await open_state(redis_url, namespace=namespace)
    await state.api_keys(SECRET).add(api_key("sk-secret-word"))
    await state.close()
    async with raw(redis_url) as client:
        (stored,) = await client.hvals(Keys(namespace).api_keys[0])
    assert b"secret-word" not in stored


class Answers:
    """A store that gives these answers in turn."""

    def __init__(self, *answers: KeyListing | BatonError) -> None:
        self._answers = list(answers)

    async def listing(self, known_version: str = "") -> KeyListing:
        answer = self._answers.pop(0)
        if isinstance(answer, BatonError):
            raise answer
        return answer


async def test_during_an_outage_the_last_keys_stay_and_grow_old() -> None:
    clock, changes = Clock(), []
    away = BatonError(ErrorKind.UNAVAILABLE, "away")
    store = Answers(
        away,
        KeyListing("1", (api_key(), api_key("sk-2"))),
        KeyListing("1", None),
        away,
        away,
        KeyListing("", ()),  # a server that has started anew, empty
        KeyListing("2", (api_key("sk-2"),)),
    )
    view = KeyView(store, lambda added, gone: changes.append((len(added), len(gone))), clock)
    with capture_logs() as logs:
        await view.poll()
        assert (view.age_s, dict(view.keys)) == (math.inf, {})
        clock.now = 10
        await view.poll()
        clock.now = 11
        await view.poll()
        for clock.now in (20, 30, 40):
            await view.poll()
            assert (view.age_s, len(view.keys)) == (clock.now - 11, 2)
        await view.poll()
    assert (view.age_s, list(view.keys)) == (0, [key_hash("sk-2")])
    assert changes == [(2, 0), (0, 1)]
    assert [log["event"] for log in logs] == ["api_keys_not_read", "api_keys_read"] * 2
