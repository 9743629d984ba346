"""Checks `authorization: Bearer KEY`, whatever the file of keys is."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass

from baton.errors import BatonError, ErrorKind
from services.router.tenants.account import TenantAccount

_SCHEME = "bearer"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request. `key_id`: the beginning of its key's SHA-256, which names the key in public.
    `tenant`: None where keys belong to no tenants."""

    key_id: str
    tenant: TenantAccount | None = None


class Keys(ABC):
    """Keys by their SHA-256."""

    def __init__(self) -> None:
        # Requests without a valid key, by API.
        self.refused: Counter[str] = Counter()

    def authenticate(self, authorization: str | None, api: str) -> Caller:
        """The caller with this `authorization`. `api`: where a refusal is counted.

        Raises BatonError(UNAUTHENTICATED).
        """
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != _SCHEME or not key.strip():
            self.refused[api] += 1
            raise BatonError(ErrorKind.UNAUTHENTICATED, "an API key is needed: authorization: Bearer KEY")
        caller = self._caller(hash_of(key.strip()))
        if caller is None:
            self.refused[api] += 1
            raise BatonError(ErrorKind.UNAUTHENTICATED, "this API key is not valid")
        return caller

    @abstractmethod
    def _caller(self, key_hash: bytes) -> Caller | None:
        """The caller whose key has this hash by the latest content of the file; None if there is none."""


def hash_of(key: str) -> bytes:
    """The SHA-256 of a key."""
    return hashlib.sha256(key.encode()).digest()


def key_id(key_hash: bytes) -> str:
    """What names a key in public."""
    return key_hash.hex()[:12]
