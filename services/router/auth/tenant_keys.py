"""The API keys of tenants, from a file which is followed while the router runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from baton.base.api_keys import KeyGrant
from baton.base.errors import BatonError, ErrorKind
from baton.base.followed_file import FollowedFile
from services.router.auth.keys import LOOK_S, Keys
from services.router.tenants.account import TenantAccount
from services.router.tenants.caller import Caller
from services.router.tenants.tenants_file import parse_tenants


class TenantKeys(Keys):
    """Keys by tenant, and the tenants' accounts."""

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.monotonic, *, needs_key: bool = True
    ) -> None:
        """`clock`: monotonic seconds, of the file and of limits. Raises BatonError(INVALID) where the file is
        invalid, or has no key although it needs one."""
        super().__init__()
        self._clock = clock
        self._file = FollowedFile(path, "tenants_file", parse_tenants, clock, LOOK_S)
        # By name.
        self.accounts: dict[str, TenantAccount] = {}
        self._apply()
        if needs_key and not self._by_hash:
            raise BatonError(ErrorKind.INVALID, f"tenants_file {path} has no key")

    def look(self) -> None:
        """Takes over the file's content, if it has changed and was not looked at just now."""
        if self._file.look():
            before = {key: account.name for key, account in self._by_hash.values()}
            self._apply()
            now = {key: account.name for key, account in self._by_hash.values()}
            for outcome, some, others in (("added", now, before), ("removed", before, now)):
                for key, tenant in some.items() - others.items():
                    self._record_change(outcome, key.key_id, tenant)

    def caller(self, hashed: bytes) -> Caller | None:
        """Returns the owner of the key with this hash in the file as it was last looked at; None if there is
        none."""
        # How long this takes shows at most the beginning of a hash, which does not lead to a key.
        found = self._by_hash.get(hashed)
        return None if found is None else caller_with(*found)

    def _caller(self, hashed: bytes) -> Caller | None:
        self.look()
        return self.caller(hashed)

    def _apply(self) -> None:
        """Takes over the file's content. A tenant that stays keeps its account; what runs, runs on."""
        accounts: dict[str, TenantAccount] = {}
        self._by_hash: dict[bytes, tuple[KeyGrant, TenantAccount]] = {}
        for tenant in self._file.value.tenants:
            account = self.accounts.get(tenant.name)
            if account is None:
                account = TenantAccount(tenant.name, tenant.limits, self._clock)
            account.set_limits(tenant.limits)
            account.weight, account.priority = tenant.weight, tenant.priority
            accounts[tenant.name] = account
            self._by_hash.update((bytes.fromhex(key.sha256), (key, account)) for key in tenant.grants)
        self.accounts = accounts


def caller_with(key: KeyGrant, account: TenantAccount) -> Caller:
    """The caller with this key. BatonError(UNAUTHENTICATED) where it has expired."""
    if key.expires is not None and datetime.now(UTC) >= key.expires:
        raise BatonError(ErrorKind.UNAUTHENTICATED, "this API key has expired")
    return Caller.of(key, account)
