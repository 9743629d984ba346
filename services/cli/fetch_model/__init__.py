"""`baton fetch-model`: downloads a model from the hub into a folder, once for all processes that share it.

Imported by `services.cli.main`; it imports `services.cli.common` alone, and neither torch nor the engine.
"""
