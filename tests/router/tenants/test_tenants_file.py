"""The file of tenants: what is refused, in one line and without a rejected value."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from baton.base.errors import BatonError, ErrorKind
from services.router.auth.tenant_keys import TenantKeys
from services.router.tenants.account import CallCost, TenantAccount
from services.router.tenants.tenants_file import parse_tenants
from tests.router.tenants.clock import Clock
from tests.support.mounted_secret import mount_secret


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def tenant(name: str, *keys: str, **limits: int) -> str:
    """An entry of a file."""
    hashes = ", ".join(f'"{sha256(key)}"' for key in keys)
    given = ", ".join(f"{limit}: {value}" for limit, value in limits.items())
    return f"- {{name: {name}, keys_sha256: [{hashes}], limits: {{{given}}}}}\n"


def file_of(*entries: str) -> str:
    return "tenants:\n" + "".join(entries)


HASH = sha256("sk-1")


def with_keys(*entries: str) -> str:
    """A file of one tenant with these entries of keys."""
    return f"tenants: [{{name: a, keys: [{', '.join(entries)}]}}]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file: input should be"),
        ("tenants: [", "not valid YAML at line"),
        ("tenants: []\nlimit: 3", "limit: unknown key"),
        ("tenants: [{name: a, color: red}]", "tenants.0.color: unknown key"),
        ("tenants: [{name: secret word}]", "tenants.0.name: string should match"),
        ("tenants: [{name: a, keys_sha256: [sk-secret]}]", "tenants.0.keys_sha256.0: string should match"),
        ("tenants: [{name: a, limits: {requests_per_minute: 0}}]", "requests_per_minute: input should be"),
        ("tenants: [{name: a, limits: {per_day: 5}}]", "tenants.0.limits.per_day: unknown key"),
        (with_keys("{sha256: sk-secret}"), "tenants.0.keys.0.sha256: string should match"),
        (
            with_keys(f"{{sha256: {HASH}, scopes: [everything]}}"),
            "tenants.0.keys.0.scopes.0: input should be",
        ),
        (
            with_keys(f"{{sha256: {HASH}, expires: 2027-01-01 00:00:00}}"),
            "expires: input should have timezone",
        ),
        (with_keys(f"{{sha256: {HASH}, secret: x}}"), "tenants.0.keys.0.secret: unknown key"),
        (with_keys(f"{{sha256: {HASH}, id: secret word}}"), "tenants.0.keys.0.id: string should match"),
        (
            with_keys(f"{{sha256: {HASH}, id: x}}", f"{{sha256: {sha256('sk-2')}, id: x}}"),
            "key id x is there twice",
        ),
        (file_of(tenant("a"), tenant("a")), "the tenant a is there twice"),
        (file_of(tenant("a", "sk-secret"), tenant("b", "sk-secret")), "a key of b is also one of a"),
        (file_of(tenant("a", *(str(n) for n in range(10_001)))), "more than 10000 keys"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(BatonError, match=message) as refusal:
        parse_tenants(text)
    assert refusal.value.kind is ErrorKind.INVALID
    assert refusal.value.message.startswith("tenants_file: ")
    assert "\n" not in refusal.value.message
    assert "secret" not in refusal.value.message.replace("secret: unknown", "")


def test_a_key_may_be_limited_and_expire(tmp_path: Path) -> None:
    limited = (
        f"{{sha256: {HASH}, id: ci, scopes: [models], models: [m], expires: 2999-01-01T00:00:00Z}}",
        f"{{sha256: {sha256('sk-2')}, expires: 2020-01-01T00:00:00+02:00}}",
    )
    mount_secret(tmp_path, tenants=with_keys(*limited))
    keys = TenantKeys(tmp_path / "tenants")
    caller = keys.authenticate("Bearer sk-1", "http", "models")
    assert (caller.key_id, caller.may_use("m"), caller.may_use("other")) == ("ci", True, False)
    for rule in ("generate", "metrics"):
        with pytest.raises(BatonError, match=f"does not have the scope {rule}") as refusal:
            keys.authenticate("Bearer sk-1", "http", rule)
        assert refusal.value.kind is ErrorKind.FORBIDDEN
    with pytest.raises(BatonError, match="has expired") as refusal:
        keys.authenticate("Bearer sk-2", "http")
    assert refusal.value.kind is ErrorKind.UNAUTHENTICATED
    assert (keys.refused, keys.forbidden) == ({"http": 1}, {"http": 2})


def test_a_file_without_keys_is_refused_at_the_start(tmp_path: Path) -> None:
    mount_secret(tmp_path, tenants=file_of(tenant("a")))
    with pytest.raises(BatonError, match="has no key"):
        TenantKeys(tmp_path / "tenants")


def found(keys: TenantKeys, key: str) -> TenantAccount | None:
    try:
        return keys.authenticate(f"Bearer {key}", "http").tenant
    except BatonError as error:
        if error.kind is not ErrorKind.UNAUTHENTICATED:
            raise
        return None


def test_keys_lead_to_their_tenants_and_a_new_file_is_followed(tmp_path: Path) -> None:
    clock = Clock()
    mount_secret(tmp_path, tenants=file_of(tenant("a", "sk-1", "sk-2"), tenant("b", "sk-3")))
    keys = TenantKeys(tmp_path / "tenants", clock)
    first = found(keys, "sk-1")
    assert first is not None
    assert (first.name, found(keys, "sk-2")) == ("a", first)
    assert found(keys, "sk-3") is keys.accounts["b"]
    assert found(keys, sha256("sk-1")) is None
    assert keys.refused == {"http": 1}

    mount_secret(tmp_path, tenants=file_of(tenant("a", "sk-2", requests_per_minute=1), tenant("c", "sk-4")))
    clock.now = 1.0
    assert found(keys, "sk-1") is None  # revoked
    assert found(keys, "sk-2") is first
    assert list(keys.accounts) == ["a", "c"]

    with capture_logs() as logs:
        mount_secret(tmp_path, tenants="tenants: sk-secret")
        clock.now = 2.0
        assert found(keys, "sk-2") is first
    assert [log["event"] for log in logs] == ["file_not_followed"]
    assert "secret" not in str(logs)


def test_new_limits_apply_to_a_tenant_that_stays(tmp_path: Path) -> None:
    clock = Clock()
    mount_secret(tmp_path, tenants=file_of(tenant("a", "sk-1")))
    keys = TenantKeys(tmp_path / "tenants", clock)
    account = keys.accounts["a"]
    with account.admit(cost := CallCost()):
        mount_secret(tmp_path, tenants=file_of(tenant("a", "sk-1", concurrent_requests=1)))
        clock.now = 1.0
        assert found(keys, "sk-1") is account
        with pytest.raises(BatonError, match="concurrent_requests = 1"):
            account.check(cost)
    account.check(cost)
