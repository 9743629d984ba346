"""The socket beside an ipc link: who is there, descriptors, bells, signs of life, and the proof of an end.

    sender                                 receiver
      connect                                                        abstract Unix socket, this user only
                    ◀── version, challenge ──
                    ── signed hello ──▶    verifies it               (link_auth)
                    ◀── proof, a page ──   with a random half        mapping it proves the same host
      fills the other half
                    ── filled ──▶          sees its page filled
                    ◀── answer, memory ──                            or, at any step, the reason why not
                    ── ATTACHED ──▶
                    ◀── BELL, BEAT ──▶                               as long as the link lives
                    ◀── ERROR ──                                     the receiver broke it off
                    ── UNMAPPED ──▶ end of file                      the sender can write no more

A beat goes out every `BEAT_S`, by a thread that does nothing else, however busy its loop is. An end that
shows no sign of life for `SILENT_S` is looked at: the kernel says whether its process is stopped. If it is
not, it may be compiling, with Python's lock in its hand; it has `DEAF_S`.
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

from baton.errors import BatonError, ErrorKind
from kvtransfer.protocol.addresses import IPC_SCHEME
from kvtransfer.protocol.frames import MAX_REASON_BYTES

TRANSPORT = "ipc"

# As grpc's: so long until the other's process answers at all, whatever its loop does.
CONNECT_S = 2.0
BEAT_S = 0.5
SILENT_S = 1.75
DEAF_S = 10.0

# Begins the listener's first message, before the challenge.
VERSION = b"baton-ipc-4 "

_LENGTH = struct.Struct("<BI")
_MAX_MESSAGE = 1 << 16
_ERROR = struct.Struct("<BBH")
_PEER = struct.Struct("3i")
_READ = 4096


class Word(IntEnum):
    """What is said once the link is open; each a byte, ERROR with a kind and a text behind it."""

    BELL = 1
    BEAT = 2
    ATTACHED = 3
    UNMAPPED = 4
    ERROR = 5


def realm() -> str:
    """What two processes have in common that may find each other's abstract sockets: a running kernel and a
    network namespace."""
    kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.stat("/proc/self/ns/net").st_ino
    return hashlib.blake2b(f"{kernel}/{namespace}".encode(), digest_size=8).hexdigest()


def address_of(name: str) -> str:
    """A listener's; senders of other realms need not try it."""
    return f"{IPC_SCHEME}{realm()}/{name}"


def socket_name(address: str) -> str:
    """The abstract socket's name: nothing in the file system, and gone with its listener."""
    return "\0" + address.removeprefix(IPC_SCHEME)


# -- opening ------------------------------------------------------------------------------------------


def send_message(sock: socket.socket, kind: int, body: bytes, descriptor: int | None = None) -> None:
    """One message of the handshake, with a descriptor or without."""
    message = _LENGTH.pack(kind, len(body)) + body
    rights = [] if descriptor is None else [_rights(descriptor)]
    sent = sock.sendmsg([message], rights)
    if sent < len(message):
        sock.sendall(message[sent:])


def receive_message(sock: socket.socket, timeout_s: float) -> tuple[int, bytes, int | None]:
    """Kind, body, and the descriptor that came along, which is the caller's to close.

    Raises TimeoutError, ConnectionError (the other has gone), OSError.
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
    """A descriptor that is readable once the process that connected is gone.

    PermissionError for a process of another user, or one that this PID namespace does not show. The number
    may have been given out again only if that process is gone already, and then it sends nothing more: who
    gets an answer after this call holds the right one.
    """
    check_user(sock)
    pid, _ = _peer(sock)
    if pid <= 0:
        raise PermissionError("a process of another PID namespace connected")
    return os.pidfd_open(pid)


def check_user(sock: socket.socket) -> None:
    """PermissionError where another user has the other end: it connected, or began to listen there."""
    _, uid = _peer(sock)
    if uid != os.geteuid():
        raise PermissionError(f"a process of user {uid} has the other end")


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end when it connected, or began to listen."""
    pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def _rights(descriptor: int) -> tuple[int, int, bytes]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]).tobytes()


def _receive_rights(sock: socket.socket, deadline: float) -> tuple[bytes, int | None]:
    # Not socket.recv_fds: it does not pass the flag on that keeps the descriptor from our children.
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    item = array.array("i")
    space = socket.CMSG_SPACE(item.itemsize)
    head, ancillary, _, _ = sock.recvmsg(_LENGTH.size, space, socket.MSG_CMSG_CLOEXEC)
    if not head:
        raise ConnectionError("the other end has gone")
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
            raise ConnectionError("the other end has gone")
        received += part
    return received


# -- the open link ------------------------------------------------------------------------------------


class Control:
    """The socket of an open link. One thread waits on it, the loop says words; both `release` it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.ended = False
        self._socket = sock
        self._peer, _ = _peer(sock)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._received = bytearray()
        self._heard_at = self._next_beat = time.monotonic()
        self._users = 2
        self._lock = threading.Lock()

    def say(self, word: Word) -> None:
        """Dropped where the other has gone, or has left so much unread that it need not be woken."""
        self._send(bytes((word,)))

    def say_error(self, error: BatonError) -> None:
        text = error.message.encode()[:MAX_REASON_BYTES]
        self._send(_ERROR.pack(Word.ERROR, error.kind.value, len(text)) + text)

    def finish(self) -> None:
        """The other reads an end of file behind what was said."""
        self._shut(socket.SHUT_WR)

    def end(self) -> None:
        """Ends both directions; `wait` returns at once."""
        self._shut(socket.SHUT_RDWR)

    def release(self) -> None:
        """Called once by each of the two users; what the other still says goes out."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._socket.close()

    def wait(self) -> list[Word | BatonError]:
        """What the other has said, after a beat of waiting at most. Sets `ended` at the end of file."""
        now = time.monotonic()
        if now >= self._next_beat:
            self.say(Word.BEAT)
            self._next_beat = now + BEAT_S
        self._poll.poll(1000 * (self._next_beat - now))
        try:
            data = self._socket.recv(_READ)
            self.ended = not data
        except BlockingIOError:
            return []
        except OSError:
            self.ended = True
            return []
        self._heard_at = time.monotonic()
        self._received += data
        return self._words()

    @property
    def silent(self) -> bool:
        """Whether nothing came for too long. Asked after `wait`, so that our own stop is not the other's."""
        unheard = time.monotonic() - self._heard_at
        return not self.ended and (unheard > DEAF_S or (unheard > SILENT_S and _stopped(self._peer)))

    def _send(self, message: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):  # so never a descriptor that is another's by now
            self._socket.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _shut(self, how: int) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._socket.shutdown(how)

    def _words(self) -> list[Word | BatonError]:
        """Raises ValueError for what is no word."""
        words: list[Word | BatonError] = []
        while self._received:
            word = Word(self._received[0])
            if word is not Word.ERROR:
                del self._received[0]
                words.append(word)
                continue
            if len(self._received) < _ERROR.size:
                break
            _, kind, length = _ERROR.unpack_from(self._received)
            if len(self._received) < _ERROR.size + length:
                break
            text = bytes(self._received[_ERROR.size : _ERROR.size + length])
            del self._received[: _ERROR.size + length]
            words.append(BatonError(ErrorKind(kind), text.decode(errors="replace")))
        return words


def _stopped(pid: int) -> bool:
    """Whether the kernel says that this process is stopped, or traced."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")
