"""Reads what a switch must know of an Ethernet frame: addresses, and whether it begins a TCP connection."""

from __future__ import annotations

import ipaddress
import struct
from dataclasses import dataclass

_IPV4, _IPV6, _TCP = 0x0800, 0x86DD, 6
_HEADER = 14
_SYN, _ACK = 0x02, 0x10
BROADCAST = 0x01  # the first byte's bit of frames for several receivers


@dataclass(frozen=True, slots=True)
class Opening:
    """The first segment of a TCP connection."""

    source: str
    port: int


def opening(frame: bytes) -> Opening | None:
    """The connection that a frame opens; None where it opens none."""
    (kind,) = struct.unpack_from("!H", frame, 12)
    if kind == _IPV4 and len(frame) >= _HEADER + 20 and frame[_HEADER + 9] == _TCP:
        source: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.IPv4Address(
            frame[_HEADER + 12 : _HEADER + 16]
        )
        segment = _HEADER + 4 * (frame[_HEADER] & 0x0F)
    elif kind == _IPV6 and len(frame) >= _HEADER + 40 and frame[_HEADER + 6] == _TCP:
        source = ipaddress.IPv6Address(frame[_HEADER + 8 : _HEADER + 24])
        segment = _HEADER + 40
    else:
        return None
    if len(frame) < segment + 14 or frame[segment + 13] & (_SYN | _ACK) != _SYN:
        return None
    return Opening(str(source), struct.unpack_from("!H", frame, segment + 2)[0])
