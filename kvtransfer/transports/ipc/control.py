"""The socket of an ipc link: handshake, descriptors, doorbells, heartbeats, and the proof of an end.

    sender                                 receiver
      connect                                                        abstract Unix socket, same user only
                    ◀── version, challenge ──
                    ── signed hello ──▶    verifies it               (`protocol.link_auth`)
                    ◀── proof, a page ──   with a random half        mapping it proves the same host
      fills the other half
                    ── filled ──▶          reads its page
                    ◀── answer, memory ──                            or, at any step, the reason for a refusal
                    ── ATTACHED ──▶
                    ◀── DOORBELL, HEARTBEAT ──▶                      as long as the link lives
                    ◀── ERROR ──                                     the receiver broke the link
                    ── UNMAPPED ──▶ end of file                      the sender can no longer write

A heartbeat is sent every `HEARTBEAT_S`, by a thread that does nothing else, however busy its loop is. When
an end has been silent for `SILENCE_S`, the kernel is asked whether its process is stopped. If not, it may be
compiling while holding the GIL; it has `UNRESPONSIVE_S`.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import os
import select
import socket
import struct
import threading
import time
from enum import IntEnum
from pathlib import Path

from baton.base.errors import BatonError, ErrorKind
from baton.base.process_stat import process_stat
from kvtransfer.protocol.frames import MAX_REASON_BYTES

# As for grpc: how long the other process may take to answer at all, whatever its loop does.
CONNECT_TIMEOUT_S = 2.0
HEARTBEAT_S = 0.5
SILENCE_S = 1.75
UNRESPONSIVE_S = 10.0

# Starts the listener's first message, before the challenge.
VERSION = b"baton-ipc-4 "

_LENGTH = struct.Struct("<BI")
_MAX_MESSAGE = 1 << 16
_ERROR = struct.Struct("<BBH")
_PEER = struct.Struct("3i")
_READ = 4096


class ControlByte(IntEnum):
    """Messages of an open link, a byte each; ERROR is followed by a kind and a text."""

    DOORBELL = 1
    HEARTBEAT = 2
    ATTACHED = 3
    UNMAPPED = 4
    ERROR = 5


def socket_namespace() -> str:
    """Identifies the running kernel and its network namespace: processes that share both can reach each
    other's abstract sockets."""
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.stat("/proc/self/ns/net").st_ino
    return hashlib.blake2b(f"{kernel}/{namespace}".encode(), digest_size=8).hexdigest()


def address_of(name: str) -> str:
    """The address of a listener: NAMESPACE/NAME; only senders of the same namespace can reach it."""
    return f"{socket_namespace()}/{name}"


def socket_name(address: str) -> str:
    """The abstract socket of an address: not in the file system, and gone with its listener."""
    return "\0" + address


# -- opening ------------------------------------------------------------------------------------------


def send_message(sock: socket.socket, kind: int, body: bytes, descriptor: int | None = None) -> None:
    """Sends one message of the handshake, with a descriptor or without."""
    message = _LENGTH.pack(kind, len(body)) + body
    sent = sock.send(message) if descriptor is None else socket.send_fds(sock, [message], [descriptor])
    if sent < len(message):
        sock.sendall(message[sent:])


def receive_message(sock: socket.socket, timeout_s: float) -> tuple[int, bytes, int | None]:
    """Receives one message of the handshake: kind, body, and its descriptor, which the caller must close.

    TimeoutError, ConnectionError (the other end closed it), OSError.
    """
    deadline = time.monotonic() + timeout_s
    head, descriptor = _receive_rights(sock, deadline)
    try:
        head += _receive(sock, _LENGTH.size - len(head), deadline)
        kind, length = _LENGTH.unpack(head)
        if length > _MAX_MESSAGE:
            raise ConnectionError(f"a message of {length} bytes")
        return kind, _receive(sock, length, deadline), descriptor
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        raise


def peer_pidfd(sock: socket.socket) -> int:
    """A pidfd of the process that connected: readable once that process has ended.

    PermissionError for a process of another user, or of another PID namespace. The process id can have been
    reused only if that process has ended, and then it sends nothing more: after the next message from it the
    pidfd is known to be right.
    """
    check_user(sock)
    pid, _ = _peer(sock)
    if pid <= 0:
        raise PermissionError("a process of another PID namespace connected")
    return os.pidfd_open(pid)


def check_user(sock: socket.socket) -> None:
    """Checks the user of the other end. Raises PermissionError if a process of another user connected, or
    listens."""
    _, uid = _peer(sock)
    if uid != os.geteuid():
        raise PermissionError(f"the other end is a process of user {uid}")


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Process and user ids of the other end, as of when it connected or started to listen."""
    pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def _receive_rights(sock: socket.socket, deadline: float) -> tuple[bytes, int | None]:
    # Not socket.recv_fds, which cannot pass MSG_CMSG_CLOEXEC.
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    item = array.array("i")
    space = socket.CMSG_SPACE(item.itemsize)
    head, ancillary, _, _ = sock.recvmsg(_LENGTH.size, space, socket.MSG_CMSG_CLOEXEC)
    if not head:
        raise ConnectionError("the other end closed the connection")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            item.frombytes(data[: item.itemsize])
    return head, item[0] if item else None


def _receive(sock: socket.socket, length: int, deadline: float) -> bytes:
    received = b""
    while len(received) < length:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        part = sock.recv(length - len(received))
        if not part:
            raise ConnectionError("the other end closed the connection")
        received += part
    return received


# -- the open link ------------------------------------------------------------------------------------


class Control:
    """The socket of an open link. One thread waits on it, the loop sends; both must `release` it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.ended = False
        self._socket = sock
        self._peer, _ = _peer(sock)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._received = bytearray()
        self._received_at = self._next_heartbeat = time.monotonic()
        self._users = 2
        self._lock = threading.Lock()

    def send(self, byte: ControlByte) -> None:
        """Sends a control byte; dropped if the peer has ended, or has enough unread that it needs no
        wake-up."""
        self._send(bytes((byte,)))

    def send_error(self, error: BatonError) -> None:
        """Sends why the link is broken."""
        text = error.message.encode()[:MAX_REASON_BYTES]
        self._send(_ERROR.pack(ControlByte.ERROR, error.kind.value, len(text)) + text)

    def finish(self) -> None:
        """Ends sending: the peer reads an end of file after what was sent."""
        self._shut(socket.SHUT_WR)

    def end(self) -> None:
        """Ends both directions, so that `wait` returns at once."""
        self._shut(socket.SHUT_RDWR)

    def release(self) -> None:
        """Gives up one of the two users' shares; the last call closes the socket."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._socket.close()

    def wait(self) -> list[ControlByte | BatonError]:
        """Returns the bytes and errors that the peer has sent; blocks for at most a heartbeat's interval.
        Sets `ended` at the end of file. ValueError for an unknown byte."""
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self.send(ControlByte.HEARTBEAT)
            self._next_heartbeat = now + HEARTBEAT_S
        self._poll.poll(1000 * (self._next_heartbeat - now))
        try:
            data = self._socket.recv(_READ)
            self.ended = not data
        except BlockingIOError:
            return []
        except OSError:
            self.ended = True
            return []
        self._received_at = time.monotonic()
        self._received += data
        return self._parse()

    @property
    def silent(self) -> bool:
        """True if nothing came for too long. Read after `wait`, so that a stop of this process does not
        count."""
        silent_s = time.monotonic() - self._received_at
        return not self.ended and (
            silent_s > UNRESPONSIVE_S or (silent_s > SILENCE_S and _stopped(self._peer))
        )

    def _send(self, message: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):  # the lock: never on a reused descriptor
            self._socket.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _shut(self, how: int) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._socket.shutdown(how)

    def _parse(self) -> list[ControlByte | BatonError]:
        """ValueError for an unknown byte."""
        parsed: list[ControlByte | BatonError] = []
        while self._received:
            byte = ControlByte(self._received[0])
            if byte is not ControlByte.ERROR:
                del self._received[0]
                parsed.append(byte)
                continue
            if len(self._received) < _ERROR.size:
                break
            _, kind, length = _ERROR.unpack_from(self._received)
            if len(self._received) < _ERROR.size + length:
                break
            text = bytes(self._received[_ERROR.size : _ERROR.size + length])
            del self._received[: _ERROR.size + length]
            parsed.append(BatonError(ErrorKind(kind), text.decode(errors="replace")))
        return parsed


def _stopped(pid: int) -> bool:
    """True if this process is stopped or traced."""
    stat = process_stat(pid)
    return stat is not None and stat.state in "Tt"
