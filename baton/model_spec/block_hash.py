"""The hashes of KV blocks: one cryptographic hash per full block, chained, so that it identifies every token
up to the block's end.

    seed    = H(HMAC(secret, tenant), model fingerprint, adapter, cache dtype)
    block i = H(block i-1, its token ids)        block -1 is the seed

Fields are length-prefixed, so no two lists of fields are one string of bytes. Without the secret no hash can
be computed, and tenants never share hashes. Shared by router, state and engine; torch-free.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence

HASH_BYTES = 16
_NO_ADAPTER = b""
# How many block hashes a reservation may carry: those of 262,144 tokens in blocks of 64.
MAX_RESERVE_HASHES = 4096


class BlockHasher:
    """Hashes the full blocks of one tenant's token sequences; tokens behind the last full block have no hash.

    Router and worker must agree on every argument to the bit.
    """

    def __init__(
        self, secret: bytes, *, tenant: str, fingerprint: bytes, cache_dtype: str, block_tokens: int
    ) -> None:
        """`fingerprint`: of weights and cache layout."""
        if block_tokens < 1:
            raise ValueError("a block holds at least one token")
        owner = hmac.digest(secret, tenant.encode(), "sha256")
        self.seed = _hash(owner, fingerprint, _NO_ADAPTER, cache_dtype.encode())
        self.block_tokens = block_tokens
        self._pack = struct.Struct(f"<{block_tokens}I").pack

    def hashes(self, token_ids: Sequence[int], known: Sequence[bytes] = ()) -> tuple[bytes, ...]:
        """One hash a full block, in order. `known`: those of the first blocks, taken as they are."""
        return (*known, *self.more_hashes(token_ids[len(known) * self.block_tokens :], known))

    def more_hashes(self, token_ids: Sequence[int], known: Sequence[bytes]) -> list[bytes]:
        """The hashes of the full blocks of `token_ids`, which follow the blocks that have the hashes
        `known`."""
        size, found = self.block_tokens, []
        last = known[-1] if known else self.seed
        for start in range(0, len(token_ids) - size + 1, size):
            last = _hash(last, self._pack(*token_ids[start : start + size]))
            found.append(last)
        return found


def _hash(*fields: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()
