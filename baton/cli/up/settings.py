"""From file, environment and flags to one `UpConfig`: flags over environment over file.

Every flag has one place in the configuration (`engine.slots`) and one environment variable (`BATON_SLOTS`).
A misspelt key of the file is refused. Unknown `BATON_…` variables are not, since Kubernetes makes such
for any service named baton.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from baton.addresses import is_loopback
from baton.admin_address import DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT
from baton.cluster_auth import MIN_SECRET_LENGTH, SECRET_VARIABLE
from baton.errors import BatonError, ErrorKind
from services.common.config.secrets import read_secrets
from services.common.config.state import NO_STATE, StateSettings
from services.common.config.up import UpConfig


@dataclass(frozen=True, slots=True)
class Flag:
    """A setting with a flag: its spelling, its path in `UpConfig`, and how `--help` shows it.

    `bare` is the value of a flag that is given without one; None: it needs one.
    """

    name: str
    path: str
    metavar: str
    help: str
    bare: str | None = None

    @property
    def variable(self) -> str:
        return "BATON_" + self.key.upper()

    @property
    def key(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


FLAGS = (
    Flag("--model", "model", "DIR|HUB-ID", "checkpoint to serve; also: demo, random (default demo)"),
    Flag("--served-model-name", "served_model_name", "NAME", "what clients call it"),
    Flag("--prefill", "prefill", "N", "prefill workers (default 1, or 0 once a role is named)"),
    Flag("--decode", "decode", "N", "decode workers (default 1, or 0 once a role is named)"),
    Flag("--both", "both", "N", "workers that prefill and decode"),
    Flag("--weights", "engine.weights", "file|random", "random: seeded, needs only config.json"),
    Flag("--device", "engine.device", "auto|cpu|cuda", "where the model runs"),
    Flag("--dtype", "engine.dtype", "auto|bf16|fp16|fp32|fp64", "of weights and KV cache"),
    Flag(
        "--numerics", "engine.numerics", "auto|exact|fast", "exact: a token never depends on its neighbours"
    ),
    Flag("--transport", "transfer.transport", "auto|grpc|ipc|nccl", "what carries KV blocks between workers"),
    Flag(
        "--kv-wire", "transfer.kv_wire", "native|fp8|int8", "KV between workers: as it is, or in eight bits"
    ),
    Flag("--transfer-port", "transfer.transfer_port", "PORT", "of the first decode worker's links"),
    Flag("--frames-port", "transfer.frames_port", "PORT", "of the frames of its links over nccl"),
    Flag("--ray-address", "supervision.ray_address", "local|none|ADDR", "join a running Ray, or use none"),
    Flag(
        "--redis-url", "state.redis_url", "URL|none", "where soft state is kept (default: a Redis of its own)"
    ),
    Flag(
        "--redis-namespace",
        "state.namespace",
        "NAME",
        "what shares it is one cluster (default: a random one)",
    ),
    Flag("--worker-metrics-port", "worker_metrics_port", "PORT", "of the first worker's metrics"),
    Flag("--http-port", "router.http_port", "PORT", "0: any free port"),
    Flag("--grpc-port", "router.grpc_port", "PORT", "0: any free port"),
    Flag("--admin-host", "router.admin_host", "ADDRESS", "address of the admin ports"),
    Flag(
        "--admin-grpc-port", "router.admin_grpc_port", "PORT", f"status, drain (default {DEFAULT_GRPC_PORT})"
    ),
    Flag("--admin-http-port", "router.admin_http_port", "PORT", f"metrics (default {DEFAULT_HTTP_PORT})"),
    Flag(
        "--public-metrics",
        "router.public_metrics",
        "true|false",
        "serve /metrics on the public HTTP port too (default: only where it is on loopback)",
        bare="true",
    ),
    Flag("--slots", "engine.slots", "N", "sequences a decode worker generates at once"),
    Flag("--gpu-memory", "engine.gpu_memory", "FRACTION", "of a GPU, shared by its workers"),
    Flag(
        "--gpu-workers",
        "engine.gpu_workers",
        "N",
        "that share a GPU (default: 1, but all where there is one)",
    ),
    Flag("--block-tokens", "engine.block_tokens", "N", "tokens of a KV block (default 64 on a GPU, else 16)"),
    Flag("--chunk-tokens", "engine.chunk_tokens", "N", "prompt tokens of one prefill step"),
    Flag("--kv-blocks", "engine.kv_blocks", "N", "KV blocks of a worker (default: by memory)"),
    Flag("--max-context-tokens", "engine.max_context_tokens", "N", "longest prompt and output together"),
    Flag("--kernel-cache", "engine.kernel_cache", "DIR", "compiled kernels (default: Triton's own folder)"),
    Flag(
        "--prefix-secret", "prefix_secret", "SECRET", "names cached blocks (default: made of cluster_secret)"
    ),
    Flag(
        "--cluster-secret-file",
        "cluster_secret_file",
        "FILE",
        "authenticates router and workers to each other; BATON_CLUSTER_SECRET holds it itself",
    ),
    Flag(
        "--secrets-file",
        "supervision.secrets_file",
        "FILE",
        "YAML file with redis_url, prefix_secret and cluster_secret; with --ray-address ADDR on each machine",
    ),
    Flag("--log-level", "log_level", "debug|info|warning|error", "of every process"),
)


def add_flags(parser: argparse.ArgumentParser, *, only: tuple[str, ...] = ()) -> None:
    """Adds `-c` and the flags to a parser; `only` keeps those whose path starts with one of them."""
    if not only:
        parser.add_argument("-c", "--config", type=Path, metavar="FILE", help="YAML file of settings")
    for flag in FLAGS:
        if flag.path.startswith(only or ""):
            default = _default(flag.path)
            text = flag.help if default is None else f"{flag.help} (default {default})"
            count = None if flag.bare is None else "?"
            parser.add_argument(
                flag.name, dest=flag.key, metavar=flag.metavar, help=text, nargs=count, const=flag.bare
            )


def load(
    arguments: argparse.Namespace, environment: Mapping[str, str], defaults: Mapping[str, str] | None = None
) -> UpConfig:
    """What the operator asked for; `defaults`, by path, are the command's own where nothing is said.

    Raises `BatonError(INVALID)` with one line for the first thing wrong.
    """
    values = _read_file(arguments.config) if arguments.config else {}
    for path, value in (defaults or {}).items():
        _set(values, path, value, keep=True)
    take_flags(values, arguments, environment)
    try:
        config = UpConfig.model_validate(values)
    except ValidationError as error:
        raise invalid(first_line(error)) from None
    config = with_secrets_file(config)
    check_redis_url(config.state)
    config = with_cluster_secret(config)
    check_admin_host(config)
    check_secret_of_machines(config)
    return config


def with_secrets_file(config: UpConfig) -> UpConfig:
    """The configuration with the secrets of its `secrets_file`, if it names one.

    `BatonError(INVALID)`: the file cannot be read, or another value is given elsewhere.
    """
    path = config.supervision.secrets_file
    if path is None:
        return config
    values = config.model_dump(exclude_unset=True)
    for name, secret in read_secrets(path).given.items():
        place = {"redis_url": "state.redis_url"}.get(name, name)
        if _get(config, place) not in (None, secret):
            raise invalid(f"{name} in secrets_file {path} differs from the one that is set elsewhere")
        _set(values, place, secret)
    try:
        return UpConfig.model_validate(values)
    except ValidationError as error:
        raise invalid(first_line(error)) from None


def take_flags(values: dict[str, Any], arguments: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Puts what this command's flags, or their variables, say over `values`."""
    for flag in FLAGS:
        if flag.key in arguments:
            given = getattr(arguments, flag.key)
            if given is None:
                given = environment.get(flag.variable)
            if given is not None:
                _set(values, flag.path, given)
    if (secret := environment.get(SECRET_VARIABLE)) is not None:
        values["cluster_secret"] = secret


def with_cluster_secret(config: UpConfig) -> UpConfig:
    """The configuration with the cluster's secret read from its file, where one is named.

    `BatonError(INVALID)`: it cannot be read, is too short, or the secret is given as well.
    """
    path = config.cluster_secret_file
    if path is None:
        return config
    if config.cluster_secret is not None:
        raise invalid("cluster_secret and cluster_secret_file are both set")
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise invalid(f"cannot read cluster_secret_file {path}: {reason}") from None
    if len(secret) < MIN_SECRET_LENGTH:
        raise invalid(f"cluster_secret_file {path} holds fewer than {MIN_SECRET_LENGTH} characters")
    return config.model_copy(update={"cluster_secret": secret, "cluster_secret_file": None})


def check_admin_host(config: UpConfig) -> None:
    """`BatonError(INVALID)` where other machines reach AdminService and no operator could know its secret."""
    host = config.router.admin_host
    if not is_loopback(host) and not config.cluster_secret:
        raise invalid(
            f"an admin port on {host} needs a cluster secret: set {SECRET_VARIABLE} or --cluster-secret-file"
        )


def check_secret_of_machines(config: UpConfig) -> None:
    """`BatonError(INVALID)` where workers on other machines could not be told the cluster's secret."""
    if config.supervision.on_another_ray and not config.cluster_secret:
        raise invalid(
            f"--ray-address {config.supervision.ray_address} needs a cluster secret that the machines of "
            f"that Ray have too: cluster_secret in --secrets-file, or {SECRET_VARIABLE}, here and there"
        )


def check_redis_url(state: StateSettings) -> None:
    """`BatonError(INVALID)`, with nothing secret in it, where the URL cannot be one of Redis."""
    if state.redis_url is not None and state.redis_url != NO_STATE:
        from baton.state.connect import parse_url  # only for those who name one: its imports take time

        parse_url(state.redis_url)


def invalid(message: str) -> BatonError:
    """A mistake of the operator's: commands print it as one line and exit with code 2."""
    return BatonError(ErrorKind.INVALID, message)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise invalid(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise invalid(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise invalid(f"{path} must hold settings by name, not a {type(values).__name__}")
    return values


def _set(values: dict[str, Any], path: str, given: str, *, keep: bool = False) -> None:
    """Puts one setting over what the file says, or under it with `keep`. A section of the file that is no
    mapping stays, for validation to name it."""
    *sections, key = path.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            return
        values = inner
    if not (keep and key in values):
        values[key] = given


def first_line(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key {path}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    flag = next((flag.name for flag in FLAGS if flag.path == path), None)
    place = f"{path} ({flag})" if flag else path
    if path.startswith(("state", "prefix_secret", "cluster_secret")):  # it may hold a password
        return f"{place}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return f"{place} is {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _default(path: str) -> object:
    return _get(UpConfig(), path)


def _get(config: UpConfig, path: str) -> object:
    value: object = config
    for part in path.split("."):
        value = getattr(value, part)
    return value
