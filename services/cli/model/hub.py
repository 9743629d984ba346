"""Calls to the hub by huggingface_hub, which is imported late: it is an extra, and takes a second."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import NoReturn

from baton.base.errors import BatonError, ErrorKind
from services.cli.model.folder import HubFile, HubFiles
from services.common.config.settings_tree.settings import ModelSource

# No code and no pickled weights; besides the top folder only that of templates, as no other is read.
_TOKENIZER = ("*.json", "*.jinja", "tokenizer.model")
_PATTERNS = {"tokenizer": _TOKENIZER, "all": (*_TOKENIZER, "*.safetensors")}
_TEMPLATES = "additional_chat_templates/"
_NOT_TOKENIZER = "*.safetensors.index.json"
# The folder below the download in which the library keeps its metadata.
_CACHE = ".cache"
_CONNECTIONS = 4


def prepare(partial: Path) -> None:
    """Makes the folder of the download, and has the library write nowhere else. Call it before any other."""
    partial.mkdir(parents=True, exist_ok=True)
    os.environ["HF_HOME"] = str(partial / _CACHE / "home")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def files_of(source: ModelSource, token: str | None, endpoint: str | None) -> HubFiles:
    """The files that `source` names. Raises `BatonError`, as `fetch` does."""
    from huggingface_hub import HfApi

    try:
        info = HfApi(endpoint=endpoint, token=token).model_info(
            source.hub_id, revision=source.revision, files_metadata=True
        )
    except Exception as error:  # the library raises many kinds, down to its HTTP client's
        _raise(source, error)
    files = []
    for one in info.siblings or ():
        if not _wanted(one.rfilename, source.files):
            continue
        digest = one.lfs.sha256 if one.lfs else one.blob_id
        if one.size is None or digest is None or info.sha is None:
            raise BatonError(
                ErrorKind.UNAVAILABLE, f"{source.hub_id}: the hub lists {one.rfilename} incompletely"
            )
        files.append(HubFile(one.rfilename, one.size, digest))
    if "config.json" not in {one.name for one in files}:
        raise BatonError(
            ErrorKind.INVALID, f"{source.hub_id} is no model that Baton serves: config.json is missing"
        )
    return HubFiles(str(info.sha), tuple(files))


def download(
    source: ModelSource, files: HubFiles, partial: Path, token: str | None, endpoint: str | None
) -> None:
    """Downloads what is not in `partial` yet, and continues files that are there in part. Raises
    `BatonError`, as `fetch` does."""
    from huggingface_hub import hf_hub_download

    def one(file: HubFile) -> None:
        hf_hub_download(
            source.hub_id,
            file.name,
            revision=files.commit,
            local_dir=partial,
            token=token,
            endpoint=endpoint,
        )

    try:
        with ThreadPoolExecutor(_CONNECTIONS) as threads:
            list(threads.map(one, files.files))
    except Exception as error:  # as above
        _raise(source, error)


def clean_up(partial: Path, files: HubFiles) -> None:
    """Removes the library's metadata from a complete download, and files of an earlier revision."""
    shutil.rmtree(partial / _CACHE, ignore_errors=True)
    wanted = {one.name for one in files.files}
    for path in partial.rglob("*"):
        if path.is_file() and path.relative_to(partial).as_posix() not in wanted:
            path.unlink()


def _wanted(name: str, files: str) -> bool:
    if "/" in name.removeprefix(_TEMPLATES) or (files == "tokenizer" and fnmatch(name, _NOT_TOKENIZER)):
        return False
    patterns = ("*.jinja",) if name.startswith(_TEMPLATES) else _PATTERNS[files]
    return any(fnmatch(name, pattern) for pattern in patterns)


def _raise(source: ModelSource, error: Exception) -> NoReturn:
    """Raises the BatonError for an error of the library, whose text names no token."""
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    where = f"{source.hub_id} ({source.revision})"
    if isinstance(
        error, HFValidationError | RepositoryNotFoundError | RevisionNotFoundError
    ):  # gated ones too
        raise BatonError(
            ErrorKind.INVALID, f"{where}: the hub has no such model or revision for this token"
        ) from None
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    raise BatonError(ErrorKind.UNAVAILABLE, f"{where}: the hub does not give it: {reason}") from None
