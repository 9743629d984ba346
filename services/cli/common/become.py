"""Replaces the command by the process that it is for."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from pydantic import BaseModel

from baton.base.python_module import python_module
from services.cli.common.free_port import require_free
from services.common.config.cluster import ClusterConfig
from services.common.processes.child_protocol import DETACHED


def become(module: str, config: BaseModel) -> NoReturn:
    """Replaces this process by `python -m MODULE`, which reads `config` from stdin.

    The configuration, which has secrets, is in an anonymous file: neither in arguments nor on a disk.
    """
    descriptor = os.memfd_create("baton-config")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(config.model_dump_json().encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.dup2(descriptor, sys.stdin.fileno())
    command = python_module(module, DETACHED)
    os.execv(command[0], command)


def become_group(config: ClusterConfig) -> NoReturn:
    """Replaces this process by the one that supervises a group of workers. Raises BatonError(INVALID) where
    its admin port is taken."""
    if config.admin_http_port:
        require_free(config.bound_admin_http_host, config.admin_http_port, "worker.admin_http_port")
    become("services.cluster.group", config)
