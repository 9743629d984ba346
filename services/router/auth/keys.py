"""Checks `authorization: Bearer KEY`, wherever the keys are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter

from baton.base.api_keys import key_hash
from baton.base.errors import BatonError, ErrorKind
from services.common.observability.audit_chain import AuditRecord
from services.common.observability.audit_log import AuditLog
from services.router.auth.scopes import Access, Rule
from services.router.tenants.caller import Caller

# Seconds between two looks at a file of keys: a key that was removed is refused after that time.
LOOK_S = 1.0
_SCHEME = "bearer"


class Keys(ABC):
    """The API keys that the router accepts, by their SHA-256."""

    def __init__(self) -> None:
        # Requests without a valid key, and those whose key does not permit them, by API.
        self.refused: Counter[str] = Counter()
        self.forbidden: Counter[str] = Counter()
        self._audit = AuditLog()

    def audit_to(self, audit: AuditLog) -> None:
        """Records refusals and changes of keys in this log from now on."""
        self._audit = audit

    def authenticate(
        self, authorization: str | None, api: str, rule: Rule = Access.ANY_KEY, route: str = ""
    ) -> Caller:
        """The caller with this `authorization`, whose key satisfies the route's rule. `api`, `route`: where a
        refusal is counted and recorded.

        Raises BatonError: UNAUTHENTICATED; FORBIDDEN where the key does not have the scope; UNAVAILABLE where
        the keys cannot be known.
        """
        caller: Caller | None = None
        try:
            caller = self._known(authorization)
            if not isinstance(rule, Access):
                caller.require(rule)
        except BatonError as error:
            if error.kind is ErrorKind.UNAUTHENTICATED:
                self.refused[api] += 1
            elif error.kind is ErrorKind.FORBIDDEN:
                self.forbidden[api] += 1
            key_id, tenant = ("", "") if caller is None else (caller.key_id, caller.tenant_name)
            outcome = error.kind.name.lower()
            self._audit.record(AuditRecord("authentication", outcome, key_id, tenant, route=route))
            raise
        return caller

    def _known(self, authorization: str | None) -> Caller:
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != _SCHEME or not key.strip():
            raise BatonError(ErrorKind.UNAUTHENTICATED, "an API key is needed: authorization: Bearer KEY")
        caller = self._caller(key_hash(key.strip()))
        if caller is None:
            raise BatonError(ErrorKind.UNAUTHENTICATED, "this API key is not valid")
        return caller

    def _record_change(self, outcome: str, key_id: str, tenant: str = "") -> None:
        """Records that a key was added, changed or removed."""
        self._audit.record(AuditRecord("key", outcome, key_id=key_id, tenant=tenant))

    @abstractmethod
    def _caller(self, hashed: bytes) -> Caller | None:
        """The caller whose key has this hash by what is known now; None if there is none. Raises BatonError
        as `authenticate` does."""
