"""The kinds of grammar by which an output can be guided. Imports no grammar compiler."""

from __future__ import annotations

from baton.v1.types_pb2 import Grammar

# By the names of their fields, as a worker describes them.
OUTPUT_FORMATS: tuple[str, ...] = tuple(
    field.name for field in Grammar.DESCRIPTOR.oneofs_by_name["kind"].fields
)
