"""What several subcommands share: AdminService calls, optional dependencies, formatting, output.

Every folder of `baton.cli` may import it; it imports none of them.
"""
