"""The binding, over a library that only notes what it is asked; tests of links over NCCL ask NCCL itself."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from baton.device.nccl.nccl_library import UNIQUE_ID_BYTES, Communicator, Config, Nccl, NcclError, Result

_HANDLE = 0xBEEF


class _Library:
    """NCCL's functions as ctypes calls them."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.result = Result.SUCCESS
        self.state = Result.SUCCESS
        self.released = threading.Event()
        self.released.set()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nccl"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            return int(self.result)

        return call

    def ncclGetVersion(self, version: Any) -> int:  # noqa: N802
        ctypes.cast(version, ctypes.POINTER(ctypes.c_int))[0] = 22809
        return 0

    def ncclGetUniqueId(self, made: Any) -> int:  # noqa: N802
        ctypes.memmove(made, b"\x05" * UNIQUE_ID_BYTES, UNIQUE_ID_BYTES)
        return 0

    def ncclCommInitRankConfig(self, handle: Any, ranks: int, name: Any, rank: int, config: Any) -> int:  # noqa: N802
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = _HANDLE
        given = ctypes.cast(config, ctypes.POINTER(Config)).contents
        self.calls.append(("init", (ranks, bytes(name), rank, Config.from_buffer_copy(given))))
        return int(Result.IN_PROGRESS)

    def ncclCommGetAsyncError(self, handle: Any, error: Any) -> int:  # noqa: N802
        ctypes.cast(error, ctypes.POINTER(ctypes.c_int))[0] = int(self.state)
        return 0

    def ncclCommAbort(self, handle: Any) -> int:  # noqa: N802
        self.calls.append(("abort", (handle.value,)))
        self.released.wait(5)
        return int(Result.IN_PROGRESS)

    def ncclGetLastError(self, handle: Any) -> bytes:  # noqa: N802
        return b"the peer has gone\n"


@pytest.fixture
def library() -> Iterator[_Library]:
    made = _Library()
    yield made
    made.released.set()


def _nccl(library: _Library) -> Nccl:
    return Nccl(cast(Any, library))


def _made(library: _Library) -> Communicator:
    library.state = Result.SUCCESS
    return _nccl(library).communicator(b"\x07" * UNIQUE_ID_BYTES, 1, 2, max_ctas=4)


def test_a_communicator_is_requested_in_the_librarys_layout(library: _Library) -> None:
    """The configuration is 80 bytes of 2.28's layout, non-blocking; what we leave open is undefined."""
    _made(library)
    (_, (ranks, name, rank, config)) = next(call for call in library.calls if call[0] == "init")
    assert (ranks, rank, name) == (2, 1, b"\x07" * UNIQUE_ID_BYTES)
    undefined = -(1 << 31)
    assert (ctypes.sizeof(config), config.size, config.magic, config.version) == (80, 80, 0xCAFEBEEF, 22800)
    assert (config.blocking, config.max_ctas, config.min_ctas, config.nvls_ctas) == (
        0,
        4,
        undefined,
        undefined,
    )
    assert (config.net_name, config.name) == (None, None)


def test_an_id_comes_from_the_library(library: _Library) -> None:
    assert _nccl(library).unique_id() == b"\x05" * UNIQUE_ID_BYTES
    with pytest.raises(ValueError):
        _nccl(library).communicator(b"short", 0, 2, max_ctas=4)


def test_transfers_pass_address_size_peer_and_stream(library: _Library) -> None:
    made = _made(library)
    library.result = Result.IN_PROGRESS  # it goes on: no failure
    made.send(0x1000, 1 << 33, 1, 0x77)
    made.receive(0x2000, 5, 0, 0x78)
    plain = [(name, [getattr(a, "value", a) for a in arguments]) for name, arguments in library.calls[-2:]]
    assert plain == [
        ("ncclSend", [0x1000, 1 << 33, 1, 1, _HANDLE, 0x77]),
        ("ncclRecv", [0x2000, 5, 1, 0, _HANDLE, 0x78]),
    ]


def test_a_failed_call_reports_the_reason(library: _Library) -> None:
    made = _made(library)
    library.state = Result.REMOTE_ERROR
    assert made.state() is Result.REMOTE_ERROR
    library.result = Result.SYSTEM_ERROR
    with pytest.raises(NcclError, match="ncclSend: system_error: the peer has gone") as failed:
        made.send(0, 1, 0, 0)
    assert failed.value.result is Result.SYSTEM_ERROR


def test_after_an_abort_nothing_touches_the_communicator(library: _Library) -> None:
    """Even while the library has not returned from it: what it frees is not ours any more."""
    made = _made(library)
    library.released.clear()
    aborting = threading.Thread(target=made.abort, daemon=True)
    aborting.start()
    while ("abort", (_HANDLE,)) not in library.calls:
        aborting.join(0.001)
    before = len(library.calls)
    for call in (made.state, lambda: made.send(0, 1, 0, 0), lambda: made.receive(0, 1, 0, 0)):
        with pytest.raises(NcclError, match="ended"):
            call()
    made.abort()
    assert len(library.calls) == before
    assert aborting.is_alive()
    library.released.set()
    aborting.join(5)
    assert not aborting.is_alive()


def test_a_blocked_call_returns_before_anything_is_freed(library: _Library) -> None:
    """The device waits for what the abort ends, and the call for the device."""
    made = _made(library)
    revoked = threading.Event()

    def stuck(*arguments: Any) -> int:
        library.calls.append(("stuck", ()))
        assert revoked.wait(5)
        library.calls.append(("returned", ()))
        return 0

    def revoke(handle: Any, flags: int) -> int:
        library.calls.append(("revoke", (handle.value,)))
        revoked.set()
        return 0

    library.__dict__.update(ncclRecv=stuck, ncclCommRevoke=revoke)
    loop = threading.Thread(target=made.receive, args=(0, 64, 1, 0), daemon=True)
    loop.start()
    while ("stuck", ()) not in library.calls:
        loop.join(0.001)
    made.abort()
    loop.join(5)
    assert [name for name, _ in library.calls[-4:]] == ["stuck", "revoke", "returned", "abort"]
