"""One request of three known tokens: served with the right output, or failed."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from tests.router.conftest import Site, ids_request, tokens_of
from tests.router.fake_model import expected

PROMPT = [9, 8, 7]
COUNT = 24


async def served(here: Site, count: int = COUNT, **fields: Any) -> int:
    """Runs one request, checks its tokens, returns how many attempts it took."""
    responses = await here.generate(ids_request(PROMPT, count, **fields))
    assert tokens_of(responses) == expected(PROMPT, count)
    return responses[-1].trace.attempts


async def failure(here: Site, timeout: float = 10, **fields: Any) -> tuple[grpc.StatusCode, str]:
    """Runs one request that must fail. Returns its status and details."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await here.generate(ids_request(PROMPT, COUNT, **fields), timeout)
    return caught.value.code(), caught.value.details() or ""
