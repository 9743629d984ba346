"""Ray's calls with deadlines, and its many ways to say that an actor is not there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayActorError, RayError

from baton.cluster.supervision import HomeSilentError

T = TypeVar("T")

# A call between processes of one cluster takes about a millisecond.
CALL_S = 2.0
# Making an actor takes a new Python process that imports Ray.
CREATE_S = 30.0


class ActorGoneError(Exception):
    """The actor is dead, and stays so."""


async def answer(call: Awaitable[T], timeout_s: float = CALL_S) -> T:
    """What an actor's method returns. Raises ActorGoneError, or HomeSilentError where nothing is known."""
    waiting = asyncio.ensure_future(_await(call))
    done, _ = await asyncio.wait({waiting}, timeout=timeout_s)
    if not done:
        waiting.cancel()
        raise HomeSilentError(f"no answer within {timeout_s:g} s")
    try:
        return waiting.result()
    except ActorDiedError as error:
        raise ActorGoneError(str(error).strip().splitlines()[0]) from error
    except (RayActorError, RayError) as error:
        raise HomeSilentError(type(error).__name__) from error


async def _await(call: Awaitable[T]) -> T:
    return await call


async def aside(work: Callable[[], T], timeout_s: float = CALL_S) -> T:
    """A blocking call of Ray's in a thread. Raises HomeSilentError at the deadline."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.to_thread(work)
    except TimeoutError:
        raise HomeSilentError(f"Ray did not answer within {timeout_s:g} s") from None
    except RayError as error:
        raise HomeSilentError(type(error).__name__) from error


async def find(name: str, namespace: str) -> ActorHandle[Any] | None:
    """A named actor; None where there is none. Raises HomeSilentError."""
    try:
        return await aside(lambda: ray.get_actor(name, namespace))
    except ValueError:
        return None
