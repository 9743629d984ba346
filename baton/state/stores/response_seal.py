"""Seals stored responses: AES-256-GCM with a key derived from the journal's, bound to tenant and id.

sealed = version (1 byte) | nonce (12) | ciphertext and tag
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from baton.state.stores.seal import NONCE_BYTES, VERSION, encrypt


class ResponseSeal:
    """Encrypts the records of one namespace; only who has the journal's key reads them."""

    def __init__(self, journal_key: bytes, namespace: str) -> None:
        derivation = HKDF(SHA256(), 32, salt=None, info=b"baton responses")
        self._cipher = AESGCM(derivation.derive(journal_key))
        self._namespace = namespace

    def seal(self, tenant: str, response_id: str, record: bytes) -> bytes:
        """Encrypts a record for its tenant and response id."""
        return encrypt(self._cipher, record, self._context(tenant, response_id))

    def open(self, tenant: str, response_id: str, sealed: bytes) -> bytes | None:
        """Decrypts a record; None if another key, tenant or id sealed it."""
        nonce, text = sealed[1 : 1 + NONCE_BYTES], sealed[1 + NONCE_BYTES :]
        try:
            return self._cipher.decrypt(nonce, text, self._context(tenant, response_id))
        except (InvalidTag, ValueError):
            return None

    def _context(self, tenant: str, response_id: str) -> bytes:
        """No part of it may contain a blank."""
        return VERSION + f"{self._namespace} {tenant} {response_id}".encode()
