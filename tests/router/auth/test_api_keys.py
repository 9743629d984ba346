"""API keys of a file: what is a key, that a changed file is followed, that nothing keeps or shows a key."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from baton.base.errors import BatonError, ErrorKind
from services.router.auth.api_keys import ApiKeys
from tests.support.mounted_secret import mount_secret

TEXT = "# for the test\n\nsk-first \n  sk-second\r\n"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def keys(folder: Path, text: str = TEXT, clock: Clock | None = None) -> ApiKeys:
    mount_secret(folder, api_keys=text)
    return ApiKeys(folder / "api-keys", clock or Clock())


def admits(one: ApiKeys, authorization: str | None) -> bool:
    try:
        one.authenticate(authorization, "http")
    except BatonError as error:
        if error.kind is not ErrorKind.UNAUTHENTICATED:
            raise
        return False
    return True


def test_keys_and_other_lines(tmp_path: Path) -> None:
    known = keys(tmp_path)
    for right in ("Bearer sk-first", "bearer sk-second", "BEARER  sk-first "):
        assert admits(known, right), right
    wrong: tuple[str | None, ...] = (
        None,
        "",
        "Bearer",
        "Bearer ",
        "sk-first",
        "Basic sk-first",
        "Bearer # for the test",
        "Bearer sk-firs",
    )
    for given in (*wrong, "Bearer sk-first sk-second", "Bearer sk-first\N{SNOWMAN}", "Bearer sk-firstx"):
        assert not admits(known, given), given
    assert known.refused == {"http": len(wrong) + 3}


def test_callers_are_distinguished_without_their_keys(tmp_path: Path) -> None:
    known = keys(tmp_path)
    first, second = (known.authenticate(f"Bearer sk-{name}", "grpc") for name in ("first", "second"))
    assert first.key_id != second.key_id
    assert "first" not in first.key_id


def test_a_new_file_is_followed_within_a_second(tmp_path: Path) -> None:
    clock = Clock()
    known = keys(tmp_path, clock=clock)
    mount_secret(tmp_path, api_keys="sk-third\n")
    clock.now = 0.9
    assert admits(known, "Bearer sk-first")
    clock.now = 1.0
    assert not admits(known, "Bearer sk-first")
    assert admits(known, "Bearer sk-third")
    (tmp_path / "api-keys").write_text("sk-fourth\n")  # in place
    clock.now = 2.0
    assert admits(known, "Bearer sk-fourth")
    mount_secret(tmp_path, api_keys="# none\n")
    clock.now = 3.0
    assert not admits(known, "Bearer sk-fourth")


@pytest.mark.parametrize("damage", ["away", "bytes", "blank"])
def test_an_unreadable_file_keeps_the_last_keys(tmp_path: Path, damage: str) -> None:
    clock = Clock()
    known = keys(tmp_path, clock=clock)
    if damage == "away":
        (tmp_path / "api-keys").unlink()
    elif damage == "bytes":
        (tmp_path / "api-keys").write_bytes(b"\xff\xfe sk-secret")
    else:
        mount_secret(tmp_path, api_keys="sk-secret word\n")
    with capture_logs() as logs:
        for clock.now in (1.0, 2.0):
            assert admits(known, "Bearer sk-first")
    assert [log["event"] for log in logs] == ["file_not_followed"]
    assert "sk-" not in str(logs)
    if damage == "away":
        mount_secret(tmp_path, api_keys="sk-third")
        clock.now = 3.0
        assert admits(known, "Bearer sk-third")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nothing\n", "has no key"),
        ("sk-1\nsk-secret word\n", "line 2 is no key"),
        ("k" * 513, "line 1 is no key"),
        ("\n".join(map(str, range(10_001))), "more than 10000 keys"),
    ],
)
def test_refused_at_the_start(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BatonError, match=message) as refusal:
        keys(tmp_path, text)
    assert "secret" not in refusal.value.message


def test_no_key_is_kept(tmp_path: Path) -> None:
    known = keys(tmp_path, f"a-key-that-only-the-file-has-{7}")
    seen, todo = set(), [known]
    while todo:
        one = todo.pop()
        if id(one) in seen or callable(one):
            continue
        seen.add(id(one))
        assert not (isinstance(one, str | bytes) and "only-the-file-has-7" in str(one))
        todo += gc.get_referents(one)
