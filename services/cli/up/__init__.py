"""`baton up`: settings, model folder, and the child processes (router, workers, embedded Redis) with their
restarts.

Imported by `services.cli.main`, `services.cli.demo` and `services.cli.worker`; it imports
`services.cli.common` alone.
"""
