"""Seals a request's journal entry: AES-256-GCM, bound to the request's id.

sealed = version (1 byte) | nonce (12) | ciphertext and tag
plain  = length of tenant (u32) | tenant (UTF-8) | token ids (u32 each)      little endian
"""

from __future__ import annotations

import os
import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from baton.errors import BatonError, ErrorKind

KEY_BYTES = 32
_NONCE_BYTES = 12
_VERSION = b"\x01"
_LENGTH = struct.Struct("<I")


def draw_journal_key() -> bytes:
    """A fresh key. Routers that shall read each other's entries need the same one."""
    return os.urandom(KEY_BYTES)


class Seal:
    """Closes and opens entries under one key; `namespace` keeps clusters apart."""

    def __init__(self, key: bytes, namespace: str) -> None:
        if len(key) != KEY_BYTES:
            raise BatonError(ErrorKind.INVALID, f"the journal's key has {KEY_BYTES} bytes, not {len(key)}")
        self._cipher = AESGCM(key)
        self._context = _VERSION + b"baton journal " + namespace.encode() + b" "

    def close(self, request_id: bytes, tenant: str, token_ids: tuple[int, ...]) -> bytes:
        """The sealed entry."""
        name = tenant.encode()
        plain = _LENGTH.pack(len(name)) + name + struct.pack(f"<{len(token_ids)}I", *token_ids)
        nonce = os.urandom(_NONCE_BYTES)
        return _VERSION + nonce + self._cipher.encrypt(nonce, plain, self._context + request_id)

    def open(self, request_id: bytes, sealed: bytes) -> tuple[str, tuple[int, ...]]:
        """Tenant and token ids; BatonError(INTERNAL) where it is not ours, or not this request's."""
        nonce, ciphertext = sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
        try:
            if sealed[:1] != _VERSION:
                raise ValueError("unknown version")
            plain = self._cipher.decrypt(nonce, ciphertext, self._context + request_id)
        except (InvalidTag, ValueError) as error:
            raise BatonError(ErrorKind.INTERNAL, "a journal entry cannot be opened with this key") from error
        end = _LENGTH.size + _LENGTH.unpack_from(plain)[0]
        count = (len(plain) - end) // _LENGTH.size
        return plain[_LENGTH.size : end].decode(), struct.unpack_from(f"<{count}I", plain, end)
