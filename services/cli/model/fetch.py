"""Downloads a model under an exclusive lock: into `FOLDER.partial`, which is verified and renamed to
`FOLDER`."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from baton.base.errors import BatonError, ErrorKind
from services.cli.common import extras
from services.cli.common.messages import notify
from services.cli.model import hub
from services.cli.model.folder import has_manifest, is_complete, verify, write_manifest
from services.common.config.settings_tree import reader
from services.common.config.settings_tree.reader import invalid
from services.common.config.settings_tree.secret_files import read_secret_file
from services.common.config.settings_tree.settings import ModelSource
from services.common.config.settings_tree.views import FETCH_MODEL

_LOCK_POLL_S = 0.5


def add_flags(parser: argparse.ArgumentParser) -> None:
    reader.add_config_flag(
        parser, "YAML file of a router or worker, of which model, model_source and start_timeout_s are read"
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 once the folder is complete; see `fetch`."""
    settings = reader.read(FETCH_MODEL, arguments, {})
    assert settings.model is not None
    assert settings.model_source is not None
    fetch(Path(settings.model), settings.model_source, settings.start_timeout_s)
    return 0


def fetch(folder: Path, source: ModelSource, lock_s: float, endpoint: str | None = None) -> None:
    """Downloads `source` into `folder` unless it is there. `lock_s`: longest wait for another process that
    downloads it. `endpoint`: URL of the hub; None: `$HF_ENDPOINT`, else huggingface.co.

    Raises `BatonError`: INVALID where there is no such model or no access to it, UNAVAILABLE where the
    download failed, which the next call continues.
    """
    if is_complete(folder, source):
        return
    extras.require("hub")
    token = read_secret_file(source.token_file, "model_source.token_file") if source.token_file else None
    with _locked(folder, lock_s):
        if is_complete(folder, source):  # another process has downloaded it
            return
        partial = folder.with_name(f"{folder.name}.partial")
        _take_over(folder, partial)
        hub.prepare(partial)
        files = hub.files_of(source, token, endpoint)
        size = sum(one.size for one in files.files)
        notify(
            f"downloading {len(files.files)} files of {source.hub_id} ({files.commit}), {size / 1e9:.1f} GB"
        )
        hub.download(source, files, partial, token, endpoint)
        verify(partial, files.files)
        hub.clean_up(partial, files)
        write_manifest(partial, source, files)
        _rename(partial, folder)
    notify(f"{source.hub_id} is in {folder}")


@contextlib.contextmanager
def _locked(folder: Path, wait_s: float) -> Iterator[None]:
    """Holds an exclusive lock on `FOLDER.lock`, which the kernel releases with this process."""
    deadline = time.monotonic() + wait_s
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = open(folder.with_name(f"{folder.name}.lock"), "a")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise invalid(f"cannot write to {folder.parent}: {error.strerror}") from None
    with lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left <= 0:
                    message = f"another process has held {lock.name} for {wait_s:.0f} s"
                    raise BatonError(ErrorKind.UNAVAILABLE, message) from None
                time.sleep(min(_LOCK_POLL_S, left))
        yield


def _take_over(folder: Path, partial: Path) -> None:
    """Continues with what is in an incomplete folder. Raises `BatonError(INVALID)` where it is not this
    command's."""
    if not folder.exists():
        return
    if not folder.is_dir() or not has_manifest(folder):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
            return
        raise invalid(f"{folder} is not complete, and was not made by baton model fetch")
    if partial.exists():
        shutil.rmtree(folder)
    else:
        folder.rename(partial)


def _rename(partial: Path, folder: Path) -> None:
    for path in partial.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    partial.rename(folder)
