"""The receiver's side of the ipc transport: gives its staging to be written by senders of this host.

    accept ──▶ a thread a sender: who is it, does it map our page ──▶ queue ──▶ the loop grants or refuses
                                  └─ grant: sends the memory, then waits on the socket until the fence

The fence is the sender's word that it has unmapped the window, or the end of its process (a pidfd, taken
when it connected). A sender that is stopped has given neither: its window stays quarantined.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from google.protobuf.message import DecodeError

from baton.device.link_device import LinkDevice
from baton.errors import BatonError, ErrorKind
from baton.v1.transfer_pb2 import OpenLinkRequest, OpenLinkResponse
from kvtransfer.byte_ring import STORES_IN_ORDER
from kvtransfer.frames import FrameError, Piece, ReceiverFrame, SenderFrame, decode_announced, encode
from kvtransfer.ipc_control import (
    BEAT_S,
    CONNECT_S,
    HELLO,
    TRANSPORT,
    Control,
    Word,
    address_of,
    peer_pidfd,
    receive_message,
    send_message,
    socket_name,
)
from kvtransfer.ipc_memory import LinkMemory
from kvtransfer.ipc_page import ListenersPage
from kvtransfer.ipc_wire import IpcWire
from kvtransfer.staging import Staging, Window
from kvtransfer.transport import OpenCall

_LOG = logging.getLogger(__name__)

# Senders that may be connecting at once, beside those that have links.
_CONNECTING = 16
_STOP_S = 2.0
_AGAIN_S = 0.05


class IpcReceiverWire(IpcWire):
    """One link at the receiver."""

    def __init__(
        self, memory: LinkMemory, staging: Staging, wake: Callable[[], None], *, on_device: bool = False
    ) -> None:
        rings = memory.receiver_rings(staging.pieces)
        super().__init__(rings, wake, "sender", between_devices=on_device)
        self._memory = memory
        self._staging = staging
        self._state = threading.Lock()
        self._attached = False
        self._fenced = False
        self._abandoned = False
        # Of a window on a device: what the sender's device found, by staging index.
        self._sums = memory.sums(staging.pieces) if on_device else None
        self._announced: deque[SenderFrame] = deque()

    def hear(self) -> SenderFrame | None:
        if self._announced:
            return self._announced.popleft()
        message = self._take()
        if message is None:
            return None
        try:
            for frame in decode_announced(message):
                self._announced.append(self._landed(frame) if isinstance(frame, Piece) else frame)
        except FrameError as malformed:
            self._garbled(malformed)
        return self._announced.popleft() if self._announced else None

    def _landed(self, piece: Piece) -> Piece:
        """It is the receiver's now. `FrameError`."""
        self._staging.take(piece)
        if self._sums is None:
            return piece
        checksum = int(self._sums[piece.staging])
        return Piece(
            piece.transfer, piece.group, piece.ordinal, piece.offset, piece.length, piece.staging, checksum
        )

    def tell(self, frame: ReceiverFrame) -> None:
        self._add(encode(frame))

    def attached(self) -> bool:
        return self._attached

    def fenced(self) -> bool:
        with self._state:
            return self._closed and (self._fenced or self._control is None)

    def close(self, error: BatonError) -> None:
        with self._state:
            if self._closed:
                return
            self._closed = True
            self._break(error)
            if self._control is None:
                self._memory.drop_descriptor()
            else:
                self._control.say_error(error)
                self._control.finish()
                self._control.release()

    def abandon(self) -> None:
        """The thread that waits for the fence ends without it: the process that needs it closes."""
        self._abandoned = True
        if self._control is not None:
            self._control.end()

    def serve(self, sock: socket.socket, response: OpenLinkResponse, sender: int) -> None:
        """From the grant to the fence, in a thread of its own; `sender` is the pidfd of who connected."""
        control = self._export(sock, response)
        if control is not None:
            self._fenced = self._listen(control) or self._wait_for_fence(control, sender)
            control.release()
        self._wake()

    def _export(self, sock: socket.socket, response: OpenLinkResponse) -> Control | None:
        """Gives the sender the memory; None where the link was closed before, and nobody was given any."""
        with self._state:
            if self._closed:
                sock.close()
                return None
            control = Control(sock)
            with contextlib.suppress(OSError):  # it has gone, and may have the memory all the same
                send_message(sock, 0, response.SerializeToString(), self._memory.descriptor)
            self._memory.drop_descriptor()
            self._control = control  # from here on the loop speaks too
            return control

    def _wait_for_fence(self, control: Control, sender: int) -> bool:
        """Whether the sender can write no more: it is gone, or has woken and unmapped the window."""
        process = select.poll()
        process.register(sender, select.POLLIN)
        while not self._abandoned:
            if process.poll(1000 * BEAT_S if control.ended else 0):
                return True
            if not control.ended:
                with contextlib.suppress(ValueError):
                    if Word.UNMAPPED in control.wait():
                        return True
        return False

    def _heard(self, word: Word) -> None:
        super()._heard(word)
        self._attached |= word is Word.ATTACHED


class _OpenCall:
    """A sender's request between its thread, which waits, and the loop, which answers."""

    def __init__(self, request: OpenLinkRequest, device: LinkDevice | None, wake: Callable[[], None]) -> None:
        self.request = request
        self.device = device
        self.answer: Future[tuple[OpenLinkResponse, IpcReceiverWire]] = Future()
        self._wake = wake
        self._memory: LinkMemory | None = None

    def window(self, pieces: int, piece_bytes: int) -> Window:
        try:
            if self.device is None:
                self._memory = LinkMemory.create(pieces * piece_bytes)
                return self._memory.window
            window = self.device.allocate(pieces * piece_bytes)
            self._memory = LinkMemory.create_beside(window.handle(), pieces)
            return window
        except (OSError, RuntimeError) as error:
            raise BatonError(ErrorKind.OVERLOADED, f"no memory for a link: {error}") from error

    def grant(self, response: OpenLinkResponse, staging: Staging) -> IpcReceiverWire:
        assert self._memory is not None, "staging lies in the window of its call"
        on_device = self.device is not None
        wire = IpcReceiverWire(self._memory, staging, self._wake, on_device=on_device)
        self.answer.set_result((response, wire))
        return wire

    def refuse(self, error: BatonError) -> None:
        self.answer.set_exception(error)


class IpcListener:
    """An abstract socket: in no file system, gone with its process, and for this user alone."""

    transport = TRANSPORT

    def __init__(
        self,
        *,
        peer_timeout_s: float,
        max_links: int,
        wake: Callable[[], None],
        device: LinkDevice | None = None,
    ) -> None:
        """`device`: where blocks are to go that come from a device. `BatonError` INVALID where this machine
        cannot have such links."""
        if not STORES_IN_ORDER:
            raise BatonError(ErrorKind.INVALID, "ipc needs a processor that shows stores in their order")
        self.address = address_of(f"baton-{secrets.token_hex(16)}")
        self._timeout = peer_timeout_s
        self._wake = wake
        self._device = device
        self._calls: queue.Queue[_OpenCall] = queue.Queue(_CONNECTING)
        self._lock = threading.Lock()
        self._wires: list[IpcReceiverWire] = []
        self._threads: set[threading.Thread] = set()
        self._most_threads = max_links + _CONNECTING
        self._closing = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(socket_name(self.address))
        self._socket.listen(_CONNECTING)
        self._accepting = threading.Thread(target=self._accept, name="link-accept", daemon=True)
        self._accepting.start()

    # -- the loop ---------------------------------------------------------------------------------

    def next_call(self) -> OpenCall | None:
        try:
            return self._calls.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        closing = BatonError(ErrorKind.UNAVAILABLE, "the receiver closes")
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._socket.shutdown(socket.SHUT_RDWR)
        self._accepting.join(_STOP_S)
        self._socket.close()
        while (call := self.next_call()) is not None:
            call.refuse(closing)
        with self._lock:
            wires = list(self._wires)
        for wire in wires:
            wire.close(closing)
            wire.abandon()

    # -- threads ----------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                if self._closing:
                    return
                time.sleep(_AGAIN_S)  # the caller has gone, or descriptors are short for a moment
                continue
            with self._lock:
                self._threads = {thread for thread in self._threads if thread.is_alive()}
                if len(self._threads) >= self._most_threads:
                    sock.close()
                    continue
                thread = threading.Thread(target=self._meet, args=(sock,), name="link-control", daemon=True)
                self._threads.add(thread)
                thread.start()

    def _meet(self, sock: socket.socket) -> None:
        """One sender, from its connection on."""
        try:
            sender = peer_pidfd(sock)
        except OSError as error:
            _LOG.warning("no ipc link: %s", error)
            sock.close()
            return
        try:
            granted = self._grant(sock)
            if granted is not None:
                response, wire = granted
                wire.serve(sock, response, sender)
                with self._lock:
                    self._wires.remove(wire)
        finally:
            os.close(sender)

    def _grant(self, sock: socket.socket) -> tuple[OpenLinkResponse, IpcReceiverWire] | None:
        """The loop's answer; None where the socket is closed again."""
        try:
            request, reached = _hear_request(sock, self._device)
            call = _OpenCall(request, self._device if reached else None, self._wake)
        except (OSError, ValueError) as error:
            _LOG.info("a sender came and asked for nothing: %s", error)
            sock.close()
            return None
        try:
            return self._ask(call)
        except BatonError as refused:
            with contextlib.suppress(OSError):
                send_message(sock, refused.kind.value, refused.message.encode())
            sock.close()
            return None

    def _ask(self, call: _OpenCall) -> tuple[OpenLinkResponse, IpcReceiverWire]:
        try:
            self._calls.put_nowait(call)
            self._wake()
            granted = call.answer.result(timeout=self._timeout)
        except queue.Full:
            raise BatonError(ErrorKind.OVERLOADED, "too many links are being opened") from None
        except FutureTimeoutError:
            raise BatonError(ErrorKind.DEADLINE, "the receiver did not answer in time") from None
        with self._lock:
            self._wires.append(granted[1])
            if self._closing:
                granted[1].close(BatonError(ErrorKind.UNAVAILABLE, "the receiver closes"))
        return granted


def _hear_request(sock: socket.socket, device: LinkDevice | None) -> tuple[OpenLinkRequest, bool]:
    """What the sender asks, once it has shown that it maps our memory, and whether its device reaches ours.
    ValueError, OSError."""
    page = ListenersPage(device)
    try:
        sock.settimeout(CONNECT_S)
        send_message(sock, 0, HELLO, page.memory.fd)
    finally:
        page.memory.drop_descriptor()
    _, body, descriptor = receive_message(sock, CONNECT_S)
    if descriptor is not None:
        os.close(descriptor)
    if not page.answered():
        raise ValueError("it does not map our memory")
    try:
        return OpenLinkRequest.FromString(body), device is not None and page.device_reached()
    except DecodeError as error:
        raise ValueError("its request cannot be read") from error
