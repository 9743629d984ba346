"""Chooses the certificate that a server presents while a new one becomes known to its callers.

    seen in the files ──▶ published beside the old one ──▶ presented after `HOLD_S`, published beside the old

Callers take only published certificates, so a new one must not be presented before they know it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from baton.tls.files import TlsFiles
from baton.tls.material import Chain, Material

# From the publication of a certificate until it is presented: longer than callers take to read the registry.
HOLD_S = 10.0


class Renewal:
    """The certificate of one server and its successor. Thread-safe."""

    def __init__(
        self,
        files: TlsFiles,
        *,
        confirmed: bool = False,
        hold_s: float = HOLD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`confirmed`: a certificate counts as published once `publish` was called with it; otherwise as soon
        as `chains` or `material` has seen it."""
        self._files = files
        self._confirmed = confirmed
        self._hold_s = hold_s
        self._clock = clock
        self._lock = threading.Lock()
        self._presented = files.current()
        self._before: Chain | None = None
        self._published: tuple[Chain, float] | None = None

    def chains(self) -> tuple[Chain, ...]:
        """The certificates to publish, the newest first: at most the latest, and the one before it."""
        presented, newest = self.material().chain, self._files.current().chain
        if newest != presented:
            return newest, presented
        return (presented,) if self._before is None else (presented, self._before)

    def publish(self, chain: Chain) -> None:
        """Callers can find `chain` from now on; repeated calls do not prolong the hold."""
        with self._lock:
            if self._published is None or self._published[0] != chain:
                self._published = (chain, self._clock())

    def material(self) -> Material:
        """Returns the material of a new connection: the certificate to present, and the latest
        authorities."""
        newest = self._files.current()
        if not self._confirmed:
            self.publish(newest.chain)
        with self._lock:
            if newest.chain == self._presented.chain:
                self._presented = newest
            elif self._held(newest.chain) and not self._presented.chain.expired():
                self._presented = replace(self._presented, authorities=newest.authorities)
            else:
                self._before, self._presented = self._presented.chain, newest
            return self._presented

    def _held(self, chain: Chain) -> bool:
        if self._published is None or self._published[0] != chain:
            return True
        return self._clock() - self._published[1] < self._hold_s
