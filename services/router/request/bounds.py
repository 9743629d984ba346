"""Bounds of a request beside those of its fields, which `baton.request_fields.table` has."""

from __future__ import annotations

from baton.request_fields.table import MOST_ITEMS

DEFAULT_MAX_TOKENS = 16
MAX_GRAMMAR_BYTES = 128 * 1024
MAX_CHOICES = 10_000
MAX_RULES = 2_000
MAX_TOOLS = MOST_ITEMS["tools"]
