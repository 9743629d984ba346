"""`baton status` and `baton top`, and the views that `baton demo` and `baton pool` share with them.

Imported by `baton.cli.main`, `baton.cli.demo` and `baton.cli.pool`; it imports `baton.cli.common` alone.
"""
