"""The prefix cache of an engine that is turned by hand: the same tokens whatever was found, and nothing leaked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.v1.engine_pb2 import AuditCommand
from baton.v1.worker_pb2 import PrefixAudit
from tests.worker.turned import Turned, prefill, reserve

BLOCK = 4


NUMBERS = itertools.count(1)


def ask(turned: Turned, prompt: list[int], most: int = 4) -> tuple[list[int], int]:
    """The tokens of a request, and how many of its prompt's were found."""
    name = next(NUMBERS).to_bytes(2, "little")
    ticket = turned.ask(reserve=reserve(name=name, tokens=len(prompt), most=most)).reserved.ticket
    command = prefill(ticket, name=name, tokens=len(prompt), most=most)
    command.request.token_ids[:] = prompt
    number = turned.send(prefill=command)
    turned.records.clear()
    turned.run_out()
    first = next(e for e in turned.events if e.id == number and e.prefill.HasField("first_token"))
    return [r.token for r in turned.records if r.has_token], first.prefill.first_token.cached_tokens


def audit(turned: Turned) -> PrefixAudit:
    return turned.ask(audit=AuditCommand()).audit.prefixes


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Turned]:
    """The same model without a cache."""
    turned = Turned(tmp_path_factory.mktemp("truth"), prefix_cache=False)
    yield turned
    turned.close()


@pytest.mark.parametrize("chunk", [3, 8, 64])
def test_tokens_are_the_same_around_every_boundary(tmp_path: Path, truth: Turned, chunk: int) -> None:
    turned = Turned(tmp_path, chunk_tokens=chunk)
    prompt = [(7 * i) % 60 + 3 for i in range(40)]
    for shared in range(1, 22):
        tokens = prompt[:shared] + [(11 * i + shared) % 60 + 3 for i in range(5)]
        wanted, none = ask(truth, tokens)
        assert none == 0
        first, _ = ask(turned, tokens)
        again, cached = ask(turned, tokens)
        assert first == again == wanted
        assert cached == (len(tokens) - 1) // BLOCK * BLOCK
        turned.assert_free()
    turned.close()
