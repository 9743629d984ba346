"""API keys in Redis: added, listed, revoked; forged entries are no keys; what is known during an outage."""

from __future__ import annotations

import contextlib
import hmac
import itertools
import math
import uuid
from collections.abc import AsyncIterator, Mapping

import pytest
from structlog.testing import capture_logs

from baton.base.api_keys import ApiKey, key_hash
from baton.base.cluster_auth import KeyProof
from baton.base.errors import BatonError, ErrorKind
from baton.state import State
from baton.state.key_view import KeyView
from baton.state.stores.key_names import Keys
from baton.state.stores.redis_api_keys import KeyListing, RedisKeyStore
from tests.router.tenants.clock import Clock
from tests.state.opened import open_state
from tests.state.raw import Raw, raw

SECRET = "the secret of a cluster"


def api_key(key: str = "sk-1", **fields: object) -> ApiKey:
    return ApiKey.model_validate({"sha256": key_hash(key).hex(), "tenant": "acme", **fields})


@pytest.fixture(params=["redis", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


class InRedis:
    """The entries in Redis, as someone sees and changes them who has not the secret."""

    def __init__(self, client: Raw, namespace: str) -> None:
        self.namespace = namespace
        self._client = client
        self._entries, self._version = Keys(namespace).api_keys

    async def entries(self) -> dict[str, str]:
        found = await self._client.hgetall(self._entries)
        return {name.decode(): text.decode() for name, text in found.items()}

    async def version(self) -> str:
        return str((await self._client.get(self._version) or b"").decode())

    async def add(self, entries: Mapping[str, bytes]) -> None:
        """Puts these beside those that are there."""
        await self._client.hset(self._entries, mapping=entries)

    async def put(self, entries: Mapping[str, str], version: str) -> None:
        """Puts these in the place of what is there, at once."""
        async with self._client.pipeline(transaction=True) as commands:
            commands.delete(self._entries)
            if entries:
                commands.hset(self._entries, mapping=entries)
            commands.set(self._version, version)
            await commands.execute()


@pytest.fixture
async def in_redis(url: str) -> AsyncIterator[InRedis]:
    async with raw(url) as client:
        yield InRedis(client, uuid.uuid4().hex)


@pytest.fixture
async def state(url: str, in_redis: InRedis) -> AsyncIterator[State]:
    opened = await open_state(url, namespace=in_redis.namespace)
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


async def test_entries_without_the_clusters_signature_are_no_keys(
    store: RedisKeyStore, state: State, in_redis: InRedis
) -> None:
    await store.add(api_key())
    stranger = state.api_keys("the secret of another one")
    with pytest.raises(BatonError, match="not those that were signed last"):
        await stranger.add(api_key("sk-2"))
    proof = KeyProof(SECRET, in_redis.namespace)
    signed = [proof.sign(f"x{number}", "[]").encode() + b":[]" for number in (4, 9)]
    forged = (b"", b"\xff", b"00:{}", *signed)
    await in_redis.add({f"x{number}": text for number, text in enumerate(forged, 1)})
    with capture_logs() as logs:
        assert (await store.listing()).entries == (api_key(),)
    assert len([log for log in logs if log["event"] == "api_key_ignored"]) == len(forged)
    assert "sk-" not in str(logs)
    await store.add(api_key("sk-2"))  # which removes them
    assert set(await in_redis.entries()) == {api_key().key_id, api_key("sk-2").key_id}


async def test_a_revoked_key_never_comes_back_to_who_has_seen_it_go(
    store: RedisKeyStore, in_redis: InRedis
) -> None:
    """However entries and versions of different times are combined; what is new is taken up again."""
    seen: list[tuple[dict[str, str], str]] = []

    async def remember() -> None:
        seen.append((await in_redis.entries(), await in_redis.version()))

    for key_id in ("stolen", "stays"):
        await store.add(api_key(key_id, id=key_id))
        await remember()
    view = KeyView(store)
    await view.poll()
    assert len(view.keys) == 2
    await store.revoke("stolen")
    await remember()
    await view.poll()
    now, version = seen[-1]
    stolen = seen[0][0]["stolen"]
    sets = [one for one, _ in seen] + [
        {**now, "stolen": stolen},
        {"stays": stolen},
        {"stolen": now["stays"]},
        {},
    ]
    versions = [one for _, one in seen] + [
        "anything",
        "",
        "f" * 32,
        "1:",
        f"9{version}",
        version[:-1],
        "9" * 400,
    ]
    for entries, other in itertools.product(sets, versions):
        await in_redis.put(entries, other)
        await view.poll()
        assert [key.id for key in view.keys.values()] == ["stays"], (entries, other)
        with contextlib.suppress(BatonError):  # nor can a change of an operator bring it back
            await store.add(api_key("sk-3", id="new"))
            await view.poll()
            assert "stolen" not in [key.id for key in view.keys.values()] or entries in sets[:2]
        view = KeyView(store)
        await in_redis.put(*seen[-2])
        await view.poll()
        await in_redis.put(*seen[-1])
        await view.poll()
    with capture_logs() as logs:
        for _ in range(3):
            await in_redis.put(*seen[1])
            await view.poll()
            assert view.age_s < 1
    assert [log["event"] for log in logs] == ["api_keys_went_back"]
    # Who starts now cannot know; an operator who has looked signs what is there.
    started = KeyView(store)
    await started.poll()
    assert len(started.keys) == 2
    await store.revoke("stolen")
    await view.poll()
    assert [key.id for key in view.keys.values()] == ["stays"]
    await in_redis.put({**now, "stolen": stolen}, version)
    with pytest.raises(BatonError, match="baton keys sign"):
        await store.add(api_key("sk-4"))
    assert len(await store.unsigned_listing()) == 2
    await store.sign()
    await view.poll()
    assert len(view.keys) == 2


async def test_entries_of_another_cluster_are_no_keys(
    store: RedisKeyStore, url: str, in_redis: InRedis
) -> None:
    """The other cluster has the same secret."""
    await store.add(api_key())
    namespace = uuid.uuid4().hex
    other = await open_state(url, namespace=namespace)
    async with raw(url) as client:
        await InRedis(client, namespace).put(await in_redis.entries(), await in_redis.version())
    view = KeyView(other.api_keys(SECRET))
    await view.poll()
    assert dict(view.keys) == {}
    await other.close()


async def test_keys_that_were_signed_one_by_one(store: RedisKeyStore, in_redis: InRedis) -> None:
    """The entries are from before versions were signed: they are valid, and signed with the next change."""
    text = api_key(id="old").model_dump_json(exclude_defaults=True)
    key = hmac.digest(SECRET.encode(), b"baton cluster: api keys", "sha256")
    proof = hmac.digest(key, text.encode(), "sha256").hex()
    await in_redis.put({"old": f"{proof}:{text}"}, uuid.uuid4().hex)
    view = KeyView(store)
    await view.poll()
    assert [key.id for key in view.keys.values()] == ["old"]
    before = await in_redis.entries(), await in_redis.version()
    await store.add(api_key("sk-2", id="new"))
    await view.poll()
    assert {key.id for key in view.keys.values()} == {"old", "new"}
    await store.revoke("old")
    await view.poll()
    await in_redis.put(*before)
    await view.poll()
    assert [key.id for key in view.keys.values()] == ["new"]


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
