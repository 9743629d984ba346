"""`baton keys`: adds, lists and revokes the API keys in Redis that routers with `auth.redis_keys` accept.

Redis and the cluster's secret are those of a router's file, so that no secret is ever an argument.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import secrets
import sys
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from pydantic import ValidationError

from baton.base.api_keys import ApiKey, KeyScope, key_hash
from services.cli.common import extras
from services.cli.common.console import console
from services.cli.common.messages import notify
from services.cli.status.view import plain_table
from services.common.config.settings_tree import reader
from services.common.config.settings_tree.reader import first_problem, invalid
from services.common.config.settings_tree.secret_files import read_secret_file
from services.common.config.settings_tree.views import KEYS

if TYPE_CHECKING:
    from baton.state.stores.redis_api_keys import RedisKeyStore

_PREFIX = "sk-baton-"
_RANDOM_BYTES = 32
# A key that was not generated here has at least 32 characters: a weak one could be found from its hash.
_KEY = re.compile(r"[\x21-\x7e]{32,512}")
_SCOPES: tuple[str, ...] = get_args(KeyScope)

Work = Callable[["RedisKeyStore"], Coroutine[None, None, None]]


def add_add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", metavar="NAME", required=True, help="tenant that the key belongs to")
    parser.add_argument(
        "--id",
        metavar="ID",
        default="",
        help="id of the key in lists and logs (default: the start of its hash)",
    )
    parser.add_argument(
        "--scope",
        metavar="SCOPE",
        action="append",
        choices=_SCOPES,
        help=f"{', '.join(_SCOPES)} (default: all)",
    )
    parser.add_argument(
        "--use-model", metavar="NAME", action="append", help="a model that it may use (default: all)"
    )
    parser.add_argument(
        "--days", type=float, metavar="N", help="days until the key expires (default: it never does)"
    )
    parser.add_argument(
        "--key-file", metavar="FILE", help="file with the key, -: stdin (default: a new random one)"
    )
    add_config_flag(parser)


def add_revoke_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help="its id, as baton keys list shows it")
    add_config_flag(parser)


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    reader.add_config_flag(parser, "YAML file of a router, of which state and cluster_secret_file are read")


def add_key(arguments: argparse.Namespace) -> int:
    """Adds a key. Raises BatonError where the file or the key is invalid, the id is taken, or Redis away."""
    return _run(arguments, _adding(arguments))


def list_keys(arguments: argparse.Namespace) -> int:
    """Prints all keys. Raises BatonError where they are not those that were signed last, or Redis is away."""
    return _run(arguments, _list)


def revoke_key(arguments: argparse.Namespace) -> int:
    """Removes a key. Raises BatonError where its id is unknown, or Redis away."""

    async def work(store: RedisKeyStore) -> None:
        await store.revoke(arguments.id)
        notify(f"key {arguments.id} is refused within a second; requests that run with it finish")

    return _run(arguments, work)


def sign_keys(arguments: argparse.Namespace) -> int:
    """Signs the keys as they are. Raises BatonError where Redis is away."""
    return _run(arguments, _sign)


def _run(arguments: argparse.Namespace, work: Work) -> int:
    extras.require("state")
    settings = reader.read(KEYS, arguments, {})
    state, secret = settings.state, settings.cluster_secret or ""
    asyncio.run(_with_store(state.redis_url or "", state.namespace or "", secret, work))
    return 0


async def _with_store(url: str, namespace: str, secret: str, work: Work) -> None:
    from baton.state import State  # needs packages of the extra

    state = State.at(url, namespace=namespace)
    try:
        await work(state.api_keys(secret))
    finally:
        await state.close()


def _adding(arguments: argparse.Namespace) -> Work:
    key = (
        _key_of(arguments.key_file) if arguments.key_file else _PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    )
    entry = _entry(arguments, key)

    async def work(store: RedisKeyStore) -> None:
        await store.add(entry)
        notify(f"key {entry.key_id} of {entry.tenant} is valid within a second")
        if not arguments.key_file:
            print(key)

    return work


def _entry(arguments: argparse.Namespace, key: str) -> ApiKey:
    expires = None
    if arguments.days is not None:
        if not 0 < arguments.days <= 36_500:
            raise invalid("--days is more than 0 and at most 36500")
        expires = datetime.now(UTC) + timedelta(days=arguments.days)
    try:
        return ApiKey(
            sha256=key_hash(key).hex(),
            id=arguments.id,
            tenant=arguments.tenant,
            scopes=arguments.scope,
            models=arguments.use_model,
            expires=expires,
        )
    except ValidationError as error:
        raise invalid(first_problem(error, values=False)) from None


def _key_of(path: str) -> str:
    key = sys.stdin.read(1024).strip() if path == "-" else read_secret_file(Path(path), "--key-file")
    if not _KEY.fullmatch(key):
        raise invalid("--key-file: a key has 32 to 512 visible ASCII characters")
    return key


async def _list(store: RedisKeyStore) -> None:
    table = plain_table()
    for heading in ("id", "tenant", "scopes", "models", "expires"):
        table.add_column(heading, no_wrap=heading == "id", overflow="fold")
    for key in sorted(await store.unsigned_listing(), key=lambda one: (one.tenant, one.key_id)):
        table.add_row(key.key_id, key.tenant, _words(key.scopes), _words(key.models), _end(key.expires))
    console().print(table)
    await store.listing()  # raises where these are not all that were signed last


async def _sign(store: RedisKeyStore) -> None:
    await store.sign()
    notify("routers take the keys as `baton keys list` shows them")


def _words(words: tuple[str, ...] | None) -> str:
    return "all" if words is None else " ".join(words) or "none"


def _end(expires: datetime | None) -> str:
    if expires is None:
        return "never"
    expired = " (expired)" if expires <= datetime.now(UTC) else ""
    return expires.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC") + expired
