"""The receiver's side of the ipc transport: exports its staging to senders of this host.

accept ──▶ a thread for each sender: authenticates it, probes shared memory ──▶ queue ──▶ the loop answers
                              └─ granted: sends the memory, then waits on the socket until the fence
                                 (`receiver_wire`)
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from google.protobuf.message import DecodeError

from baton.base.errors import BatonError, ErrorKind
from baton.device.streams.link_device import LinkDevice
from baton.v1.transfer_pb2 import (
    OpenLinkRequest,
    OpenLinkResponse,
    SignedOpenLinkRequest,
    SignedOpenLinkResponse,
)
from kvtransfer.device.piece_memory import PieceMemory
from kvtransfer.link.interfaces import LinkRequest
from kvtransfer.link.open_requests import LinkRequestQueue, RejectedCallers
from kvtransfer.link.settings import ListenerSettings
from kvtransfer.link.staging import Staging, WindowMemory
from kvtransfer.protocol.addresses import IPC, Endpoint
from kvtransfer.protocol.link_auth import Challenges
from kvtransfer.transports.ipc.byte_ring import STORES_IN_ORDER
from kvtransfer.transports.ipc.control import (
    CONNECT_TIMEOUT_S,
    VERSION,
    address_of,
    peer_pidfd,
    receive_message,
    send_message,
    socket_name,
)
from kvtransfer.transports.ipc.memory import LinkMemory
from kvtransfer.transports.ipc.probe_page import ProbePage
from kvtransfer.transports.ipc.receiver_wire import IpcReceiverWire

_LOG = logging.getLogger(__name__)

# How many senders may be connecting at once, besides those that have links.
_MAX_CONNECTING = 16
_STOP_S = 2.0
_RETRY_S = 0.05


class _IpcLinkRequest:
    """A sender's request between its thread, which waits, and the loop, which answers."""

    def __init__(self, request: OpenLinkRequest, device: LinkDevice | None, wake: Callable[[], None]) -> None:
        self.request = request
        self.device = device
        self.answer: Future[tuple[OpenLinkResponse, IpcReceiverWire]] = Future()
        self._wake = wake
        self._memory: LinkMemory | None = None

    def window(self, pieces: int, piece_bytes: int) -> WindowMemory:
        try:
            if self.device is None:
                self._memory = LinkMemory.create(pieces * piece_bytes)
                return self._memory.window
            window = PieceMemory(self.device, pieces, piece_bytes)
            self._memory = LinkMemory.create_for_device(window.memory.handle(), pieces)
            return window
        except (OSError, RuntimeError) as error:
            raise BatonError(ErrorKind.OVERLOADED, f"no memory for a link: {error}") from error

    def grant(self, response: OpenLinkResponse, staging: Staging) -> IpcReceiverWire:
        assert self._memory is not None, "staging is made of the request's window"
        on_device = self.device is not None
        wire = IpcReceiverWire(self._memory, staging, self._wake, on_device=on_device)
        self.answer.set_result((response, wire))
        return wire

    def refuse(self, error: BatonError) -> None:
        self.answer.set_exception(error)


class IpcListener:
    """An abstract socket: not in the file system, gone with its process, and for this user alone."""

    def __init__(self, settings: ListenerSettings, device: LinkDevice | None = None) -> None:
        """`device`: where blocks go that come from a device. BatonError(INVALID) where this machine cannot
        have such links."""
        if not STORES_IN_ORDER:
            raise BatonError(ErrorKind.INVALID, "ipc needs a processor with ordered stores")
        self.endpoint = Endpoint(IPC, address_of(f"baton-{secrets.token_hex(16)}"))
        self._wake = settings.wake
        self._device = device
        self._auth = settings.auth
        self._challenges = Challenges()
        self.rejected = RejectedCallers(IPC)
        self._requests: LinkRequestQueue[_IpcLinkRequest] = LinkRequestQueue(
            _MAX_CONNECTING, settings.peer_timeout_s, settings.wake
        )
        self._lock = threading.Lock()
        self._wires: list[IpcReceiverWire] = []
        self._threads: set[threading.Thread] = set()
        self._most_threads = settings.max_links + _MAX_CONNECTING
        self._closing = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(socket_name(self.endpoint.address))
        self._socket.listen(_MAX_CONNECTING)
        self._accepting = threading.Thread(target=self._accept, name="link-accept", daemon=True)
        self._accepting.start()

    # -- the loop ---------------------------------------------------------------------------------

    def next_request(self) -> LinkRequest | None:
        return self._requests.next()

    def close(self) -> None:
        closing = BatonError(ErrorKind.UNAVAILABLE, "the receiver closes")
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._socket.shutdown(socket.SHUT_RDWR)
        self._accepting.join(_STOP_S)
        self._socket.close()
        self._requests.refuse_all(closing)
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
                time.sleep(_RETRY_S)  # the caller has gone, or no descriptor is free now
                continue
            with self._lock:
                self._threads = {thread for thread in self._threads if thread.is_alive()}
                if len(self._threads) >= self._most_threads:
                    sock.close()
                    continue
                thread = threading.Thread(
                    target=self._handshake, args=(sock,), name="link-control", daemon=True
                )
                self._threads.add(thread)
                thread.start()

    def _handshake(self, sock: socket.socket) -> None:
        """Handles one sender, from its connection on."""
        try:
            sender = peer_pidfd(sock)
        except OSError as error:
            self.rejected.add(str(error))
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

    def _grant(self, sock: socket.socket) -> tuple[SignedOpenLinkResponse, IpcReceiverWire] | None:
        """The handshake, up to the loop's grant; None where there was none, and the socket was closed."""
        try:
            hello = _receive_hello(sock, self._challenges.issue())
            request = self._auth.verify_hello(hello, self._challenges)
            reached = _probe(sock, self._auth.probe_proof(hello), self._device)
            response, wire = self._ask(
                _IpcLinkRequest(request, self._device if reached else None, self._wake)
            )
            return self._auth.answer(hello, response), wire
        except (OSError, ValueError) as error:
            _LOG.debug("link_handshake_failed", extra={"reason": str(error)})
            sock.close()
            return None
        except BatonError as refused:
            if refused.kind is ErrorKind.UNAUTHENTICATED:
                self.rejected.add(refused.message)
            with contextlib.suppress(OSError):
                send_message(sock, refused.kind.value, refused.message.encode())
            sock.close()
            return None

    def _ask(self, request: _IpcLinkRequest) -> tuple[OpenLinkResponse, IpcReceiverWire]:
        granted = self._requests.ask(request, request.answer)
        with self._lock:
            self._wires.append(granted[1])
            if self._closing:
                granted[1].close(BatonError(ErrorKind.UNAVAILABLE, "the receiver closes"))
        return granted


def _receive_hello(sock: socket.socket, challenge: bytes) -> SignedOpenLinkRequest:
    """Sends the challenge; the sender's signed request, not verified. ValueError, OSError."""
    sock.settimeout(CONNECT_TIMEOUT_S)
    send_message(sock, 0, VERSION + challenge)
    _, body, descriptor = receive_message(sock, CONNECT_TIMEOUT_S)
    if descriptor is not None:
        os.close(descriptor)
    try:
        return SignedOpenLinkRequest.FromString(body)
    except DecodeError as error:
        raise ValueError("the request cannot be parsed") from error


def _probe(sock: socket.socket, proof: bytes, device: LinkDevice | None) -> bool:
    """Has the sender prove that it maps this process's memory; whether its device reaches `device`.
    ValueError, OSError."""
    page = ProbePage(device)
    try:
        send_message(sock, 0, proof, page.memory.fd)
    finally:
        page.memory.drop_descriptor()
    _, _, descriptor = receive_message(sock, CONNECT_TIMEOUT_S)
    if descriptor is not None:
        os.close(descriptor)
    if not page.answered():
        raise ValueError("the sender does not map this process's memory")
    return device is not None and page.device_reached()
