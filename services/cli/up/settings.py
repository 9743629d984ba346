"""Builds one `UpConfig` from file, environment and flags; flags override variables, which override the file.

Every flag has one path in the configuration (`engine.slots`) and one environment variable (`BATON_SLOTS`).
An unknown key of the file is refused. Unknown `BATON_…` variables are ignored, since Kubernetes sets such
variables for any service named baton.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from baton.base.addresses import is_loopback
from baton.base.admin_address import DEFAULT_GRPC_PORT, DEFAULT_HTTP_PORT
from baton.base.cluster_auth import SECRET_VARIABLE
from services.cli.common.config_file import first_problem, invalid, read_shared_secret, read_yaml
from services.common.config.router import check_public_access
from services.common.config.secrets import read_secrets
from services.common.config.state import NO_STATE, StateSettings
from services.common.config.up import UpConfig


@dataclass(frozen=True, slots=True)
class Flag:
    """A setting with a flag: its path in `UpConfig`, and its text in `--help`.

    `bare` is the value of the flag when it is given without one; None: a value is required. The flag and its
    variable are named by `renamed`, or else by the last part of the path. `negated`: `--no-NAME` is `false`.
    """

    path: str
    metavar: str
    help: str
    bare: str | None = None
    renamed: str | None = None
    negated: bool = False

    @property
    def name(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        return "BATON_" + self.key.upper()

    @property
    def key(self) -> str:
        return self.renamed or self.path.rpartition(".")[2]


FLAGS = (
    Flag("model", "DIR|HUB-ID", "checkpoint to serve; also: demo, random (default demo)"),
    Flag("served_model_name", "NAME", "model name for clients (default: the folder's name or the hub id)"),
    Flag("prefill", "N", "prefill workers (default 1, or 0 once a role is named)"),
    Flag("decode", "N", "decode workers (default 1, or 0 once a role is named)"),
    Flag("both", "N", "workers that prefill and decode"),
    Flag("engine.weights", "file|random", "random: seeded random weights; only config.json is needed"),
    Flag("engine.device", "auto|cpu|cuda", "device of the model"),
    Flag("engine.dtype", "auto|bf16|fp16|fp32|fp64", "dtype of weights and KV cache"),
    Flag("engine.kv_dtype", "auto|fp8", "dtype of the KV cache: as --dtype says, or 8-bit"),
    Flag("engine.quantization", "fp8|int8|int4", "quantise the weights while they are loaded"),
    Flag("engine.quantize_head", "true|false", "quantise lm_head too, as --quantization says", bare="true"),
    Flag("engine.numerics", "auto|exact|fast", "exact: a token never depends on other requests of its batch"),
    Flag("transfer.transport", "auto|grpc|ipc|nccl", "transport of KV blocks between workers"),
    Flag("transfer.kv_wire", "native|fp8|int8", "format of KV blocks between workers: unchanged, or 8-bit"),
    Flag(
        "transfer.both_receives",
        "true|false",
        "workers of role both may decode what others have prefilled, and prefill for others",
        bare="true",
    ),
    Flag("transfer.transfer_port", "PORT", "link port of the first decode worker"),
    Flag("transfer.frames_port", "PORT", "second link port of the first decode worker, for nccl"),
    Flag("supervision.ray_address", "local|none|ADDR", "start a Ray, use none, or join the Ray at ADDR"),
    Flag("state.redis_url", "URL|none", "Redis for soft state (`baton up`, by default: an embedded server)"),
    Flag(
        "state.namespace",
        "NAME",
        "namespace of the cluster in Redis (`baton up`, by default: random)",
        renamed="redis_namespace",
    ),
    Flag("worker_metrics_port", "PORT", "metrics port of the first worker"),
    Flag("router.http_port", "PORT", "public HTTP port; 0: any free port"),
    Flag("router.grpc_port", "PORT", "public gRPC port; 0: any free port"),
    Flag("router.processes", "N", "router processes that share the public ports", renamed="router_processes"),
    Flag("router.admin_host", "ADDRESS", "address of the admin ports"),
    Flag("router.admin_http_host", "ADDRESS", "address of the admin HTTP port alone (default: --admin-host)"),
    Flag("router.admin_grpc_port", "PORT", f"port of AdminService (default {DEFAULT_GRPC_PORT})"),
    Flag("router.admin_http_port", "PORT", f"port of metrics and health (default {DEFAULT_HTTP_PORT})"),
    Flag(
        "router.public_metrics",
        "true|false",
        "serve /metrics on the public HTTP port too (default: only where it is on loopback)",
        bare="true",
    ),
    Flag("router.ui", "true|false", "web page at / of the admin HTTP port", bare="true", negated=True),
    Flag("auth", "none", "none: serve without API keys where other machines reach the public ports too"),
    Flag("router.audit_log", "FILE", "record who did what, without content"),
    Flag(
        "router.tool_calls",
        "auto|none|hermes|llama3|mistral|mistral_v11|qwen3_coder",
        "how the model writes tool calls",
    ),
    Flag("router.reasoning", "auto|none|think", "how the model marks reasoning"),
    Flag("router.strict_fields", "true|false", "refuse requests with undocumented fields", bare="true"),
    Flag(
        "router.refuse_late",
        "true|false",
        "refuse requests at once that cannot meet the latencies they state",
        bare="true",
    ),
    Flag("engine.slots", "N", "sequences that a decode worker generates at once"),
    Flag("engine.gpu_memory", "FRACTION", "share of a GPU's memory that its workers use together"),
    Flag(
        "engine.gpu_workers", "N", "workers that share a GPU (default: 1, but all on a machine with one GPU)"
    ),
    Flag("engine.block_tokens", "N", "tokens of a KV block (default 64 on a GPU, else 16)"),
    Flag("engine.chunk_tokens", "N", "most prompt tokens of one prefill step"),
    Flag("engine.tpot_slo_ms", "MS", "role both: prompts wait while decode steps take longer on average"),
    Flag(
        "engine.mixed_steps",
        "true|false",
        "role both, on a GPU: run a decode step as part of each prefill step",
        bare="true",
    ),
    Flag("engine.kv_blocks", "N", "KV blocks of a worker (default: as memory allows)"),
    Flag("engine.max_context_tokens", "N", "longest prompt and output together"),
    Flag("engine.tune", "auto|off|full", "measure kernels for shapes that no table has, at the start"),
    Flag("engine.kernel_cache", "DIR", "folder of compiled kernels (default: Triton's)"),
    Flag(
        "prefix_secret", "SECRET", "keys the hashes of cached blocks (default: derived from cluster_secret)"
    ),
    Flag(
        "cluster_secret_file",
        "FILE",
        "file with the secret that authenticates router and workers (BATON_CLUSTER_SECRET: the secret)",
    ),
    Flag(
        "supervision.secrets_file",
        "FILE",
        "YAML file with redis_url, prefix_secret, cluster_secret; on each machine with --ray-address ADDR",
    ),
    Flag("tracing.otlp_endpoint", "URL", "collector that traces are sent to, by OTLP over HTTP"),
    Flag("tracing.otlp_headers_file", "FILE", "headers for that collector, a line `name: value` each"),
    Flag(
        "tracing.sample_ratio",
        "SHARE",
        "share of calls that are traced where the client does not say",
        renamed="trace_sample_ratio",
    ),
    Flag("log_level", "debug|info|warning|error", "log level of every process"),
)


def add_flags(parser: argparse.ArgumentParser, *, only: tuple[str, ...] = ()) -> None:
    """Adds `-c` and the flags to a parser; with `only`, just the flags whose path starts with one of
    these."""
    if not only:
        parser.add_argument("-c", "--config", type=Path, metavar="FILE", help="YAML file of settings")
    for flag in FLAGS:
        if flag.path.startswith(only or ""):
            default = _get(UpConfig(), flag.path)
            text = flag.help if default is None else f"{flag.help} (default {default})"
            count = None if flag.bare is None else "?"
            parser.add_argument(
                flag.name, dest=flag.key, metavar=flag.metavar, help=text, nargs=count, const=flag.bare
            )
            if flag.negated:
                no = f"--no-{flag.key}"
                parser.add_argument(
                    no, dest=flag.key, action="store_const", const="false", help=f"without the {text}"
                )


def load(
    arguments: argparse.Namespace, environment: Mapping[str, str], defaults: Mapping[str, str] | None = None
) -> UpConfig:
    """The configuration from file, environment and flags; `defaults`, by path, are the command's own
    defaults.

    Raises `BatonError(INVALID)` with one line for the first error.
    """
    values = read_yaml(arguments.config) if arguments.config else {}
    for path, value in (defaults or {}).items():
        _set(values, path, value, keep=True)
    take_flags(values, arguments, environment)
    config = with_secrets_file(_validated(values))
    check_redis_url(config.state)
    config = with_cluster_secret(config)
    check_admin_host(config)
    check_public_access(config.router.host, config.auth)
    check_secret_of_machines(config)
    return config


def with_secrets_file(config: UpConfig) -> UpConfig:
    """The configuration with the secrets of its `secrets_file`, if it names one.

    Raises `BatonError(INVALID)` where the file cannot be read, or a secret has another value elsewhere.
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
    return _validated(values)


def take_flags(values: dict[str, Any], arguments: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Overrides `values` by this command's flags, or else by their environment variables."""
    for path, given in given_flags(arguments, environment).items():
        _set(values, path, given)
    if (secret := environment.get(SECRET_VARIABLE)) is not None:
        values["cluster_secret"] = secret


def given_flags(arguments: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """The values of this command's flags, or else of their environment variables, by path."""
    given = {}
    for flag in FLAGS:
        if flag.key in arguments:
            value = getattr(arguments, flag.key)
            value = environment.get(flag.variable) if value is None else value
            if value is not None:
                given[flag.path] = value
    return given


def with_cluster_secret(config: UpConfig) -> UpConfig:
    """The configuration with the cluster secret read from `cluster_secret_file`, if set.

    Raises `BatonError(INVALID)` where it cannot be read, is too short, or the secret is set as well.
    """
    path = config.cluster_secret_file
    if path is None:
        return config
    if config.cluster_secret is not None:
        raise invalid("cluster_secret and cluster_secret_file are both set")
    secret = read_shared_secret(path, "cluster_secret_file")
    return config.model_copy(update={"cluster_secret": secret, "cluster_secret_file": None})


def check_admin_host(config: UpConfig) -> None:
    """Raises `BatonError(INVALID)` where other machines reach AdminService but no cluster secret is
    configured."""
    host = config.router.admin_host
    if not is_loopback(host) and not config.cluster_secret:
        raise invalid(
            f"an admin port on {host} needs a cluster secret: set {SECRET_VARIABLE} or --cluster-secret-file"
        )


def check_secret_of_machines(config: UpConfig) -> None:
    """Raises `BatonError(INVALID)` where workers run on another Ray but no cluster secret is configured."""
    if config.supervision.on_another_ray and not config.cluster_secret:
        raise invalid(
            f"--ray-address {config.supervision.ray_address} needs a cluster secret that the machines of "
            f"that Ray have too: cluster_secret in --secrets-file, or {SECRET_VARIABLE}, on all of them"
        )


def check_redis_url(state: StateSettings) -> None:
    """Raises `BatonError(INVALID)`, without the URL's secrets, where it is not a valid Redis URL."""
    if state.redis_url is not None and state.redis_url != NO_STATE:
        from baton.state.client.connect import parse_url  # imported late: it takes a fifth of a second

        parse_url(state.redis_url)


def _validated(values: Mapping[str, Any]) -> UpConfig:
    try:
        return UpConfig.model_validate(values)
    except ValidationError as error:
        raise invalid(first_line(error)) from None


def _set(values: dict[str, Any], path: str, given: str, *, keep: bool = False) -> None:
    """Sets one setting; with `keep`, only where it has no value. A section that is not a mapping is left for
    validation to report."""
    *sections, key = path.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            return
        values = inner
    if not (keep and key in values):
        values[key] = given


def first_line(error: ValidationError) -> str:
    """The first of a validation's errors, in one line that names the flag, and the value unless it may be a
    secret."""
    return first_problem(error, _place)


def _place(path: str, given: object) -> str:
    flag = next((flag.name for flag in FLAGS if flag.path == path), None)
    place = f"{path} ({flag})" if flag else path
    if path.startswith(("state", "prefix_secret", "cluster_secret")):  # those may hold a password
        return place
    return f"{place} is {given!r}"


def _get(config: UpConfig, path: str) -> object:
    value: object = config
    for part in path.split("."):
        value = getattr(value, part)
    return value
