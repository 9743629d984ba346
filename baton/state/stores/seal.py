"""Seals a request's journal entry: AES-256-GCM, bound to the request's id.

sealed = version (1 byte) | nonce (12) | ciphertext and tag
plain  = lengths of tenant and details (u32 each) | tenant (UTF-8) | details | token ids (u32 each)
         all little endian
"""

from __future__ import annotations

import os
import struct

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from baton.base.errors import BatonError, ErrorKind

KEY_BYTES = 32
NONCE_BYTES = 12
VERSION = b"\x01"
_LENGTHS = struct.Struct("<II")


def new_journal_key() -> bytes:
    """A random key. Routers that read each other's entries need the same one."""
    return os.urandom(KEY_BYTES)


class Seal:
    """Encrypts entries with one key; `namespace` is authenticated, too."""

    def __init__(self, key: bytes, namespace: str) -> None:
        if len(key) != KEY_BYTES:
            raise BatonError(ErrorKind.INVALID, f"the journal's key has {KEY_BYTES} bytes, not {len(key)}")
        self._cipher = AESGCM(key)
        self._context = VERSION + b"baton journal " + namespace.encode() + b" "

    def seal(self, request_id: bytes, tenant: str, token_ids: tuple[int, ...], details: bytes = b"") -> bytes:
        """Encrypts an entry for its request id."""
        name = tenant.encode()
        head = _LENGTHS.pack(len(name), len(details))
        plain = head + name + details + struct.pack(f"<{len(token_ids)}I", *token_ids)
        return encrypt(self._cipher, plain, self._context + request_id)


def encrypt(cipher: AESGCM, plain: bytes, context: bytes) -> bytes:
    """Version, a random nonce, ciphertext and tag; `context` is authenticated, too."""
    nonce = os.urandom(NONCE_BYTES)
    return VERSION + nonce + cipher.encrypt(nonce, plain, context)
