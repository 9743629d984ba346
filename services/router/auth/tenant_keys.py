"""The API keys of tenants, from a file which is followed while the router runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from baton.errors import BatonError, ErrorKind
from baton.followed_file import FollowedFile
from services.router.auth.keys import Caller, Keys, key_id
from services.router.tenants.account import TenantAccount
from services.router.tenants.tenants_file import parse_tenants


class TenantKeys(Keys):
    """Keys by tenant, and the tenants' accounts."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds, of the file and of limits. Raises BatonError(INVALID) where the file is
        invalid or has no key."""
        super().__init__()
        self._clock = clock
        self._file = FollowedFile(path, "tenants_file", parse_tenants, clock)
        # By name.
        self.accounts: dict[str, TenantAccount] = {}
        self._apply()
        if not self._by_hash:
            raise BatonError(ErrorKind.INVALID, f"tenants_file {path} has no key")

    def _caller(self, key_hash: bytes) -> Caller | None:
        if self._file.look():
            self._apply()
        # How long this takes shows at most the beginning of a hash, which does not lead to a key.
        account = self._by_hash.get(key_hash)
        return None if account is None else Caller(key_id(key_hash), account)

    def _apply(self) -> None:
        """Takes over the file's content. A tenant that stays keeps its account; what runs, runs on."""
        accounts: dict[str, TenantAccount] = {}
        self._by_hash: dict[bytes, TenantAccount] = {}
        for tenant in self._file.value.tenants:
            account = self.accounts.get(tenant.name)
            if account is None:
                account = TenantAccount(tenant.name, tenant.limits, self._clock)
            account.set_limits(tenant.limits)
            accounts[tenant.name] = account
            self._by_hash.update((bytes.fromhex(key), account) for key in tenant.keys_sha256)
        self.accounts = accounts
