"""Limits that a worker describes are those it enforces: it accepts each limit, and one beyond it the request
is for another worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.base.errors import ErrorKind
from baton.v1.types_pb2 import Sampling
from baton.v1.worker_pb2 import WorkerLimits
from kvtransfer.protocol.addresses import IPC
from kvtransfer.transports.ipc.control import socket_namespace
from tests.worker.engine.stepped_engine import SteppedEngine, prefill, reserve


def limits_of(engine: SteppedEngine) -> WorkerLimits:
    (ready,) = [event.ready for event in engine.events if event.HasField("ready")]
    return ready.limits


@pytest.fixture
def full(tmp_path: Path) -> Iterator[SteppedEngine]:
    made = SteppedEngine(tmp_path, kv_blocks=11, prefill_queue=2, max_logprobs=3, prefix_cache=False)
    yield made
    made.close()


def refused(engine: SteppedEngine, number: int) -> ErrorKind | None:
    """The kind of the error of a command; None where it was accepted."""
    engine.turn()
    failed = [event.failed for event in engine.events if event.id == number and event.HasField("failed")]
    return ErrorKind(failed[0].kind) if failed else None


@pytest.mark.parametrize(("beyond", "kind"), [(0, None), (2, ErrorKind.CONFLICT)])
def test_tokens_of_a_sequence(full: SteppedEngine, beyond: int, kind: ErrorKind | None) -> None:
    """The last token of an output has no KV: one more than described fits, which the router does not use."""
    tokens = limits_of(full).kv_tokens + beyond
    assert tokens == 40 + beyond
    assert refused(full, full.send(reserve=reserve(tokens=tokens - 4, most=4))) is kind


@pytest.mark.parametrize(("beyond", "kind"), [(0, None), (1, ErrorKind.CONFLICT)])
def test_tokens_of_a_prompt(full: SteppedEngine, beyond: int, kind: ErrorKind | None) -> None:
    tokens = limits_of(full).kv_tokens + beyond
    request = prefill(None, tokens=tokens, most=0)
    assert refused(full, full.send(prefill=request)) is kind


@pytest.mark.parametrize(("beyond", "kind"), [(0, None), (1, ErrorKind.CONFLICT)])
def test_logprobs(full: SteppedEngine, beyond: int, kind: ErrorKind | None) -> None:
    wanted = limits_of(full).max_logprobs + beyond
    assert wanted == 3 + beyond
    request = prefill(None, most=0, sampling=Sampling(top_p=1, logprobs=wanted))
    assert refused(full, full.send(prefill=request)) is kind


def test_prompts(full: SteppedEngine) -> None:
    most = limits_of(full).max_prefills
    sent = [full.send(prefill=prefill(None, name=bytes([65 + n]), most=0)) for n in range(most + 1)]
    assert [refused(full, number) for number in sent] == [None] * most + [ErrorKind.OVERLOADED]


def test_transports(tmp_path: Path) -> None:
    """Prefill sends and decode receives; those that do not leave the host name it."""
    here = f"{IPC}:{socket_namespace()}"
    made = {}
    for role in ("prefill", "decode", "both"):
        for transport in ("grpc", "ipc", "auto"):
            engine = SteppedEngine(tmp_path, role, transport=transport)
            made[role, transport] = limits_of(engine)
            engine.close()
    over = {"grpc": ["grpc"], "ipc": [here], "auto": [here, "grpc"]}
    for (role, transport), limits in made.items():
        assert list(limits.receives_over) == (over[transport] if role == "decode" else [])
        if role == "prefill":
            assert list(limits.sends_over) == over[transport]
