"""Launches planned steps on a device, as graphs or in plain torch, and accounts for those that have ended:
streams, events, first tokens, the mailbox of slots, watchdogs. Imported by `services.worker.engine` and
benchmarks."""
