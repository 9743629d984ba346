"""`baton status`, once or refreshed, and the views that `baton demo` and `baton pool` share with them.

Imported by `services.cli.main`, `services.cli.demo` and `services.cli.pool`; it imports `services.cli.common`
alone.
"""
