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
from services.cli.common.messages import notify
from services.cli.status.command import console
from services.cli.status.view import plain_table
from services.common.config import reader
from services.common.config.reader import first_problem, invalid
from services.common.config.secret_files import read_secret_file
from services.common.config.views import KEYS

if TYPE_CHECKING:
    from baton.state.redis_keys import RedisKeyStore

_PREFIX = "sk-baton-"
_RANDOM_BYTES = 32
# A key that was not generated here has at least 32 characters: a weak one could be found from its hash.
_KEY = re.compile(r"[\x21-\x7e]{32,512}")
_SCOPES: tuple[str, ...] = get_args(KeyScope)

Work = Callable[["RedisKeyStore"], Coroutine[None, None, None]]


def add_flags(parser: argparse.ArgumentParser, parser_class: type[argparse.ArgumentParser]) -> None:
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="COMMAND", dest="keys_command", parser_class=parser_class
    )
    adding = commands.add_parser("add", help="make a key and print it, once, to stdout")
    adding.add_argument("--tenant", metavar="NAME", required=True, help="whose key it is")
    adding.add_argument("--id", metavar="ID", default="", help="names it in lists and logs")
    adding.add_argument(
        "--scope",
        metavar="SCOPE",
        action="append",
        choices=_SCOPES,
        help=f"{', '.join(_SCOPES)} (default: all)",
    )
    adding.add_argument(
        "--use-model", metavar="NAME", action="append", help="a model that it may use (default: all)"
    )
    adding.add_argument("--days", type=float, metavar="N", help="it expires after so long (default: never)")
    adding.add_argument(
        "--key-file", metavar="FILE", help="file with the key, -: stdin (default: a new random one)"
    )
    listing = commands.add_parser("list", help="list all keys, by id")
    revoking = commands.add_parser("revoke", help="remove a key; routers refuse it within a second")
    revoking.add_argument("id", metavar="ID", help="its id, as baton keys list shows it")
    signing = commands.add_parser(
        "sign", help="accept the keys as `list` shows them, after Redis was restored or changed otherwise"
    )
    for one in (adding, listing, revoking, signing):
        reader.add_config_flag(one, "YAML file of a router, of which state and cluster_secret_file are read")


def run(arguments: argparse.Namespace) -> int:
    """Raises BatonError where the file or the key is invalid, the id is taken or unknown, or Redis away."""
    extras.require("state")
    commands = {"add": _adding, "list": _listing, "revoke": _revoking, "sign": _signing}
    work = commands[arguments.keys_command](arguments)
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


def _listing(_: argparse.Namespace) -> Work:
    async def work(store: RedisKeyStore) -> None:
        table = plain_table()
        for heading in ("id", "tenant", "scopes", "models", "expires"):
            table.add_column(heading, no_wrap=True)
        for key in sorted(await store.unsigned_listing(), key=lambda one: (one.tenant, one.key_id)):
            table.add_row(key.key_id, key.tenant, _words(key.scopes), _words(key.models), _end(key.expires))
        console().print(table)
        await store.listing()  # says so where these are not all that were signed last

    return work


def _words(words: tuple[str, ...] | None) -> str:
    return "all" if words is None else " ".join(words) or "none"


def _end(expires: datetime | None) -> str:
    if expires is None:
        return "never"
    expired = " (expired)" if expires <= datetime.now(UTC) else ""
    return expires.astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC") + expired


def _revoking(arguments: argparse.Namespace) -> Work:
    async def work(store: RedisKeyStore) -> None:
        await store.revoke(arguments.id)
        notify(f"key {arguments.id} is refused within a second; what runs with it, runs on")

    return work


def _signing(_: argparse.Namespace) -> Work:
    async def work(store: RedisKeyStore) -> None:
        await store.sign()
        notify("routers take the keys as `baton keys list` shows them")

    return work
