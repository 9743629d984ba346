"""`baton up`: settings, model folder, and the child processes (router, workers, embedded Redis) with their
restarts.

Imported by `baton.cli.main`, `baton.cli.demo` and `baton.cli.worker`; it imports `baton.cli.common` alone.
"""
