"""The sender's side of the ipc transport: maps the receiver's window and writes it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from google.protobuf.message import DecodeError

from baton.base.errors import BatonError, ErrorKind
from baton.device.shared_memory import SharedMemory
from baton.v1.transfer_pb2 import (
    OpenLinkRequest,
    OpenLinkResponse,
    SignedOpenLinkRequest,
    SignedOpenLinkResponse,
)
from kvtransfer.device.blocks import LinkBlocks
from kvtransfer.link.interfaces import UnreachableError
from kvtransfer.protocol.addresses import IPC, Endpoint
from kvtransfer.protocol.link_auth import LinkAuth
from kvtransfer.transports.ipc.byte_ring import STORES_IN_ORDER
from kvtransfer.transports.ipc.control import (
    CONNECT_TIMEOUT_S,
    VERSION,
    ControlByte,
    address_of,
    check_user,
    receive_message,
    send_message,
    socket_name,
)
from kvtransfer.transports.ipc.device_sender_wire import IpcDeviceSenderWire
from kvtransfer.transports.ipc.memory import LinkMemory, bytes_for_device
from kvtransfer.transports.ipc.probe_page import PAGE_BYTES, fill
from kvtransfer.transports.ipc.sender_wire import IpcSenderWire


class IpcConnector:
    """Opens links to receivers of this host, this user and this PID namespace."""

    transport = IPC

    def __init__(
        self,
        wake: Callable[[], None],
        blocks: LinkBlocks | None = None,
        auth: LinkAuth | None = None,
    ) -> None:
        """`blocks`: where the blocks lie in device memory."""
        self._wake = wake
        self._auth = auth or LinkAuth()
        self._blocks = blocks
        self._namespace = address_of("")

    def reaches(self, endpoint: Endpoint) -> bool:
        """False for other hosts, and for other pods of this one."""
        return endpoint.transport == IPC and endpoint.address.startswith(self._namespace)

    def open(
        self, endpoint: Endpoint, request: OpenLinkRequest, timeout_s: float
    ) -> tuple[OpenLinkResponse, IpcSenderWire]:
        if not STORES_IN_ORDER:
            raise UnreachableError("this processor does not order its stores")
        deadline = time.monotonic() + timeout_s
        sock = _connect(endpoint, min(CONNECT_TIMEOUT_S, timeout_s))
        try:
            check_user(sock)
            hello = self._greet(sock, request, min(CONNECT_TIMEOUT_S, deadline - time.monotonic()))
            on_device = self._fill_page(sock, hello, min(CONNECT_TIMEOUT_S, deadline - time.monotonic()))
            answer, descriptor = _answer(sock, deadline - time.monotonic())
            response = self._verified(hello, answer, descriptor)
            return response, self._wire(sock, response, descriptor, on_device)
        except TimeoutError as error:
            _hang_up(sock)
            raise BatonError(ErrorKind.DEADLINE, f"no link to {endpoint}: timed out") from error
        except (OSError, ValueError) as error:
            _hang_up(sock)
            raise UnreachableError(f"no link to {endpoint}: {error}") from error
        except BatonError as error:
            _hang_up(sock)
            error.message = f"no link to {endpoint}: {error.message}"
            raise

    def _greet(
        self, sock: socket.socket, request: OpenLinkRequest, timeout_s: float
    ) -> SignedOpenLinkRequest:
        """Answers the listener's challenge with the signed request; returns it.

        UNAVAILABLE for a listener that sends nothing: its process is stopped, and no other transport would
        reach it either.
        """
        try:
            _, greeting, descriptor = receive_message(sock, timeout_s)
        except TimeoutError as error:
            raise BatonError(ErrorKind.UNAVAILABLE, f"no answer for {timeout_s:g} s") from error
        if descriptor is not None:
            os.close(descriptor)
        if not greeting.startswith(VERSION):
            raise ValueError("the listener has another version")
        hello = self._auth.hello(request, greeting.removeprefix(VERSION))
        send_message(sock, 0, hello.SerializeToString())
        return hello

    def _fill_page(self, sock: socket.socket, hello: SignedOpenLinkRequest, timeout_s: float) -> bool:
        """Proves to the listener that this process maps its memory, and so is on its host; whether blocks go
        from this process's device to the listener's."""
        proof, descriptor = _answer(sock, timeout_s)
        try:
            self._auth.verify_probe(hello, proof)
            page = SharedMemory.attach(descriptor)
            if page.size != PAGE_BYTES:
                raise ValueError("the listener's page has another size")
            on_device = fill(page, self._blocks.device if self._blocks is not None else None)
            page.unmap()
        finally:
            os.close(descriptor)
        send_message(sock, 0, b"")
        return on_device

    def _verified(self, hello: SignedOpenLinkRequest, answer: bytes, descriptor: int) -> OpenLinkResponse:
        """The receiver's response; closes the descriptor where it is not authentic."""
        try:
            return self._auth.verify_answer(hello, SignedOpenLinkResponse.FromString(answer))
        except DecodeError as error:
            os.close(descriptor)
            raise ValueError("the receiver's answer cannot be parsed") from error
        except BatonError:
            os.close(descriptor)
            raise

    def _wire(
        self, sock: socket.socket, response: OpenLinkResponse, descriptor: int, on_device: bool
    ) -> IpcSenderWire:
        pieces, piece_bytes = response.window_pieces, response.piece_bytes
        if not on_device or self._blocks is None:
            memory = LinkMemory.attach(descriptor, pieces * piece_bytes)
            return IpcSenderWire(sock, memory, response, self._wake)
        memory = LinkMemory.attach(descriptor, bytes_for_device(pieces))
        try:
            # It registers and opens memory.
            with self._blocks.device.launching:
                return IpcDeviceSenderWire(sock, memory, response, self._wake, self._blocks)
        except RuntimeError as error:
            raise OSError(f"the device failed: {error}") from error


def _connect(endpoint: Endpoint, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout_s)
    try:
        sock.connect(socket_name(endpoint.address))
    except TimeoutError as error:
        sock.close()
        raise BatonError(ErrorKind.UNAVAILABLE, f"no link to {endpoint}: no answer") from error
    except (OSError, ValueError) as error:
        sock.close()
        raise UnreachableError(f"no link to {endpoint}: {error}") from error
    return sock


def _answer(sock: socket.socket, timeout_s: float) -> tuple[bytes, int]:
    """The receiver's next message and its descriptor, which the caller must close. BatonError: a refusal."""
    kind, body, descriptor = receive_message(sock, timeout_s)
    if kind:
        if descriptor is not None:
            os.close(descriptor)
        raise BatonError(ErrorKind(kind), body.decode(errors="replace"))
    if descriptor is None:
        raise ValueError("the receiver sent no descriptor")
    return body, descriptor


def _hang_up(sock: socket.socket) -> None:
    """Closes the socket, and reports that nothing is mapped: if the receiver has granted the link meanwhile,
    it need not wait for the end of this process."""
    try:
        sock.setblocking(False)
        sock.send(bytes((ControlByte.UNMAPPED,)), socket.MSG_NOSIGNAL)
    except OSError:
        pass  # the peer has closed it
    sock.close()
