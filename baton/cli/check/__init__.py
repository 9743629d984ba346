"""`baton check`: asks a running router for health, models and two short generations.

Imported by `baton.cli.main`; it imports `baton.cli.common` alone.
"""
