"""A page of memory by which a listener and a sender verify that they share memory, and whether the sender's
device reaches the listener's.

    nonce 16 | the sender's answer 16 | … | the listener's device 64 | 1: the sender's device will write to it

The listener makes it for one sender and passes its descriptor; the sender fills in its half before it is
granted anything.
"""

from __future__ import annotations

import secrets

import numpy as np

from baton.device.shared_memory import SharedMemory
from baton.device.streams.link_device import LinkDevice

PAGE_BYTES = 4096
NONCE_BYTES = 16
_DEVICE_AT, _DEVICE_BYTES = 64, 64
_REACHED_AT = _DEVICE_AT + _DEVICE_BYTES


def answer_to(nonce: bytes) -> bytes:
    """Returns the bytes that a process which has mapped the page writes after the nonce."""
    return bytes(byte ^ 0xFF for byte in nonce)


class ProbePage:
    """The page at the listener."""

    def __init__(self, device: LinkDevice | None) -> None:
        self.memory = SharedMemory.create("baton-link-page", PAGE_BYTES)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        _write(self.memory, 0, self._nonce)
        if device is not None:
            _write(self.memory, _DEVICE_AT, device.name.encode()[:_DEVICE_BYTES])

    def answered(self) -> bool:
        """True once the sender has mapped and answered the page."""
        found = self.memory.bytes[NONCE_BYTES : 2 * NONCE_BYTES].tobytes()
        return found == answer_to(self._nonce)

    def device_reached(self) -> bool:
        """True if the sender's device will write to the listener's."""
        return bool(self.memory.bytes[_REACHED_AT] == 1)


def fill(page: SharedMemory, device: LinkDevice | None) -> bool:
    """Answers a listener's page, at the sender; returns True if `device` will write to the listener's.
    ValueError if both have a device, and the sender's cannot write the memory of the listener's."""
    _write(page, NONCE_BYTES, answer_to(page.bytes[:NONCE_BYTES].tobytes()))
    name = page.bytes[_DEVICE_AT:_REACHED_AT].tobytes().rstrip(b"\0").decode(errors="replace")
    if not name or device is None:
        return False
    if not device.reaches(name):
        raise ValueError(f"device {device.name} cannot write the memory of {name}")
    page.bytes[_REACHED_AT] = 1
    return True


def _write(page: SharedMemory, at: int, what: bytes) -> None:
    page.bytes[at : at + len(what)] = np.frombuffer(what, dtype=np.uint8)
