"""`baton check`: asks a running router for health, models and two short generations.

Imported by `services.cli.main`; it imports `services.cli.common` alone.
"""
