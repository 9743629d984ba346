"""The API keys in Redis, beside those of a file of tenants if there is one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from baton.base.api_keys import ApiKey
from baton.base.errors import BatonError, ErrorKind
from baton.state.key_view import KeyView
from services.common.observability.audit_log import AuditLog
from services.router.auth.keys import Keys
from services.router.auth.tenant_keys import TenantKeys, caller_with
from services.router.tenants.account import TenantAccount
from services.router.tenants.caller import Caller
from services.router.tenants.tenants_file import TenantLimits


class RedisKeys(Keys):
    """Keys by tenant. Where there is a file, it has the limits, and a key in Redis whose tenant it does not
    name is not valid; without one tenants have no limits."""

    def __init__(
        self,
        file: TenantKeys | None,
        max_age_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_age_s`: how long keys stay valid after Redis was last read."""
        super().__init__()
        self._file = file
        self._max_age_s = max_age_s
        self._clock = clock
        self._view: KeyView | None = None
        self._read = False
        self._own_accounts: dict[str, TenantAccount] = {}

    @property
    def accounts(self) -> dict[str, TenantAccount]:
        """The tenants' accounts by name."""
        return self._own_accounts if self._file is None else self._file.accounts

    @property
    def age_s(self) -> float:
        """Seconds for which a change of the keys in Redis may be unknown."""
        return math.inf if self._view is None else self._view.age_s

    def audit_to(self, audit: AuditLog) -> None:
        super().audit_to(audit)
        if self._file is not None:
            self._file.audit_to(audit)

    def changed(self, added: Sequence[ApiKey], gone: Sequence[ApiKey]) -> None:
        """Records changes of the keys in Redis, except those that it had at the first reading."""
        if self._read:
            for outcome, keys in (("added", added), ("removed", gone)):
                for key in keys:
                    self._record_change(outcome, key.key_id, key.tenant)
        self._read = True

    def follow(self, view: KeyView) -> None:
        """Takes the keys of this view from now on."""
        self._view = view

    def _caller(self, hashed: bytes) -> Caller | None:
        if self._file is not None:
            self._file.look()
            if (caller := self._file.caller(hashed)) is not None:
                return caller
        if self._view is None or self._view.age_s > self._max_age_s:
            message = "API keys cannot be verified: Redis was not read for too long"
            raise BatonError(ErrorKind.UNAVAILABLE, message)
        key = self._view.keys.get(hashed)
        account = None if key is None else self._account(key.tenant)
        return None if key is None or account is None else caller_with(key, account)

    def _account(self, tenant: str) -> TenantAccount | None:
        if self._file is not None:
            return self._file.accounts.get(tenant)
        # At most as many as there are keys.
        if (account := self._own_accounts.get(tenant)) is None:
            account = self._own_accounts[tenant] = TenantAccount(tenant, TenantLimits(), self._clock)
        return account
