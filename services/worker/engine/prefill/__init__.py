"""The prefill side of an engine: Prefill calls, their steps and replies, the sending end of handoffs.

The prefill steps themselves are in `baton.engine.prefill`. Imported by the engine's top level only.
"""
