"""Files of TLS are read again when they change, and only whole sets are taken."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from baton.base.errors import BatonError, ErrorKind
from baton.tls.files import LOOK_EVERY_S, TlsFiles
from baton.tls.material import Chain
from baton.tls.renewal import HOLD_S, Renewal
from tests.certificates import Authority, Issued, write


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def files_in(folder: Path, clock: Clock, authorities: str | None = "ca.crt") -> TlsFiles:
    return TlsFiles(
        folder / "tls.crt",
        folder / "tls.key",
        None if authorities is None else folder / authorities,
        clock=clock,
    )


def written(folder: Path, authority: Authority, days: float = 1) -> Issued:
    issued = authority.issue("here", days=days)
    write(folder, issued, authority.pem)
    return issued


def test_a_change_is_noticed_within_the_interval(tmp_path: Path, authority: Authority, clock: Clock) -> None:
    assert LOOK_EVERY_S <= 10
    first = written(tmp_path, authority)
    files = files_in(tmp_path, clock)
    second = written(tmp_path, authority)
    assert files.current().chain.pem == first.pem
    clock.now += LOOK_EVERY_S
    assert files.current().chain.pem == second.pem
    assert files.current() is files.current()


def test_kubernetes_replaces_a_link(tmp_path: Path, authority: Authority, clock: Clock) -> None:
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    issued = {}
    for name in ("..2026_1", "..2026_2"):
        (mounted / name).mkdir()
        issued[name] = written(mounted / name, authority)
    (mounted / "..data").symlink_to("..2026_1")
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (mounted / name).symlink_to(f"..data/{name}")
    files = files_in(mounted, clock)
    assert files.current().chain.pem == issued["..2026_1"].pem
    (mounted / "..data_tmp").symlink_to("..2026_2")
    os.replace(mounted / "..data_tmp", mounted / "..data")
    clock.now += LOOK_EVERY_S
    assert files.current().chain.pem == issued["..2026_2"].pem
    assert files.current().key == issued["..2026_2"].key_pem


@pytest.mark.parametrize("fault", ["pair", "half", "away", "expired", "authorities", "large"])
def test_an_unusable_set_leaves_the_one_before_and_is_logged_once(
    tmp_path: Path, authority: Authority, clock: Clock, fault: str
) -> None:
    first = written(tmp_path, authority)
    files = files_in(tmp_path, clock)
    second = authority.issue("here", days=-1 if fault == "expired" else 1)
    write(tmp_path, second, authority.pem)
    if fault == "pair":
        (tmp_path / "tls.key").write_bytes(first.key_pem)
    elif fault == "half":
        (tmp_path / "tls.crt").write_bytes(second.pem[:100])
    elif fault == "away":
        (tmp_path / "tls.key").unlink()
    elif fault == "authorities":
        (tmp_path / "ca.crt").write_text("-----BEGIN CERTIFICATE-----\nxx")
    elif fault == "large":
        (tmp_path / "ca.crt").write_bytes(b"x" * (2 << 20))
    with capture_logs() as logs:
        for _ in range(3):
            clock.now += LOOK_EVERY_S
            assert files.current().chain.pem == first.pem
    errors = [entry for entry in logs if entry["event"] == "certificate_not_reloaded"]
    assert len(errors) == 1
    assert "PRIVATE" not in str(errors)
    write(tmp_path, authority.issue("here"), authority.pem)
    third = written(tmp_path, authority)
    clock.now += LOOK_EVERY_S
    assert files.current().chain.pem == third.pem


def test_the_key_is_in_no_text(tmp_path: Path, authority: Authority, clock: Clock) -> None:
    issued = written(tmp_path, authority)
    material = files_in(tmp_path, clock).current()
    assert issued.key_pem.decode().splitlines()[1] not in repr(material)
    (tmp_path / "tls.key").write_bytes(issued.key_pem[:-40])
    with pytest.raises(BatonError) as refused:
        files_in(tmp_path, clock)
    assert refused.value.kind is ErrorKind.INVALID
    assert issued.key_pem.decode().splitlines()[1] not in refused.value.message
    assert "\n" not in refused.value.message


def test_many_threads_get_one_material(tmp_path: Path, authority: Authority, clock: Clock) -> None:
    written(tmp_path, authority)
    files = files_in(tmp_path, clock)
    written(tmp_path, authority)
    clock.now += LOOK_EVERY_S
    found = []
    threads = [threading.Thread(target=lambda: found.append(files.current())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(one) for one in found}) == 1


def test_a_renewed_certificate_is_presented_after_it_was_published(
    tmp_path: Path, authority: Authority, clock: Clock
) -> None:
    first = written(tmp_path, authority)
    files = files_in(tmp_path, clock)
    renewal = Renewal(files, confirmed=True, clock=clock)
    assert [one.pem for one in renewal.chains()] == [first.pem]
    second = written(tmp_path, authority)
    clock.now += LOOK_EVERY_S
    for _ in range(3):  # as long as it is not published
        clock.now += HOLD_S
        assert [one.pem for one in renewal.chains()] == [second.pem, first.pem]
        assert renewal.material().chain.pem == first.pem
    renewal.publish(renewal.chains()[0])
    clock.now += HOLD_S / 2
    renewal.publish(renewal.chains()[0])
    assert renewal.material().chain.pem == first.pem
    clock.now += HOLD_S / 2
    assert renewal.material().chain.pem == second.pem
    assert renewal.material().key == second.key_pem
    assert [one.pem for one in renewal.chains()] == [second.pem, first.pem]


def test_without_confirmation_a_certificate_is_published_when_it_is_seen(
    tmp_path: Path, authority: Authority, clock: Clock
) -> None:
    first = written(tmp_path, authority)
    renewal = Renewal(files_in(tmp_path, clock), clock=clock)
    second = written(tmp_path, authority)
    clock.now += LOOK_EVERY_S
    assert [one.pem for one in renewal.chains()] == [second.pem, first.pem]
    assert renewal.material().chain.pem == first.pem
    clock.now += HOLD_S
    assert renewal.material().chain.pem == second.pem


def test_an_expired_certificate_is_not_held(
    tmp_path: Path, authority: Authority, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = written(tmp_path, authority)
    renewal = Renewal(files_in(tmp_path, clock), confirmed=True, clock=clock)
    monkeypatch.setattr(Chain, "expired", lambda chain: chain.pem == first.pem)
    second = written(tmp_path, authority)
    clock.now += LOOK_EVERY_S
    assert renewal.material().chain.pem == second.pem


def test_new_authorities_are_not_held(tmp_path: Path, authority: Authority, clock: Clock) -> None:
    first = written(tmp_path, authority)
    renewal = Renewal(files_in(tmp_path, clock), confirmed=True, clock=clock)
    other = Authority()
    write(tmp_path, authority.issue("here"), authority.pem + other.pem)
    clock.now += LOOK_EVERY_S
    material = renewal.material()
    assert (material.chain.pem, material.authorities) == (first.pem, authority.pem + other.pem)
    assert material.key == first.key_pem
