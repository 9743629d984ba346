"""Requests on their way to the engine, which knows no grammars: only that there is one."""

from __future__ import annotations

from baton.v1.decode_pb2 import ReserveRequest
from baton.v1.prefill_pb2 import PrefillRequest
from baton.v1.types_pb2 import Grammar


def without_grammar(request: ReserveRequest | PrefillRequest) -> Grammar | None:
    """Replaces a request's grammar by an empty one and returns it; None where it has none."""
    if not request.HasField("grammar"):
        return None
    grammar = Grammar()
    grammar.CopyFrom(request.grammar)
    request.grammar.Clear()
    request.grammar.SetInParent()
    return grammar
