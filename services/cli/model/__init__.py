"""`baton model`: downloads a model from the hub, once for all processes that share its folder, and compiles
kernels for an image.

Imported by `services.cli.commands`; it imports `services.cli.common` and `services.cli.up`, and neither torch
nor the engine.
"""
