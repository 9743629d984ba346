"""`baton fetch-model`: downloads a model from the hub into a folder, once for all processes that share it.

Imported by `baton.cli.main`; it imports `baton.cli.common` alone, and neither torch nor the engine.
"""
