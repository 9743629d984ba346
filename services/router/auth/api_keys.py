"""The API keys of a file, which is followed while the router runs. Only hashes of them are kept."""

from __future__ import annotations

import hmac
import re
import time
from collections.abc import Callable
from pathlib import Path

from baton.base.api_keys import default_key_id, key_hash
from baton.base.errors import BatonError, ErrorKind
from baton.base.followed_file import FollowedFile
from services.router.auth.keys import LOOK_S, Keys
from services.router.tenants.caller import Caller

_MOST_KEYS = 10_000
_KEY = re.compile(r"[\x21-\x7e]{1,512}")


class ApiKeys(Keys):
    """Keys that belong to no tenants."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises BatonError(INVALID), without a key in its message, where the file has no valid keys."""
        super().__init__()
        self._file = FollowedFile(path, "api_keys_file", _hashes, clock, LOOK_S)
        if not self._file.value:
            raise BatonError(ErrorKind.INVALID, f"api_keys_file {path} has no key")

    def _caller(self, hashed: bytes) -> Caller | None:
        before = self._file.value
        if self._file.look():
            for outcome, keys in (
                ("added", self._file.value - before),
                ("removed", before - self._file.value),
            ):
                for one in keys:
                    self._record_change(outcome, default_key_id(one))
        return Caller(default_key_id(hashed)) if self._knows(hashed) else None

    def _knows(self, found: bytes) -> bool:
        """True if it is the hash of a key. Takes the same time whichever key it is."""
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
        hashes.add(key_hash(key))
    if len(hashes) > _MOST_KEYS:
        raise BatonError(ErrorKind.INVALID, f"api_keys_file: more than {_MOST_KEYS} keys")
    return frozenset(hashes)
