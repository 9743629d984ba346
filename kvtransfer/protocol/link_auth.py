"""How both ends of a link prove that they know the cluster's secret, before either gives the other anything.

    sender                                                             receiver
                    ◀── challenge ──                                   good once, for `LIFE_S`
      hello: request, challenge, nonce, HMAC of all three ──▶          verified before any memory is allocated
                    ◀── answer: response, HMAC of it and the hello ──  verified before anything is sent

The HMAC is SHA-256 under a key derived from the secret (`baton/cluster_auth.py`). A challenge that was not
redeemed takes no memory: it carries its own time and a seal under a key of its listener's alone.
"""

from __future__ import annotations

import hmac
import secrets
import struct
import threading
import time
from collections.abc import Callable

from google.protobuf.message import DecodeError

from baton.cluster_auth import UNAUTHENTICATED, RpcToken, link_key
from baton.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import (
    OpenLinkRequest,
    OpenLinkResponse,
    SignedOpenLinkRequest,
    SignedOpenLinkResponse,
)

LIFE_S = 10.0
NONCE_BYTES = 16
_TIME = struct.Struct("<d")
_SEAL_BYTES = 32
_CHALLENGE_BYTES = _TIME.size + NONCE_BYTES + _SEAL_BYTES


class Challenges:
    """Of one listener. Any thread may call it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        # Those redeemed within their life, the oldest first: only who knows the secret adds to them.
        self._redeemed: dict[bytes, float] = {}

    def issue(self) -> bytes:
        """A new challenge."""
        body = _TIME.pack(self._clock()) + secrets.token_bytes(NONCE_BYTES)
        return body + self._seal(body)

    def redeem(self, challenge: bytes) -> bool:
        """Whether it was issued here, is young enough and had not been redeemed; from now on it has."""
        body, seal = challenge[:-_SEAL_BYTES], challenge[-_SEAL_BYTES:]
        if len(challenge) != _CHALLENGE_BYTES or not hmac.compare_digest(seal, self._seal(body)):
            return False
        (issued,) = _TIME.unpack_from(body)
        with self._lock:
            now = self._clock()
            while self._redeemed and now > self._redeemed[oldest := next(iter(self._redeemed))]:
                del self._redeemed[oldest]
            if now > issued + LIFE_S or challenge in self._redeemed:
                return False
            self._redeemed[challenge] = now + LIFE_S
            return True

    def _seal(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")


class LinkAuth:
    """What a process proves and verifies hellos with. An empty secret is known to everybody."""

    def __init__(self, secret: str = "") -> None:
        self.token = RpcToken(secret)
        self._key = link_key(secret)

    def hello(self, request: OpenLinkRequest, challenge: bytes) -> SignedOpenLinkRequest:
        """By the sender."""
        hello = SignedOpenLinkRequest(
            request=request.SerializeToString(),
            challenge=challenge,
            nonce=secrets.token_bytes(NONCE_BYTES),
        )
        hello.proof = self._proof_of(hello)
        return hello

    def verify_hello(self, hello: SignedOpenLinkRequest, challenges: Challenges) -> OpenLinkRequest:
        """By the receiver: what is asked. `BatonError` UNAUTHENTICATED, INVALID for what is no request."""
        right = hmac.compare_digest(hello.proof, self._proof_of(hello))
        if not (right and len(hello.nonce) == NONCE_BYTES and challenges.redeem(hello.challenge)):
            raise BatonError(ErrorKind.UNAUTHENTICATED, f"no link: {UNAUTHENTICATED}")
        try:
            return OpenLinkRequest.FromString(hello.request)
        except DecodeError as error:
            raise BatonError(ErrorKind.INVALID, "the request for a link cannot be read") from error

    def answer(self, hello: SignedOpenLinkRequest, response: OpenLinkResponse) -> SignedOpenLinkResponse:
        """By the receiver, to a hello that was right."""
        serialised = response.SerializeToString()
        return SignedOpenLinkResponse(
            response=serialised, proof=self._mac(b"answer", hello.proof, serialised)
        )

    def verify_answer(self, hello: SignedOpenLinkRequest, answer: SignedOpenLinkResponse) -> OpenLinkResponse:
        """By the sender. `BatonError` UNAUTHENTICATED, INVALID for what is no answer."""
        if not hmac.compare_digest(answer.proof, self._mac(b"answer", hello.proof, answer.response)):
            raise BatonError(ErrorKind.UNAUTHENTICATED, f"the receiver proves nothing: {UNAUTHENTICATED}")
        try:
            return OpenLinkResponse.FromString(answer.response)
        except DecodeError as error:
            raise BatonError(ErrorKind.INVALID, "the receiver's answer cannot be read") from error

    def page_proof(self, hello: SignedOpenLinkRequest) -> bytes:
        """What a receiver sends along with the first memory that it has a sender map."""
        return self._mac(b"page", hello.proof)

    def verify_page(self, hello: SignedOpenLinkRequest, proof: bytes) -> None:
        """By the sender. `BatonError` UNAUTHENTICATED."""
        if not hmac.compare_digest(proof, self.page_proof(hello)):
            raise BatonError(ErrorKind.UNAUTHENTICATED, f"the listener proves nothing: {UNAUTHENTICATED}")

    def frames_secret(self, nccl_id: bytes) -> bytes:
        """What the socket of a link's frames begins with: of the link that has this communicator."""
        return self._mac(b"frames", nccl_id)

    def _proof_of(self, hello: SignedOpenLinkRequest) -> bytes:
        return self._mac(b"hello", hello.request, hello.challenge, hello.nonce)

    def _mac(self, *parts: bytes) -> bytes:
        """Each part with its length, so that no two lists of parts are one text."""
        joined = b"".join(struct.pack("<I", len(part)) + part for part in parts)
        return hmac.digest(self._key, joined, "sha256")
