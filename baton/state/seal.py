"""Seals a request's journal entry: AES-256-GCM, bound to the request's id.

sealed = version (1 byte) | nonce (12) | ciphertext and tag
plain  = lengths of tenant and details (u32 each) | tenant (UTF-8) | details | token ids (u32 each)
         all little endian
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
_LENGTHS = struct.Struct("<II")
_TOKEN_BYTES = 4


def new_journal_key() -> bytes:
    """A random key. Routers that read each other's entries need the same one."""
    return os.urandom(KEY_BYTES)


class Seal:
    """Encrypts and decrypts entries with one key; `namespace` is authenticated, too."""

    def __init__(self, key: bytes, namespace: str) -> None:
        if len(key) != KEY_BYTES:
            raise BatonError(ErrorKind.INVALID, f"the journal's key has {KEY_BYTES} bytes, not {len(key)}")
        self._cipher = AESGCM(key)
        self._context = _VERSION + b"baton journal " + namespace.encode() + b" "

    def seal(self, request_id: bytes, tenant: str, token_ids: tuple[int, ...], details: bytes = b"") -> bytes:
        """Encrypts an entry."""
        name = tenant.encode()
        head = _LENGTHS.pack(len(name), len(details))
        plain = head + name + details + struct.pack(f"<{len(token_ids)}I", *token_ids)
        nonce = os.urandom(_NONCE_BYTES)
        return _VERSION + nonce + self._cipher.encrypt(nonce, plain, self._context + request_id)

    def unseal(self, request_id: bytes, sealed: bytes) -> tuple[str, tuple[int, ...], bytes]:
        """Decrypts an entry into tenant, token ids and details. Raises BatonError(INTERNAL) where the key or
        the request id is wrong."""
        nonce, ciphertext = sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
        try:
            if sealed[:1] != _VERSION:
                raise ValueError  # of another version
            plain = self._cipher.decrypt(nonce, ciphertext, self._context + request_id)
        except (InvalidTag, ValueError) as error:
            raise BatonError(ErrorKind.INTERNAL, "a journal entry cannot be opened with this key") from error
        name_bytes, details_bytes = _LENGTHS.unpack_from(plain)
        details = _LENGTHS.size + name_bytes
        ids = details + details_bytes
        count = (len(plain) - ids) // _TOKEN_BYTES
        tenant = plain[_LENGTHS.size : details].decode()
        return tenant, struct.unpack_from(f"<{count}I", plain, ids), plain[details:ids]
