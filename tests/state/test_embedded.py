"""The embedded server: private, quick to go, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis.exceptions import OutOfMemoryError

from baton.base.errors import BatonError, ErrorKind
from baton.base.process_stat import is_running
from baton.state import JournalRecord, Member, new_incarnation
from baton.state.embedded import EmbeddedServer
from tests.state.opened import open_state
from tests.state.raw import raw

_PARENT = """
import asyncio
from baton.state.embedded import EmbeddedServer

async def main():
    server = await EmbeddedServer.start()
    print(server.pid, flush=True)
    await server.wait()

asyncio.run(main())
"""


async def test_it_answers_only_to_its_password_and_only_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server = await EmbeddedServer.start()
    try:
        assert urlsplit(server.url).hostname == "127.0.0.1"
        state = await open_state(server.url)
        await state.check()
        await state.close()
        with pytest.raises(BatonError) as refused:
            await open_state(f"redis://127.0.0.1:{server.port}")
        assert refused.value.kind is ErrorKind.UNAUTHENTICATED
        for reported in ("cmdline", "environ"):
            assert server.password.encode() not in _proc(server.pid, reported)
        assert _listens_on(server.pid, server.port) == {"0100007F"}  # 127.0.0.1, little endian
        assert not os.listdir(tmp_path)
    finally:
        await server.stop()
    assert not is_running(server.pid)
    await server.stop()


def _proc(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


def _listens_on(pid: int, port: int) -> set[str]:
    """The addresses, in hex, on which something listens at `port`; IPv6 included."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            address, _, number = line.split()[1].partition(":")
            if int(number, 16) == port and line.split()[3] == "0A":
                found.add(address)
    return found


async def test_two_do_not_meet() -> None:
    one, two = await asyncio.gather(EmbeddedServer.start(), EmbeddedServer.start())
    assert (one.port, one.password) != (two.port, two.password)
    await asyncio.gather(one.stop(), two.stop())


async def test_a_taken_port_is_reported() -> None:
    server = await EmbeddedServer.start()
    with pytest.raises(BatonError) as refused:
        await EmbeddedServer.start(port=server.port)
    assert refused.value.kind is ErrorKind.UNAVAILABLE
    assert refused.value.message == f"no port for the embedded Redis ({server.port})"
    await server.stop()


async def test_an_invalid_configuration_is_reported() -> None:
    with pytest.raises(BatonError) as refused:
        await EmbeddedServer.start(extra="no-such-setting 1\n")
    assert "Bad directive" in refused.value.message


async def test_a_stopped_one_stops_within_two_seconds() -> None:
    server = await EmbeddedServer.start()
    os.kill(server.pid, signal.SIGSTOP)
    async with asyncio.timeout(2):
        await server.stop()
    assert not is_running(server.pid)


def test_it_does_not_outlive_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        parent.kill()
    deadline = time.monotonic() + 5
    while is_running(pid):
        assert time.monotonic() < deadline, "the server outlived its parent"
        time.sleep(0.02)


async def test_with_its_memory_full_leases_live_and_what_ends_makes_room() -> None:
    server = await EmbeddedServer.start(extra="maxmemory 4mb\n")
    state = await open_state(server.url)
    ids = [number.to_bytes(16, "big") for number in range(100)]
    receipts = [state.journal.append(JournalRecord(one, "t", (1,) * 20_000), 60) for one in ids]
    assert not await state.journal.flush(2)
    taken = sum(receipt.acknowledged for receipt in receipts)
    assert 0 < taken < 100
    assert state.counters.journal_batches_failed
    await _fill_to_the_last(server.url)
    one = Member(name="decode-0", incarnation=new_incarnation(), role="decode")
    generation = await state.registry.announce(one, 0, 5.0)
    assert await state.registry.announce(one, generation, 5.0) == generation
    with pytest.raises(BatonError):
        await state.prefix_index.apply(one.incarnation, [b"x" * 32], [], fresh=True)
    assert len((await state.registry.listing()).entries) == 1
    for request_id in ids:
        state.journal.close(request_id)
    assert await state.journal.flush(5)
    assert await state.journal.count_open() == 0
    await state.close()
    await server.stop()


async def _fill_to_the_last(url: str) -> None:
    """Writes until the server refuses the smallest write, and goes on refusing it."""
    async with raw(url) as client:
        refused = 0
        for number in range(100_000):
            try:
                await client.set(f"filler-{number}", "x" * 2000)
            except OutOfMemoryError:
                refused += 1
            if refused == 20:
                return
        raise AssertionError("its memory has no end")
