"""`baton check`: whether a router serves, as one of its clients sees it. `helm test` runs it."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.base.errors import BatonError, ErrorKind
from baton.client import Client
from baton.client.channel import OPTIONS
from baton.client.responses import to_error
from services.cli.check.http_api import HttpApi
from services.cli.check.target import Target, target_of
from services.cli.check.tls import http_context, usable
from services.cli.common.messages import write_line
from services.common.config.settings_tree.reader import invalid
from services.common.config.settings_tree.secret_files import read_secret_file

_TOKENS = 8
_PROMPT = "Hello"
RETRY_S = 1.0
# Timeout of one attempt: a connection that hangs leaves time for others.
_ATTEMPT_S = 60.0

Step = Callable[[float], str]


def run(arguments: argparse.Namespace) -> int:
    """Checks one thing after the other and writes a line for each to stdout.

    Raises `BatonError(UNAVAILABLE)` with what did not succeed within `timeout_s`.
    """
    target = target_of(arguments)
    check = Check(target)
    deadline = time.monotonic() + target.timeout_s
    for name, step in check.steps.items():
        write_line(sys.stdout, f"{name}: {until_done(name, step, deadline)}")
    return 0


def until_done(name: str, step: Step, deadline: float) -> str:
    """The step's result; tries again until the deadline. Raises BatonError with why the last attempt failed,
    or the one before it where the last was cut off: that says more."""
    why = ""
    while True:
        began = time.monotonic()
        try:
            return step(min(deadline, began + _ATTEMPT_S))
        except BatonError as error:
            ended = time.monotonic()
            if not why or ended < deadline:
                why = error.message
            if ended + RETRY_S >= deadline:
                raise BatonError(ErrorKind.UNAVAILABLE, f"{name}: {why}") from None
        time.sleep(RETRY_S)


class Check:
    """The steps, each of which takes its deadline in monotonic seconds and returns what it has found."""

    def __init__(self, target: Target) -> None:
        """Raises `BatonError(INVALID)` where a file is unusable."""
        self._target = target
        self._key = _first_key(target.api_keys_file) if target.api_keys_file else None
        self._tls = usable(target.tls) if target.uses_tls else None
        context = http_context(self._tls) if self._tls else None
        self._http = HttpApi(target.http, self._key, context, target.tls.server_name)

    @property
    def steps(self) -> dict[str, Step]:
        """The steps by name, in order."""
        return {
            "GET /health": self._health,
            "GET /v1/models": self._models,
            "grpc.health.v1": self._grpc_health,
            "RouterService.Generate": self._generate,
            "POST /v1/completions": self._completions,
        }

    def _health(self, deadline: float) -> str:
        self._http.get("/health", deadline)
        return "ok"

    def _models(self, deadline: float) -> str:
        listed = self._http.get("/v1/models", deadline)
        names = [model.get("id") for model in listed.get("data", ()) if isinstance(model, dict)]
        if self._target.model not in names:
            raise BatonError(
                ErrorKind.NOT_FOUND, f"{self._target.model} is not served, but {', '.join(map(str, names))}"
            )
        return self._target.model

    def _grpc_health(self, deadline: float) -> str:
        with self._channel() as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=deadline - time.monotonic(), wait_for_ready=True
                )
            except grpc.RpcError as error:
                raise to_error(error) from None
        state: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            raise BatonError(ErrorKind.UNAVAILABLE, state)
        return state

    def _channel(self) -> grpc.Channel:
        if self._tls is None:
            return grpc.insecure_channel(self._target.grpc, options=OPTIONS)
        options = [*OPTIONS, *self._tls.options()]
        return grpc.secure_channel(self._target.grpc, self._tls.credentials(), options=options)

    def _generate(self, deadline: float) -> str:
        target = self._target
        began, first, tokens = time.monotonic(), None, 0
        with Client(target.grpc, model=target.model, api_key=self._key, tls=self._tls) as client:
            stream = client.generate(
                _PROMPT, deadline=deadline - began, max_tokens=_TOKENS, ignore_eos=True, temperature=0.0
            )
            for delta in stream:
                first = first or time.monotonic()
                tokens += len(delta.tokens)
        return _measured(tokens, began, first)

    def _completions(self, deadline: float) -> str:
        body = {
            "model": self._target.model,
            "prompt": _PROMPT,
            "max_tokens": _TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began, first, tokens = time.monotonic(), None, 0
        for event in self._http.events("/v1/completions", body, deadline):
            if error := event.get("error"):
                raise BatonError(ErrorKind.UNAVAILABLE, str(error.get("message")))
            first = first or time.monotonic()
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        return _measured(tokens, began, first)


def _measured(tokens: int, began: float, first: float | None) -> str:
    if tokens != _TOKENS or first is None:
        raise BatonError(ErrorKind.UNAVAILABLE, f"{tokens} tokens instead of {_TOKENS}")
    return f"{tokens} tokens, time to first token {first - began:.3f} s"


def _first_key(path: Path) -> str:
    lines = (line.strip() for line in read_secret_file(path, "api_keys_file").splitlines())
    key = next((line for line in lines if line and not line.startswith("#")), None)
    if key is None:
        raise invalid(f"api_keys_file {path} has no key")
    return key
