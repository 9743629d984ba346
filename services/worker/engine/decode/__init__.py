"""The decode side of an engine: tickets, reserved slots and their blocks, the receiving end of handoffs.

The decode steps themselves are in `baton.engine.decode`. Imported by the engine's top level and, for
handoffs within one worker, by `prefill`.
"""
