"""Finds the served model where the user gave none."""

from __future__ import annotations

import json
import os

import grpc
import grpc.aio

from baton.v1.router_pb2 import ListModelsRequest
from baton.v1.router_pb2_grpc import RouterServiceStub
from loadgen.common.errors import LoadgenError
from loadgen.common.settings import TargetSettings
from loadgen.targets.grpc_target import CONNECT_S, OPTIONS, address_of, wait_ready
from loadgen.targets.target import Failure


async def served_model(settings: TargetSettings) -> str:
    """The only one, or the first. Raises LoadgenError where the server lists none."""
    names = await (_over_grpc(settings.url) if settings.url.startswith("grpc://") else _over_http(settings))
    if not names:
        raise LoadgenError(f"{settings.url} does not say which model it serves: --model names it")
    return names[0]


async def _over_grpc(url: str) -> list[str]:
    async with grpc.aio.insecure_channel(address_of(url), options=OPTIONS) as channel:
        await wait_ready([channel], url)
        try:
            response = await RouterServiceStub(channel).ListModels(ListModelsRequest(), timeout=CONNECT_S)
        except grpc.aio.AioRpcError:
            return []
    return [model.id for model in response.models]


async def _over_http(settings: TargetSettings) -> list[str]:
    from loadgen.targets.http_get import get

    key = os.environ.get(settings.api_key_env)
    url = settings.url.rstrip("/").removesuffix("/v1")
    try:
        body = await get(f"{url}/v1/models", CONNECT_S, f"Authorization: Bearer {key}\r\n" if key else "")
        return [str(model["id"]) for model in json.loads(body)["data"]]
    except Failure as failure:
        if failure.outcome == "CONNECT":
            raise LoadgenError(f"no answer from {settings.url} ({failure.detail})") from None
        return []
    except (ValueError, LookupError, TypeError):
        return []
