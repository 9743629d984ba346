"""The API keys of a file, which is followed while the router runs. Only hashes of them are kept."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.errors import BatonError, ErrorKind
from baton.followed_file import FollowedFile

_MOST_KEYS = 10_000
_KEY = re.compile(r"[\x21-\x7e]{1,512}")
_SCHEME = "bearer"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request. `key_id`: the beginning of its key's SHA-256, which names the key in public."""

    key_id: str


class ApiKeys:
    """Checks `authorization: Bearer KEY`."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises BatonError(INVALID), without a key in its message, where the file has no valid keys."""
        self._file = FollowedFile(path, "api_keys_file", _hashes, clock)
        if not self._file.value:
            raise BatonError(ErrorKind.INVALID, f"api_keys_file {path} has no key")
        # Requests without a valid key, by API.
        self.refused: Counter[str] = Counter()

    def authenticate(self, authorization: str | None, api: str) -> Caller:
        """The caller with this `authorization`. `api`: where a refusal is counted.

        Raises BatonError(UNAUTHENTICATED).
        """
        self._file.look()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != _SCHEME or not key.strip():
            self.refused[api] += 1
            raise BatonError(ErrorKind.UNAUTHENTICATED, "an API key is needed: authorization: Bearer KEY")
        found = _hash(key.strip())
        if not self._knows(found):
            self.refused[api] += 1
            raise BatonError(ErrorKind.UNAUTHENTICATED, "this API key is not valid")
        return Caller(found.hex()[:12])

    def _knows(self, found: bytes) -> bool:
        """Whether it is the hash of a key. Takes the same time whichever key it is."""
        known = False
        for one in self._file.value:
            known |= hmac.compare_digest(one, found)
        return known


def _hashes(text: str) -> frozenset[bytes]:
    """The SHA-256 of each key in a file: a key a line; empty lines and those that begin with # are none."""
    hashes = set()
    for number, line in enumerate(text.splitlines(), 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not _KEY.fullmatch(key):
            message = f"api_keys_file: line {number} is no key, 1 to 512 visible ASCII characters"
            raise BatonError(ErrorKind.INVALID, message)
        hashes.add(_hash(key))
    if len(hashes) > _MOST_KEYS:
        raise BatonError(ErrorKind.INVALID, f"api_keys_file: more than {_MOST_KEYS} keys")
    return frozenset(hashes)


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
