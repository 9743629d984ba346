"""The settings of `baton up` and `baton demo`, and what they must agree in."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace

from baton.base.addresses import is_loopback
from baton.base.cluster_auth import SECRET_VARIABLE
from services.cli.common import extras, process_configs
from services.cli.common.messages import warn
from services.common.config.router import check_public_access
from services.common.config.settings_tree import reader
from services.common.config.settings_tree.reader import invalid
from services.common.config.settings_tree.settings import Settings
from services.common.config.settings_tree.views import UP
from services.common.config.state import NO_STATE

# Longest drain: what is left is killed 5 s after it, and container platforms wait for 30 s.
_LONGEST_DRAIN_S = 24.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    reader.add_flags(parser, UP, file=False)


def load(
    arguments: argparse.Namespace, environment: Mapping[str, str], defaults: Mapping[str, str] | None = None
) -> Settings:
    """The settings from file, environment, flags and files of secrets; `defaults`, by path, are the
    command's own defaults.

    Raises `BatonError(INVALID)` with one line for the first error.
    """
    settings = reader.read(replace(UP, defaults=defaults or {}), arguments, environment, warn=warn)
    settings = _with_ray(settings)
    check_cluster(settings)
    process_configs.check_redis_url(settings.state)
    check_public_access(settings.router.host, settings.auth)
    _check_secret(settings)
    return settings


def _with_ray(settings: Settings) -> Settings:
    """The settings with a local Ray where none is named and Ray is installed, else with none."""
    supervision = settings.supervision
    if supervision.ray_address is not None:
        return settings
    address = "local" if extras.installed("ray") else "none"
    update = {"supervision": supervision.model_copy(update={"ray_address": address})}
    return settings.model_copy(update=update)


def check_cluster(settings: Settings) -> None:
    """Raises `BatonError(INVALID)` where the workers cannot serve, their ports overlap, responses are to be
    stored nowhere, or the drain is too long."""
    counts, transfer = settings.role_counts, settings.transfer
    for role in ("prefill", "decode"):
        if not counts["both"] and not counts[role]:
            raise invalid(f"these workers cannot serve: none does {role} (add one of role {role} or both)")
    exchanging = counts["both"] if transfer.both_receives else 0
    if exchanging and counts["decode"] and (transfer.transfer_port or transfer.frames_port):
        raise invalid("with both_receives, link ports are for decode workers or for workers of role both")
    listening, everyone = counts["decode"] + exchanging, sum(counts.values())
    process_configs.check_ports(
        (
            ("transfer.transfer_port", transfer.transfer_port, listening),
            ("transfer.frames_port", transfer.frames_port, listening),
            ("worker_metrics_port", settings.worker_metrics_port, everyone),
        )
    )
    if settings.router.stored_responses.ttl_s is not None and settings.state.redis_url == NO_STATE:
        raise invalid("router.stored_responses.ttl_s needs Redis: state.redis_url is none")
    if settings.drain_s > _LONGEST_DRAIN_S:
        raise invalid(f"drain_s is {settings.drain_s:g}: at most {_LONGEST_DRAIN_S:g} for baton up")


def _check_secret(settings: Settings) -> None:
    """Raises `BatonError(INVALID)` where other machines reach AdminService, or run the workers, but no
    cluster secret is configured."""
    if settings.cluster_secret:
        return
    host, ray = settings.router.admin_host, settings.supervision
    if not is_loopback(host):
        raise invalid(
            f"an admin port on {host} needs a cluster secret: set {SECRET_VARIABLE} or --cluster-secret-file"
        )
    if ray.on_another_ray:
        raise invalid(
            f"--ray-address {ray.ray_address} needs a cluster secret that the machines of "
            f"that Ray have too: cluster_secret in --secrets-file, or {SECRET_VARIABLE}, on all of them"
        )
