"""The commands of `baton`: what the help says of each, its flags, and the function that runs it.

A command imports its modules when it is loaded, so that `baton status` does not wait for those of `baton up`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from services.cli.common import extras

if TYPE_CHECKING:
    from services.common.config.settings_tree.settings import Settings

Run = Callable[[argparse.Namespace], int]


@dataclass(frozen=True, slots=True)
class Command:
    """A command. `load` adds its flags to a parser, and returns the function that takes them and returns the
    exit code."""

    summary: str
    load: Callable[[argparse.ArgumentParser], Run]


def _up(parser: argparse.ArgumentParser) -> Run:
    from services.cli.up import settings

    settings.add_flags(parser)
    return _run_up


def _demo(parser: argparse.ArgumentParser) -> Run:
    from services.cli.up import settings

    settings.add_flags(parser)
    return _run_demo


def _router(parser: argparse.ArgumentParser) -> Run:
    from services.cli import router

    router.add_flags(parser)
    return router.run


def _worker(parser: argparse.ArgumentParser) -> Run:
    from services.cli import worker

    worker.add_flags(parser)
    return worker.run


def _worker_group(parser: argparse.ArgumentParser) -> Run:
    from services.cli import worker_group

    worker_group.add_flags(parser)
    return worker_group.run


def _ray_supervise(parser: argparse.ArgumentParser) -> Run:
    from services.cli.ray import supervise

    supervise.add_flags(parser)
    return supervise.run


def _ray_stop_workers(parser: argparse.ArgumentParser) -> Run:
    from services.cli.ray import stop_workers

    stop_workers.add_flags(parser)
    return stop_workers.run


def _ray_certificate(parser: argparse.ArgumentParser) -> Run:
    from services.cli.ray import certificate

    certificate.add_flags(parser)
    return certificate.run


def _model_fetch(parser: argparse.ArgumentParser) -> Run:
    from services.cli.model import fetch

    fetch.add_flags(parser)
    return fetch.run


def _model_compile(parser: argparse.ArgumentParser) -> Run:
    from services.cli.model import compile_kernels

    compile_kernels.add_flags(parser)
    return compile_kernels.run


def _status(parser: argparse.ArgumentParser) -> Run:
    from services.cli.status import command as status

    status.add_flags(parser)
    return status.run


def _check(parser: argparse.ArgumentParser) -> Run:
    from services.cli.check import command as check
    from services.cli.check.target import add_flags

    add_flags(parser)
    return check.run


def _drain(parser: argparse.ArgumentParser) -> Run:
    from services.cli import drain

    drain.add_flags(parser)
    return drain.run


def _pool_list(parser: argparse.ArgumentParser) -> Run:
    from services.cli import pool

    pool.add_list_flags(parser)
    return pool.show_pools


def _pool_switch(parser: argparse.ArgumentParser) -> Run:
    from services.cli import pool

    pool.add_switch_flags(parser)
    return pool.switch_pool


def _keys_add(parser: argparse.ArgumentParser) -> Run:
    from services.cli import keys

    keys.add_add_flags(parser)
    return keys.add_key


def _keys_list(parser: argparse.ArgumentParser) -> Run:
    from services.cli import keys

    keys.add_config_flag(parser)
    return keys.list_keys


def _keys_revoke(parser: argparse.ArgumentParser) -> Run:
    from services.cli import keys

    keys.add_revoke_flags(parser)
    return keys.revoke_key


def _keys_sign(parser: argparse.ArgumentParser) -> Run:
    from services.cli import keys

    keys.add_config_flag(parser)
    return keys.sign_keys


def _audit_verify(parser: argparse.ArgumentParser) -> Run:
    from services.cli import audit

    audit.add_flags(parser)
    return audit.run


def _run_up(arguments: argparse.Namespace) -> int:
    from services.cli.up.command import up

    config, model = _cluster(arguments)
    return asyncio.run(up(config, model))


def _run_demo(arguments: argparse.Namespace) -> int:
    from services.cli.demo import command as demo

    config, model = _cluster(arguments, demo.DEFAULTS)
    return asyncio.run(demo.demo(config, model))


def _cluster(
    arguments: argparse.Namespace, defaults: Mapping[str, str] | None = None
) -> tuple[Settings, Path]:
    """The configuration and the model folder. Raises BatonError where extras are missing or the settings are
    wrong."""
    from services.cli.up import settings
    from services.cli.up.model_folder import with_model

    extras.require("router", "worker")
    config = settings.load(arguments, os.environ, defaults)
    if config.supervision.on_ray:
        extras.require("cluster", hint=" (or run without Ray: --ray-address none)")
    return with_model(config)


COMMANDS: Mapping[str, Command] = {
    "up": Command("start workers and a router on this machine", _up),
    "demo": Command("start a cluster, stream a few prompts, print a summary", _demo),
    "router": Command("run one router, which finds its workers in Redis", _router),
    "worker": Command(
        "run one worker, without supervision (`baton worker group`: several, restarted)", _worker
    ),
    "worker group": Command(
        "run the workers of one machine, one on each GPU, and restart them", _worker_group
    ),
    "ray supervise": Command("run the workers of an existing Ray cluster, and restart them", _ray_supervise),
    "ray stop-workers": Command(
        "drain the workers of this container, before Ray ends them", _ray_stop_workers
    ),
    "ray certificate": Command("make the certificate of a Ray node for its address", _ray_certificate),
    "model fetch": Command("download a model, once for all processes that share a volume", _model_fetch),
    "model compile": Command("compile the kernels of workers into a folder, for their image", _model_compile),
    "status": Command("show whether a cluster serves, and the state of its workers", _status),
    "check": Command("check that a router serves: health, models, two generations", _check),
    "drain": Command("stop new work for one worker, or for the router", _drain),
    "pool list": Command("list all pools, their properties, and which one is current", _pool_list),
    "pool switch": Command(
        "send new requests to another pool; running requests finish in theirs", _pool_switch
    ),
    "keys add": Command("make a key and print it, once, to stdout", _keys_add),
    "keys list": Command("list all keys, by tenant and id", _keys_list),
    "keys revoke": Command("remove a key; routers refuse it within a second", _keys_revoke),
    "keys sign": Command("sign the keys as `list` shows them, such as after a restore of Redis", _keys_sign),
    "audit verify": Command(
        "check that no line was changed, removed or inserted (else exit code 2)", _audit_verify
    ),
}

# First words of several commands, as `baton --help` lists them.
GROUPS: Mapping[str, str] = {
    "worker": "run one worker; `worker group`: those of one machine, restarted",
    "ray": "run workers on a Ray cluster: supervise, stop-workers, certificate",
    "model": "fetch a model; compile kernels for an image",
    "pool": "list the pools of workers, or switch to another one",
    "keys": "add, list, revoke and sign the API keys in Redis",
    "audit": "verify a router's audit log",
}

# First words by task, in the order of `baton --help`.
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "On one machine": ("up", "demo"),
    "Processes of a larger cluster": ("router", "worker", "ray", "model"),
    "Operation": ("status", "check", "drain", "pool", "keys", "audit"),
}
