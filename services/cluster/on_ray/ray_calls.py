"""Calls to Ray with deadlines, and its exceptions mapped to two: the actor is dead, or it does not answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayActorError, RayError

from services.cluster.supervision.supervisor import UnresponsiveError

T = TypeVar("T")

# A call between processes of one cluster takes about a millisecond.
CALL_S = 2.0
# Creating an actor starts a Python process that imports Ray.
CREATE_S = 30.0


class ActorGoneError(Exception):
    """The actor is dead and will not come back."""


def join_ray(**options: Any) -> None:  # noqa: ANN401 (Ray does not declare them)
    """Calls `ray.init` from the root folder: processes of Ray import from the current folder of their
    driver."""
    with contextlib.chdir("/"):
        ray.init(**options)


async def call_actor(call: Awaitable[T], timeout_s: float = CALL_S) -> T:
    """Returns the result of an actor's method. Raises ActorGoneError, or UnresponsiveError if it does not
    answer in time."""
    waiting = asyncio.ensure_future(_await(call))
    done, _ = await asyncio.wait({waiting}, timeout=timeout_s)
    if not done:
        waiting.cancel()
        raise UnresponsiveError(f"no answer within {timeout_s:g} s")
    try:
        return waiting.result()
    except ActorDiedError as error:
        raise ActorGoneError(str(error).strip().splitlines()[0]) from error
    except (RayActorError, RayError) as error:
        raise UnresponsiveError(type(error).__name__) from error


async def _await(call: Awaitable[T]) -> T:
    return await call


async def in_thread(work: Callable[[], T], timeout_s: float = CALL_S) -> T:
    """Runs a blocking function of Ray in a thread. Raises UnresponsiveError at the deadline."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.to_thread(work)
    except TimeoutError:
        raise UnresponsiveError(f"Ray did not answer within {timeout_s:g} s") from None
    except RayError as error:
        raise UnresponsiveError(type(error).__name__) from error


async def find_actor(name: str, namespace: str) -> ActorHandle[Any] | None:
    """The actor with this name, or None. Raises UnresponsiveError where Ray does not answer."""
    try:
        return await in_thread(lambda: ray.get_actor(name, namespace))
    except ValueError:
        return None
