"""The subcommands of `loadgen`, one file each. Only `loadgen.cli` imports them."""
