"""`baton ray`: workers on an existing Ray cluster, and what the containers of its nodes run.

Imported by `services.cli.commands`; it imports `services.cli.common` and `services.cli.up`, and Ray nowhere.
"""
