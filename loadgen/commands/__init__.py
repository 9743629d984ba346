"""The commands of `loadgen`, one file each; only `loadgen.cli` may import them."""
