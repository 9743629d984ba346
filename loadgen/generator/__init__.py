"""Runs a load in several processes with one clock. May import `loadgen.load`, `loadgen.targets` and
`loadgen.common`."""
