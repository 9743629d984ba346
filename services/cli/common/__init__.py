"""Code that several subcommands share: AdminService calls, optional dependencies, formatting, output.

Every folder of `services.cli` may import it; it imports none of them.
"""
