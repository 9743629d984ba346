"""The files of one TLS identity, read again when they change.

Kubernetes replaces a mounted Secret by changing a symbolic link, so the files change at once, but a look may
fall between two reads; other tools write files one after the other. A new set is taken only if it is whole:
a key that belongs to the certificate, which has not expired. Until then the one before stays in use.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from baton.base.errors import BatonError, ErrorKind
from baton.base.structured_logs import structlog
from baton.tls.material import Material, parse_chain, parse_pair

# Longest time for which a change of the files goes unnoticed by a process that is asked for them.
LOOK_EVERY_S = 5.0
_MAX_FILE_BYTES = 1 << 20

_log = structlog.get_logger(part="tls")


class TlsFiles:
    """Reads and validates the files. Thread-safe."""

    def __init__(
        self,
        cert_file: Path,
        key_file: Path,
        authorities_file: Path | None = None,
        *,
        check: Callable[[Material], None] = lambda material: None,
        look_every_s: float = LOOK_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`check` raises ValueError where the contents do not suffice. Raises BatonError(INVALID), in one
        line with the path, where a file cannot be used."""
        self._cert, self._key, self._authorities = cert_file, key_file, authorities_file
        self._check = check
        self._look_every_s = look_every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_at = clock()
        self._reported = ""  # why the latest contents are not used, which is logged once
        try:
            self._read = self._read_files()
            self._material = self._parsed(self._read)
        except ValueError as error:
            raise BatonError(ErrorKind.INVALID, f"TLS: {error}") from error

    def current(self) -> Material:
        """The latest complete contents; the same object until they change. Looks at the files where the last
        look is `look_every_s` ago."""
        with self._lock:
            now = self._clock()
            if now - self._looked_at >= self._look_every_s:
                self._looked_at = now
                self._look()
            return self._material

    def _look(self) -> None:
        try:
            read = self._read_files()
            if read == self._read:
                return
            self._read = read
            self._material = self._parsed(read)
        except ValueError as error:
            if self._reported != str(error):
                self._reported = str(error)
                _log.error("certificate_not_reloaded", reason=self._reported)
            return
        self._reported = ""
        chain = self._material.chain
        _log.info(
            "certificate_reloaded",
            file=str(self._cert),
            sha256=chain.fingerprint,
            not_after=chain.leaf.not_valid_after_utc.isoformat(),
        )

    def _read_files(self) -> tuple[bytes, bytes, bytes]:
        authorities = b"" if self._authorities is None else _contents(self._authorities)
        return _contents(self._cert), _contents(self._key), authorities

    def _parsed(self, read: tuple[bytes, bytes, bytes]) -> Material:
        """Raises ValueError where the files are no usable identity."""
        cert, key, authorities = read
        try:
            chain = parse_pair(cert, key)
        except ValueError as error:
            raise ValueError(f"{self._cert} and {self._key}: {error}") from error
        if chain.expired():
            raise ValueError(f"{self._cert}: it expired at {chain.leaf.not_valid_after_utc.isoformat()}")
        if self._authorities is not None:
            try:
                parse_chain(authorities)
            except ValueError as error:
                raise ValueError(f"{self._authorities}: {error}") from error
        material = Material(chain, key, authorities)
        try:
            self._check(material)
        except ValueError as error:
            raise ValueError(f"{self._cert}: {error}") from error
        return material


def _contents(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            contents = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ValueError(f"cannot read {path}: {reason}") from error
    if len(contents) > _MAX_FILE_BYTES:
        raise ValueError(f"{path}: it is larger than {_MAX_FILE_BYTES} bytes")
    return contents
