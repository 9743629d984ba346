"""The sender's side of the ipc transport: writes the receiver's window where it lies."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable

import numpy as np
from google.protobuf.message import DecodeError

from baton.device.shared_memory import SharedMemory
from baton.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from kvtransfer.byte_ring import STORES_IN_ORDER
from kvtransfer.frames import (
    Commit,
    FrameError,
    Piece,
    Quiet,
    ReceiverFrame,
    Withdraw,
    decode_from_receiver,
    encode,
    encode_piece_header,
)
from kvtransfer.ipc_control import (
    CONNECT_S,
    HELLO,
    NONCE_BYTES,
    PAGE_BYTES,
    TRANSPORT,
    Control,
    Word,
    address_of,
    answer_to,
    receive_message,
    send_message,
    socket_name,
)
from kvtransfer.ipc_memory import LinkMemory
from kvtransfer.ipc_wire import IpcWire
from kvtransfer.transport import OutOfReachError

_LOG = logging.getLogger(__name__)


class IpcSenderWire(IpcWire):
    """One link at the sender."""

    def __init__(
        self, sock: socket.socket, memory: LinkMemory, response: OpenLinkResponse, wake: Callable[[], None]
    ) -> None:
        super().__init__(memory.sender_rings(response.window_pieces), wake, "receiver")
        self._memory = memory
        self._pieces = response.window_pieces
        self._piece_bytes = response.piece_bytes
        self._control = Control(sock)
        self._control.say(Word.ATTACHED)
        threading.Thread(target=self._wait, args=(self._control,), name="link-control", daemon=True).start()

    def put(self, piece: Piece, payload: memoryview) -> None:
        if self._closed or self._broken is not None:
            return
        # An index that the window does not have is written nowhere: its receiver says what it is.
        if piece.staging < self._pieces:
            start = piece.staging * self._piece_bytes
            source = np.frombuffer(payload, dtype=np.uint8)
            self._memory.window[start : start + len(source)] = source
        self._add(encode_piece_header(piece))

    def tell(self, frame: Commit | Withdraw | Quiet) -> None:
        self._add(encode(frame))

    def hear(self) -> ReceiverFrame | None:
        message = self._take()
        try:
            return None if message is None else decode_from_receiver(message)
        except FrameError as malformed:
            self._garbled(malformed)
            return None

    def close(self) -> None:
        """Unmaps the window, and only then says so: from here on it is the receiver's alone."""
        if self._closed:
            return
        self._closed = True
        self._break(BatonError(ErrorKind.UNAVAILABLE, "the sender closed the link"))
        self._reader.close()
        self._writer.close()
        assert self._control is not None
        try:
            self._memory.unmap()
        except BufferError:  # somebody holds a view of it: the end of this process is the proof then
            _LOG.exception("a link's window stays mapped")
        else:
            self._control.say(Word.UNMAPPED)
        self._control.end()
        self._control.release()

    def _wait(self, control: Control) -> None:
        self._listen(control)
        control.release()


class IpcConnector:
    """Opens links to receivers of this host, this user and this PID namespace."""

    transport = TRANSPORT

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._realm = address_of("")

    def takes(self, address: str) -> bool:
        """Not one of another host, or of another pod of this one."""
        return address.startswith(self._realm)

    def open(
        self, address: str, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, IpcSenderWire]:
        if not STORES_IN_ORDER:
            raise OutOfReachError("this processor does not show stores in their order")
        deadline = time.monotonic() + timeout_s
        sock = _connect(address, min(CONNECT_S, timeout_s))
        try:
            _prove(sock, min(CONNECT_S, deadline - time.monotonic()))
            send_message(sock, 0, request.SerializeToString())
            response, memory = _answer(sock, deadline - time.monotonic())
            return response, IpcSenderWire(sock, memory, response, self._wake)
        except TimeoutError as error:
            _hang_up(sock)
            raise BatonError(ErrorKind.DEADLINE, f"no link to {address}: it takes too long") from error
        except (OSError, ValueError) as error:
            _hang_up(sock)
            raise OutOfReachError(f"no link to {address}: {error}") from error
        except BatonError as error:
            _hang_up(sock)
            error.message = f"no link to {address}: {error.message}"
            raise


def _connect(address: str, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect(socket_name(address))
    except TimeoutError as error:
        sock.close()
        raise BatonError(ErrorKind.UNAVAILABLE, f"no link to {address}: nobody answers there") from error
    except (OSError, ValueError) as error:
        sock.close()
        raise OutOfReachError(f"no link to {address}: {error}") from error
    return sock


def _prove(sock: socket.socket, timeout_s: float) -> None:
    """Shows the listener that we map the very memory that it does, and so are on its host.

    A listener that says nothing is a process that is stopped: no other transport reaches it either.
    """
    try:
        _, hello, descriptor = receive_message(sock, timeout_s)
    except TimeoutError as error:
        raise BatonError(ErrorKind.UNAVAILABLE, f"nobody answers for {timeout_s:g} s") from error
    if descriptor is None:
        raise ValueError("the listener gave no memory")
    try:
        page = SharedMemory.attach(descriptor)
        if hello != HELLO or page.size != PAGE_BYTES:
            raise ValueError("the listener speaks another version")
        nonce = page.bytes[:NONCE_BYTES].tobytes()
        page.bytes[NONCE_BYTES : 2 * NONCE_BYTES] = np.frombuffer(answer_to(nonce), dtype=np.uint8)
        page.unmap()
    finally:
        os.close(descriptor)


def _answer(sock: socket.socket, timeout_s: float) -> tuple[OpenLinkResponse, LinkMemory]:
    kind, body, descriptor = receive_message(sock, timeout_s)
    if kind:
        raise BatonError(ErrorKind(kind), body.decode(errors="replace"))
    if descriptor is None:
        raise ValueError("the receiver gave no memory")
    try:
        response = OpenLinkResponse.FromString(body)
    except DecodeError as error:
        os.close(descriptor)
        raise ValueError("the receiver's answer cannot be read") from error
    return response, LinkMemory.attach(descriptor, response.window_pieces * response.piece_bytes)


def _hang_up(sock: socket.socket) -> None:
    """Nothing is mapped: should the receiver have granted a link meanwhile, it need not wait for our end."""
    try:
        sock.setblocking(False)
        sock.send(bytes((Word.UNMAPPED,)), socket.MSG_NOSIGNAL)
    except OSError:
        pass  # it has gone
    sock.close()
