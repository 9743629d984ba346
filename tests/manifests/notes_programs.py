"""Stands in for `kubectl` and `grpcurl` in the commands of the chart's notes.

    kubectl -n NS port-forward service/NAME HERE:THERE …
    kubectl -n NS get secret NAME -o jsonpath='{.data.KEY}'
    grpcurl [-plaintext | -insecure] [-cert FILE -key FILE] [-H HEADER] ADDRESS grpc.health.v1.Health/Check

The variable `CLUSTER` names a file with the cluster's secrets and the addresses of its Services.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import functools
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

CLUSTER = "BATON_TEST_CLUSTER"
_WITHIN_S = 20.0


def main(program: str, arguments: list[str]) -> None:
    {"kubectl": kubectl, "grpcurl": grpcurl}[program](arguments)


def kubectl(arguments: list[str]) -> None:
    cluster: Any = json.loads(Path(os.environ[CLUSTER]).read_text())
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", choices=["llm"], required=True)
    commands = parser.add_subparsers(dest="command", required=True)
    forward = commands.add_parser("port-forward")
    forward.add_argument("service")
    forward.add_argument("ports", nargs="+")
    get = commands.add_parser("get")
    get.add_argument("kind", choices=["secret"])
    get.add_argument("name")
    get.add_argument("-o", required=True)
    asked = parser.parse_args(arguments)
    if asked.command == "port-forward":
        address = cluster["services"][asked.service.removeprefix("service/")]
        asyncio.run(_forward(address, [tuple(map(int, pair.split(":"))) for pair in asked.ports]))
    else:
        key = re.fullmatch(r"jsonpath=\{\.data\.([\w-]+)\}", asked.o)
        assert key is not None, asked.o
        print(base64.b64encode(cluster["secrets"][asked.name][key.group(1)].encode()).decode(), end="")


async def _forward(address: str, ports: list[tuple[int, ...]]) -> None:
    for here, there in ports:
        await asyncio.start_server(functools.partial(_join, address, there), "127.0.0.1", here)
    await asyncio.Event().wait()


async def _join(address: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    to_reader, to_writer = await asyncio.open_connection(address, port)
    await asyncio.gather(_copy(reader, to_writer), _copy(to_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


def grpcurl(arguments: list[str]) -> None:
    """`-insecure` verifies nothing there. Python's gRPC has no such mode: ca.crt and the Service's name
    here."""
    parser = argparse.ArgumentParser(prefix_chars="-")
    security = parser.add_mutually_exclusive_group(required=True)
    security.add_argument("-plaintext", action="store_true")
    security.add_argument("-insecure", action="store_true")
    parser.add_argument("-cert", type=Path)
    parser.add_argument("-key", type=Path)
    parser.add_argument("-H", default="")
    parser.add_argument("address")
    parser.add_argument("method", choices=["grpc.health.v1.Health/Check"])
    asked = parser.parse_args(arguments)
    name, _, value = asked.H.partition(": ")
    metadata = ((name, value),) if name else ()
    with _channel(asked) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=_WITHIN_S, wait_for_ready=True, metadata=metadata
        )
    state = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    print(json.dumps({"status": state}))


def _channel(asked: argparse.Namespace) -> grpc.Channel:
    if asked.plaintext:
        return grpc.insecure_channel(asked.address)
    pair = (asked.key.read_bytes(), asked.cert.read_bytes()) if asked.cert else (None, None)
    credentials = grpc.ssl_channel_credentials(Path("ca.crt").read_bytes(), *pair)
    return grpc.secure_channel(asked.address, credentials, [("grpc.ssl_target_name_override", "demo-baton")])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
