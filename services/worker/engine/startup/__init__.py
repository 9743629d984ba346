"""The engine's start, before it serves: plans memory, loads the model, sets up prefix cache, links and
prefill.

Imported by the rest of the engine; imports none of it.
"""
